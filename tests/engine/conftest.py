"""A study of launched trials that has judged lossy knobs, after which a training is tuned live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import settings_of, tuning_key
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    ModelProfile,
    ParameterProfile,
    Resources,
    Strategy,
    Task,
    build_space,
)
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.values import Conclusion
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore

JOB = Job(("-np", "2"), ("python", "train.py"), (Host("a", 1), Host("b", 1)))
TASK = Task(
    ModelProfile(
        tuple(ParameterProfile(f"{i}", (512, 512), "float32", ready_order=i) for i in range(6)),
        forward_s=0.02,
        backward_s=0.05,
    ),
    Resources(JOB.hosts, "cpu", HorovodBuild("0.28.1", gloo=True, mpi=False)),
)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(store=str(tmp_path / "traces.db"), trials=4, allow=("codec",))


@pytest.fixture
def judged(options: Options) -> Callable[[dict[str, Value]], StudyRecord]:
    """``judged(changed)``: such a study, finished, whose winner has these values."""

    def judge(changed: dict[str, Value]) -> StudyRecord:
        store, key = TraceStore(options.store), tuning_key(JOB, options, {})
        settings = settings_of(options).to_json()
        study = store.create_study(job_key=key, command=(), settings=settings, versions={})
        groups = ("codec", "schedule", "order")
        space = build_space(TASK.model, TASK.resources, allow=groups)
        store.describe_task(study.study_id, TASK, space)
        winner = space.complete(Strategy(changed))
        verdict = Verdict(winner, Outcome.ADMITTED, 1.0, 1.0, 0.01, "", 0.001, 4)
        found = Conclusion(winner, "it won", "", 0.2, verdicts=(verdict,)).to_json()
        store.finish(study.study_id, StudyStatus.FINISHED, found, winner)
        return store.study(study.study_id)

    return judge
