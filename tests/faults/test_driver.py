"""The driver is stopped at any moment of a study, by every means: the same command goes on.

One study for each means. Its driver has ten lives under SIGKILL, and five under each of the others
unless pytest is told --all-moments. Each life ends at another moment, somewhere from the driver's
first tenths of a second to the middle of a trial. After each of them nothing may run any more,
nothing may lie in shared memory or in the folder for temporary files, and what was measured must be
there. One more life finishes.
"""

from __future__ import annotations

import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from hvd_autosync.traces import StudyStatus

if TYPE_CHECKING:
    from conftest import Job, Life

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: Name -> (signals, exit status).
MEANS: dict[str, tuple[list[signal.Signals], int]] = {
    "Ctrl-C": ([signal.SIGINT], 130),
    "Ctrl-C twice": ([signal.SIGINT, signal.SIGINT], 130),
    "SIGTERM": ([signal.SIGTERM], 143),
    "SIGKILL": ([signal.SIGKILL], -9),
}
#: What the driver has said before it is stopped, or how many trials have ended. All count for
#: SIGKILL; signals that a driver handles take every second, unless pytest is told --all-moments.
MOMENTS = ("", "tuning", "links", 0, 1, 1, 1, 2, 2, 3)


def has_come(life: Life, moment: str | int) -> bool:
    if isinstance(moment, int):
        return "study" in life.said and life.trials >= moment
    return moment in life.said


@pytest.mark.timeout(600)
@pytest.mark.parametrize("means", MEANS)
def test_a_driver_that_is_stopped_at_any_moment(
    means: str, job: Job, pytestconfig: pytest.Config
) -> None:
    signals, expected = MEANS[means]
    dice = random.Random(means)
    kept: list[object] = []
    every = means == "SIGKILL" or pytestconfig.getoption("--all-moments")
    moments = MOMENTS if every else MOMENTS[list(MEANS).index(means) % 2 :: 2]
    for lives, moment in enumerate(moments, start=1):
        life = job.start(trials=16)
        life.until(lambda life=life, moment=moment: has_come(life, moment))
        delay_s = dice.uniform(0.1, 2.0) if not moment else dice.uniform(0, 0.5)
        time.sleep(delay_s)
        life.kill(*signals)
        status = life.wait()
        if status == 0 and kept:
            break  # no further gain was in sight, and the study ended before it could be stopped
        if moment:
            assert status == expected, (moment, delay_s, life.said)
            assert "Traceback" not in life.said
        else:  # perhaps before anything of ours was loaded
            assert status in (expected, -signals[0])
        job.await_nothing()
        if means != "SIGKILL":
            assert job.temporary_files() == [], (moment, delay_s)
        results = job.results()
        assert results[: len(kept)] == kept
        kept = results
        for study in job.store.studies():
            assert len(job.store.trials(study.study_id)) - len(kept) <= lives
    last = job.start(trials=16)
    assert last.wait() == 0, last.said
    (study,) = job.store.studies()
    assert study.status is StudyStatus.FINISHED
    assert job.results()[: len(kept)] == kept
