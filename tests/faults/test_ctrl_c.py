"""Ctrl-C in a tuning that a training follows: once it ends the tuning, twice everything.

One study, whose drivers are interrupted at several moments. Each time nothing of the tuning may run
any more when the training begins, what was measured must be there, and the same command goes on.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from hvd_autosync.traces import StudyStatus

if TYPE_CHECKING:
    from conftest import Job, Life

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

STEPS = 400


def has_come(life: Life, moment: str | int) -> bool:
    if isinstance(moment, int):
        return ": study" in life.said and life.trials >= moment
    return moment in life.said


def interrupted(job: Job, moment: str | int) -> Life:
    """A driver whose Ctrl-C was pressed at a moment: what it has said, or trials that ended."""
    life = job.start("--steps", str(STEPS), trials=16, options=("--autosync-transfer=never",),
                     trains=True)  # fmt: skip
    assert life.until(lambda: has_come(life, moment)), life.said
    life.kill(signal.SIGINT)
    return life


@pytest.mark.timeout(600)
def test_once_it_trains_and_twice_it_stops(job: Job) -> None:
    kept: list[object] = []
    for moment in ("Ctrl-C ends it and starts the training", "links", 2):
        life = interrupted(job, moment)
        assert life.wait() == 0, life.said
        assert life.printed.count(f"trained {STEPS} steps") == 1
        assert "Traceback" not in life.said
        assert "tuning was ended" in life.said and "the training runs as it is" in life.said
        job.await_nothing()
        assert job.temporary_files() == []
        results = job.results()
        assert results[: len(kept)] == kept
        kept = results
    assert len(kept) >= 2

    life = interrupted(job, 0)
    assert life.until(lambda: "tuning was ended" in life.said), life.said
    life.kill(signal.SIGINT)
    assert life.wait() == 130, life.said
    assert "trained" not in life.printed and "Traceback" not in life.said
    job.await_nothing()

    (study,) = job.store.studies()
    assert study.status is StudyStatus.RUNNING
    last = job.start("--steps", str(STEPS), trials=16, options=("--autosync-transfer=never",),
                     trains=True)  # fmt: skip
    assert last.wait() == 0, last.said
    (study,) = job.store.studies()
    assert study.status is StudyStatus.FINISHED
    assert job.results()[: len(kept)] == kept
