"""A synthetic study in a real store: a job of two hosts whose step time is a known function."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_autosync.engine.tuning import Listener
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    Link,
    Links,
    ModelProfile,
    ParameterProfile,
    RankReport,
    Resources,
    SearchSpace,
    StepTime,
    Strategy,
    Task,
    TrialResult,
    TrialStatus,
    build_space,
)
from hvd_autosync.study.confirm import compare
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Conclusion, StudySettings, Trial
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore

COMMAND = ("horovodrun", "-np", "4", "-H", "a:2,b:2", "python", "train.py", "--token", "***")
WINNER = {"buckets": 8, "cycle_time_ms": 5.0, "controller": "mpi"}


def make_task() -> Task:
    parameters = tuple(
        ParameterProfile(f"layer{i}.weight", (256, 1024), "float32", ready_order=i)
        for i in range(20)
    )
    resources = Resources(
        (Host("a", 2), Host("b", 2)),
        "cpu",
        HorovodBuild("0.28.1", gloo=True, mpi=True),
        Links(across=Link(2, 0.0012, 11.5 * 1024 * 1024)),
    )
    return Task(ModelProfile(parameters, forward_s=0.01, backward_s=0.02), resources)


def make_space(task: Task) -> SearchSpace:
    return build_space(task.model, task.resources, held={"cache_capacity": 1024})


def step_s(space: SearchSpace, strategy: Strategy) -> float:
    """50 ms; tensor groups and mpi help, a short cycle hurts."""
    values = space.complete(strategy)
    seconds = 0.050
    seconds *= 0.80 if values["buckets"] else 1.0
    seconds *= 0.95 if values["controller"] == "mpi" else 1.0
    return seconds * (1.5 if float(values["cycle_time_ms"]) < 0.5 else 1.0)


def make_result(mean_s: float, seed: int = 0, **changes: object) -> TrialResult:
    """40 measured steps around ``mean_s``, 30 % of each blocked, on four ranks."""
    steps = tuple(mean_s * np.random.default_rng(seed).normal(1, 0.01, 50))
    blocked = tuple(0.3 * s for s in steps)
    ranks = tuple(RankReport(rank, "ab"[rank // 2], steps, blocked) for rank in range(4))
    fields = {"ranks": ranks, "warmup_steps": 10, "setup_s": 2.0, "total_s": 5.0, **changes}
    return TrialResult(**{"status": TrialStatus.COMPLETED, **fields})


@pytest.fixture
def store() -> Iterator[TraceStore]:
    """A store in a file, where possible on a disk in memory: every trial is synchronized."""
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="autosync-test-", dir=fast) as folder:
        traces = TraceStore(Path(folder, "traces.db"))
        yield traces
        traces.close()


class Author:
    """Writes one study into a store, trial by trial."""

    def __init__(
        self, store: TraceStore, command: tuple[str, ...] = COMMAND, **settings: Any
    ) -> None:
        self.store = store
        self.task = make_task()
        self.space = make_space(self.task)
        self.record = store.create_study(
            job_key="job",
            command=command,
            settings=StudySettings(**settings).to_json(),
            versions={"horovod": "0.28.1"},
        )
        self.study_id = self.record.study_id
        self.count = 0
        self.listener: Listener | None = None
        store.describe_task(self.study_id, self.task, self.space)

    def trial(self, kind: str, values: dict[str, object], **changes: object) -> StepTime | None:
        """Ask for and tell one trial."""
        strategy = Strategy(values)  # type: ignore[arg-type]
        candidates = {"stopped": "all 20 trials were used", "candidates": [WINNER]}
        info = candidates if kind == "confirm" else {"predicted_step_s": 0.0424}
        if self.listener:
            self.listener.on_ask_start(self.study)
        number = self.store.ask(self.study_id, strategy, kind, info)
        mean_s = changes.pop("mean_s", None) or step_s(self.space, strategy)
        result = make_result(mean_s, self.count, **changes)  # type: ignore[arg-type]
        if self.listener:
            trial = Trial(number, kind, strategy)
            self.listener.on_trial_start(self.study, trial)
            for steps, phase in ((0, "starting"), (3, "warming up"), (17, "measuring")):
                progress = TrialProgress(phase, steps, 50, 1.5)
                self.listener.on_trial_progress(self.study, trial, progress)
        self.store.tell(self.study_id, number, result)
        if self.listener:
            self.listener.on_trial_end(self.study, trial, result)
        self.count += 1
        return result.step_time

    @property
    def study(self) -> AskTellStudy:
        """The study as it stands in the store."""
        return AskTellStudy(self.store, self.store.study(self.study_id))

    def play(self, listener: Listener) -> None:
        """A whole tuning before the eyes of ``listener``."""
        self.listener = listener
        listener.on_study_start(self.study, resumed=False)
        listener.on_links_progress(self.study, TrialProgress("measuring", 0, 0, 3.0))
        self.explore()
        self.confirm()
        conclusion = self.study.conclusion
        assert conclusion is not None
        listener.on_study_end(self.study, conclusion)

    def explore(self) -> None:
        """The default, some strategies, one cut short and one crash."""
        self.trial("default", {})
        self.trial("sobol", {"controller": "gloo", "buckets": 4})
        self.trial(
            "sobol",
            {"cycle_time_ms": 0.2},
            status=TrialStatus.CUT_SHORT,
            reason="pruned: its steps so far are too slow to beat the best",
        )
        self.trial(
            "model",
            {"controller": "mpi", "fusion_threshold_bytes": 0},
            ranks=(),
            status=TrialStatus.CRASHED,
            reason="rank 1 exited with status 3",
            stderr_tail="Traceback\nRuntimeError: [Errno 12] no memory",
        )
        self.trial("model", {"cycle_time_ms": 20.0})
        self.trial("model", WINNER)  # type: ignore[arg-type]

    def confirm(self, factor: float = 1.0) -> None:
        """Three rounds of default and winner, and the conclusion."""
        default, winner = self.space.default, self.space.complete(WINNER)
        times: list[tuple[StepTime, StepTime]] = []
        for _ in range(3):
            first = self.trial("confirm", dict(default))
            mean_s = factor * step_s(self.space, winner)
            second = self.trial("confirm", dict(winner), mean_s=mean_s)
            assert first is not None and second is not None
            times.append((first, second))
        comparison = compare(winner, *zip(*times, strict=True))
        proven = comparison.proven
        reason = (
            "it was faster than the default when measured again"
            if proven
            else "no candidate was faster with confidence when measured again"
        )
        conclusion = Conclusion(
            winner if proven else default, reason, "all 20 trials were used", 0.05, (comparison,)
        )
        self.store.finish(
            self.study_id, StudyStatus.FINISHED, conclusion.to_json(), conclusion.winner
        )


@pytest.fixture
def author(store: TraceStore) -> Author:
    return Author(store)


@pytest.fixture
def finished(author: Author) -> StudyRecord:
    """A finished study with a gain."""
    author.explore()
    author.confirm()
    return author.store.study(author.study_id)


@pytest.fixture
def no_gain(author: Author) -> StudyRecord:
    """A finished study without a gain."""
    author.explore()
    author.confirm(factor=1.35)
    return author.store.study(author.study_id)


@pytest.fixture
def new_author(store: TraceStore) -> Callable[..., Author]:
    """For further studies in the same store."""
    return lambda **keywords: Author(store, **keywords)
