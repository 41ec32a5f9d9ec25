"""The driver is stopped at any moment of a study, by every means: the same command goes on.

Two studies, whose drivers have several lives each: SIGKILL ends most of one, and else its terminal
is closed; the signals that a driver handles take turns in the other. Each life ends at another
moment, somewhere from the driver's first tenths of a second to the middle of a trial. After each of
them nothing may run any more, nothing may lie in shared memory or in the folder for temporary
files, and what was measured must be there. One more life finishes.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from hvd_autosync.traces import StudyStatus

if TYPE_CHECKING:
    from conftest import Job, Life

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

Means = tuple[list[signal.Signals], int]
CLOSED: Means = ([signal.SIGHUP], 129)
#: Signals that end a life, and the exit status then; those of one study take turns.
MEANS: dict[str, list[Means]] = {
    "handled": [
        ([signal.SIGINT], 130),
        ([signal.SIGTERM], 143),
        ([signal.SIGINT] * 2, 130),
        CLOSED,
    ],
    "SIGKILL": [*[([signal.SIGKILL], -9)] * 3, CLOSED],
}
#: Output of the driver after which it is stopped, or the number of ended trials.
MOMENTS = ("", "tuning", "links", 0, 1, 1, 1, 2, 2, 3)
SOME_MOMENTS = ("links", 1)


def has_come(life: Life, moment: str | int) -> bool:
    if isinstance(moment, int):
        return "study" in life.said and life.trials >= moment
    return moment in life.said


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "means",
    [pytest.param(means, marks=[] if means == "SIGKILL" else pytest.mark.wide) for means in MEANS],
)
@pytest.mark.parametrize(
    ("moments", "trials"),
    [
        pytest.param(MOMENTS, 16, marks=pytest.mark.wide, id="many"),
        pytest.param(SOME_MOMENTS, 4, id="some"),
    ],
)
def test_a_driver_that_is_stopped_at_any_moment(
    means: str, moments: tuple[str | int, ...], trials: int, job: Job
) -> None:
    dice = random.Random(means)
    kept: list[object] = []
    turns = itertools.cycle(MEANS[means])
    for lives, (moment, (signals, expected)) in enumerate(zip(moments, turns, strict=False), 1):
        life = job.start(trials=trials)
        life.until(lambda life=life, moment=moment: has_come(life, moment))
        delay_s = dice.uniform(0.1, 2.0) if not moment else dice.uniform(0, 0.5)
        time.sleep(delay_s)
        life.kill(*signals)
        status = life.wait()
        if status == 0 and kept:  # no further gain was in sight: a new study for the rest
            for study in job.store.studies():
                job.store.delete(study.study_id)
            kept = []
            continue
        if moment:
            assert status == expected, (moment, delay_s, life.said)
            assert "Traceback" not in life.said
        else:  # perhaps before anything of ours was loaded, or while Python itself starts
            starts = "Failed to import the site module" in life.said
            assert starts or status in (expected, -signals[0]), life.said
        job.await_nothing()
        if means != "SIGKILL":
            assert job.temporary_files() == [], (moment, delay_s)
        results = job.results()
        assert results[: len(kept)] == kept
        assert len(results) - len(kept) >= life.trials, "what it has reported is kept"
        kept = results
        for study in job.store.studies():
            assert study.status is StudyStatus.RUNNING
            assert len(job.store.trials(study.study_id)) - len(kept) <= lives
    last = job.start(trials=trials)
    assert last.wait() == 0, last.said
    (study,) = job.store.studies()
    assert study.status is StudyStatus.FINISHED
    assert job.results()[: len(kept)] == kept
