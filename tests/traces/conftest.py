"""Values that the tests of traces share: one task, its space, and results of trials."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
    Strategy,
    Task,
    TrialResult,
    TrialStatus,
    build_space,
)
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore


@pytest.fixture
def task() -> Task:
    """Two layers, one of which gets no gradient, on two hosts with a measured link."""
    parameters = (
        ParameterProfile("first.weight", (64, 32), "float32", False, 1, 0.02),
        ParameterProfile("unused.weight", (8,), "float32"),
    )
    resources = Resources(
        (Host("a", 2), Host("b", 2)),
        "cpu",
        HorovodBuild("0.28.1", gloo=True, mpi=True),
        Links(across=Link(2, 1e-4, 1e8)),
    )
    return Task(ModelProfile(parameters, 0.01, 0.02), resources)


@pytest.fixture
def space(task: Task) -> SearchSpace:
    return build_space(task.model, task.resources, held={"cpu_operations": "gloo"})


@pytest.fixture
def make_result() -> Callable[..., TrialResult]:
    """Results of two ranks whose measured steps all take ``step_s`` seconds."""

    def make(step_s: float, status: TrialStatus = TrialStatus.COMPLETED) -> TrialResult:
        ranks = tuple(
            RankReport(
                rank,
                "ab"[rank],
                (1.0, *[step_s] * 10),
                (0.5, *[step_s / 4] * 10),
                (2.5, float("nan")),
                1 << 30,
            )
            for rank in range(2)
        )
        return TrialResult(
            status,
            ranks=ranks,
            warmup_steps=1,
            setup_s=1.5,
            total_s=4.0,
            stderr_tail="warning: \udcff\n",
        )

    return make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the store of the test is."""
    return tmp_path / "traces.db"


@pytest.fixture
def store() -> TraceStore:
    """A store in memory; where files matter, tests have their own."""
    return TraceStore("sqlite://")


@pytest.fixture
def create(store: TraceStore) -> Callable[..., StudyRecord]:
    """Create a running study, by default of the job ``job``."""

    def create(job_key: str = "job", store: TraceStore = store) -> StudyRecord:
        return store.create_study(
            job_key=job_key,
            command=["horovodrun", "-np", "4", "python", "train.py"],
            settings={"seed": 0, "allow": []},
            versions={"horovod": "0.28.1"},
        )

    return create


@pytest.fixture
def finished(
    store: TraceStore,
    create: Callable[..., StudyRecord],
    task: Task,
    space: SearchSpace,
    make_result: Callable[..., TrialResult],
) -> StudyRecord:
    """A finished study of four trials: default, a faster one, one that crashed, one lost."""
    study_id = create().study_id
    fast = Strategy({"cycle_time_ms": 0.5, "fusion_threshold_bytes": 1 << 20})
    store.tell(study_id, store.ask(study_id, Strategy(), "default", {}), make_result(0.2))
    store.describe_task(study_id, task, space)
    store.tell(study_id, store.ask(study_id, fast, "sobol", {}), make_result(0.1))
    crash = TrialResult(TrialStatus.CRASHED, reason="rank 1 was killed", exit_status=137)
    store.tell(
        study_id,
        store.ask(study_id, Strategy({"controller": "mpi"}), "model", {"expected_s": 0.09}),
        crash,
    )
    store.ask(study_id, fast, "confirm", {"rounds": [1, 2]})
    store.finish(study_id, StudyStatus.FINISHED, {"reason": "a gain of 2.0"}, fast)
    return store.study(study_id)


def _seal(path: Path, lines: list[Any]) -> None:
    """Write ``lines`` (objects, or text as it stands) with a footer whose checksum is right."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    body = "".join(f"{text}\n" for text in texts).encode()
    digest = hashlib.sha256(body).hexdigest()
    footer = {"type": "footer", "trials": max(len(lines) - 2, 0), "sha256": digest}
    path.write_bytes(body + json.dumps(footer).encode() + b"\n")


@pytest.fixture
def seal() -> Callable[[Path, list[Any]], None]:
    """What somebody hostile can do: a changed trace with a checksum that fits."""
    return _seal
