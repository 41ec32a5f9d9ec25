"""Ctrl-C in a tuning that a training follows: once it ends the tuning, twice everything.

One study, whose drivers are interrupted at several moments. Each time nothing of the tuning may run
any more when the training begins, what was measured must be there, and the same command goes on.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hvd_autosync.commands.tune_and_train import tune_and_train
from hvd_autosync.engine import tuning
from hvd_autosync.engine.options import Options
from hvd_autosync.launch.job import Job as LaunchedJob
from hvd_autosync.search_space import (
    Host,
    ModelProfile,
    ParameterProfile,
    Strategy,
    TrialResult,
    TrialSpec,
    TrialStatus,
)
from hvd_autosync.search_space.trial import RankReport
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.traces import StudyStatus, TraceStore

if TYPE_CHECKING:
    from conftest import Job, Life

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: More than a training makes before the second Ctrl-C has been passed on to it.
STEPS = 1500


def has_come(life: Life, moment: str | int) -> bool:
    if isinstance(moment, int):
        return ": study" in life.said and life.trials >= moment
    return moment in life.said


def begun(job: Job, trials: int) -> Life:
    """A driver of the study, and of the training after it."""
    options = ("--autosync-transfer=never",)
    return job.start("--steps", str(STEPS), trials=trials, options=options, trains=True)


def interrupted(job: Job, moment: str | int, trials: int) -> Life:
    """A driver whose Ctrl-C was pressed at a moment: its output, or the trials that ended."""
    life = begun(job, trials)
    assert life.until(lambda: has_come(life, moment)), life.said
    life.kill(signal.SIGINT)
    return life


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("moments", "trials"),
    [
        pytest.param(
            ("Ctrl-C ends tuning and starts the training", "links", 2),
            8,
            marks=pytest.mark.wide,
            id="many",
        ),
        pytest.param((2,), 4, id="some"),
    ],
)
def test_once_it_trains_and_twice_it_stops(
    moments: tuple[str | int, ...], trials: int, job: Job
) -> None:
    kept: list[object] = []
    if "links" not in moments:
        job.keep_links()
    for moment in moments:
        life = interrupted(job, moment, trials)
        assert life.wait() == 0, life.said
        assert life.printed.count(f"trained {STEPS} steps") == 1
        assert "Traceback" not in life.said
        assert "tuning was ended" in life.said and "the training runs unchanged" in life.said
        job.await_nothing()
        assert job.temporary_files() == []
        results = job.results()
        assert results[: len(kept)] == kept
        kept = results
    assert len(kept) >= 2

    life = interrupted(job, 0, trials)
    assert life.until(lambda: "tuning was ended" in life.said), life.said
    life.kill(signal.SIGINT)
    assert life.wait() == 130, life.said
    assert "trained" not in life.printed
    # If its ranks have begun, Horovod's launcher reports how they ended, by a traceback of its own.
    reports = life.said.count("RuntimeError: Horovod detected that one or more processes exited")
    assert reports <= 1, life.said
    # The process above each rank ends it from a thread, which fails if it has just ended.
    late = len(re.findall(r"Exception in thread Thread-\d+ \(fn\)", life.said))
    assert 0 <= life.said.count("Traceback") - reports <= late, life.said
    job.await_nothing()

    (study,) = job.store.studies()
    assert study.status is StudyStatus.RUNNING
    last = begun(job, trials)
    assert last.wait() == 0, last.said
    (study,) = job.store.studies()
    assert study.status is StudyStatus.FINISHED
    assert job.results()[: len(kept)] == kept


#: What each rank of the training runs; rank 0 shows what it runs under.
SHOW = """
import os, json
from hvd_autosync.runtime.driver.environment import spec_from_environment
if os.environ["HOROVOD_RANK"] == "0":
    print("under", json.dumps(dict(spec_from_environment().strategy)))
"""


class Measured:
    """Stands for trials, and presses Ctrl-C when one strategy is confirmed and one is not yet."""

    def __init__(self, store: str) -> None:
        self.store = store
        self.proven: Strategy | None = None
        self.runs: Counter[Strategy] = Counter()

    def run(self, spec: TrialSpec, *_: object) -> TrialResult:
        if spec.probe:
            return TrialResult(TrialStatus.CRASHED)
        store = TraceStore(self.store)
        study = AskTellStudy(store, store.studies()[0])
        self.proven = study.proven
        if self.proven is not None:
            signal.raise_signal(signal.SIGINT)
        step_s = 0.1
        space = study.record.space
        if space is not None and space.complete(spec.strategy) != space.default:
            self.runs[spec.strategy] += 1
            again = [strategy for strategy, runs in self.runs.items() if runs > 1]
            # Two are measured again, and the second of them is faster at times.
            slower = spec.strategy in again[1:] and self.runs[spec.strategy] % 2
            step_s = 0.13 if slower else 0.05
        count = spec.warmup_steps + spec.measured_steps
        rank = RankReport(0, "localhost", (step_s, 1.01 * step_s) * (count // 2), (0.0,) * count)
        weight = ParameterProfile("weight", (512, 512), "float32")
        return TrialResult(
            TrialStatus.COMPLETED,
            ranks=(rank,),
            warmup_steps=spec.warmup_steps,
            total_s=1.0,
            setup_s=0.5,
            profile=ModelProfile((weight,)),
        )

    def close(self) -> None:
        pass


@pytest.mark.wide
def test_once_it_trains_with_what_was_confirmed(
    tmp_path: Path,
    horovodrun: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Trials are played; the signal, the store and the training are real."""
    options = Options(store=str(tmp_path / "traces.db"), trials=4, transfer="never")
    measured = Measured(options.store)
    monkeypatch.setattr(tuning, "AutoRunner", lambda *_, **__: measured)
    command = (sys.executable, "-c", SHOW)
    job = LaunchedJob(("-np", "2", "--gloo"), command, (Host("localhost", 2),), "gloo")
    assert tune_and_train(job, options) == 0
    printed, said = capfd.readouterr()
    assert measured.proven is not None, said
    assert "the training runs with the confirmed strategy " in said
    (shown,) = (line for line in printed.splitlines() if "under " in line)
    assert json.loads(shown.partition("under ")[2]) == dict(measured.proven)
    (study,) = TraceStore(options.store).studies()
    assert study.status is StudyStatus.RUNNING and study.winner is None
