"""The variables of libraries below Horovod reach every rank, unless the user has set them."""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_autosync.launch.cold import ColdRunner
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.runner import TrialRunner
from hvd_autosync.launch.user_script import user_script
from hvd_autosync.launch.warm import WarmRunner
from hvd_autosync.search_space import (
    Host,
    ModelProfile,
    Resources,
    Strategy,
    TrialResult,
    TrialSpec,
    TrialStatus,
    build_space,
    horovod_settings,
)
from hvd_autosync.search_space.families.transport import TRANSPORT

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_expecting.py"
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("horovodrun")]
Run = Callable[..., TrialResult]


Start = Callable[[tuple[str, ...]], TrialRunner]


def job_of(*words: str) -> Job:
    """The script with these words, on two ranks under Gloo."""
    command = (sys.executable, str(SCRIPT), *words)
    return Job(("-np", "2", "--gloo"), command, (Host("localhost", 2),), "gloo")


@contextmanager
def cold(_: Path) -> Iterator[Start]:
    """``start(words)``: a runner for each job."""
    yield lambda words: ColdRunner(job_of(*words))


@contextmanager
def warm(folder: Path) -> Iterator[Start]:
    """``start(words)``: one runner, whose script reads its words from a file.

    To start its servers takes longer than a trial.
    """
    file = folder / "words"
    job = job_of(f"@{file}")
    runner = WarmRunner(job, user_script(job.command))

    def start(words: tuple[str, ...]) -> TrialRunner:
        file.write_text("\n".join(words))
        return runner

    try:
        yield start
    finally:
        runner.close()


@pytest.fixture(scope="module")
def warm_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """For all tests that set no variables of the user."""
    with warm(tmp_path_factory.mktemp("script")) as start:
        yield start


@pytest.fixture(autouse=True)
def _no_threads_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")


def run_by(start: Start) -> Run:
    def run(strategy: Strategy, *words: str, **spec: Any) -> TrialResult:
        own = TrialSpec(uuid.uuid4().hex, strategy, 3, 5, **spec)
        result: TrialResult = start(words).run(own, Limits(), lambda progress: None)
        return result

    return run


#: For tests whose cold form does not stand for others.
MOSTLY_WARM = [pytest.param("cold", marks=pytest.mark.wide), "warm"]
BOTH = pytest.mark.parametrize("run", ["cold", "warm"], indirect=True)


@pytest.fixture(params=MOSTLY_WARM)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """Runs a trial of the script with these words."""
    if request.param == "warm":
        yield run_by(request.getfixturevalue("warm_for_all"))
    else:
        with cold(tmp_path) as start:
            yield run_by(start)


@pytest.fixture(params=MOSTLY_WARM)
def run_alone(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    """As ``run``, in the environment of this test."""
    with {"cold": cold, "warm": warm}[request.param](tmp_path) as start:
        yield run_by(start)


@pytest.fixture
def every_knob(model: ModelProfile, slow_network: Resources) -> Strategy:
    """All knobs of the family away from their defaults, by a description of a cluster of GPUs."""
    build = replace(slow_network.build, nccl=True)
    gpus = build_space(model, replace(slow_network, device="NVIDIA H100", build=build))
    cpus = build_space(model, replace(slow_network, cores=3))
    family = {spec.name for spec in TRANSPORT.specs}
    chosen = {
        knob.name: knob.from_unit(1.0)
        for knob in {knob.name: knob for knob in (*gpus.knobs, *cpus.knobs)}.values()
        if knob.name in family
    }
    assert chosen.keys() == family
    return Strategy(chosen)


@BOTH
def test_every_rank_has_the_variables_and_the_threads(run: Run, every_knob: Strategy) -> None:
    wanted = dict(horovod_settings(every_knob).environment)
    assert len(wanted) == 9 and wanted["OMP_NUM_THREADS"] == "3"
    result = run(every_knob, "--variables", json.dumps(wanted), "--threads", "3")
    assert result.status is TrialStatus.COMPLETED, result.stderr_tail
    wrong = run(every_knob, "--variables", json.dumps({**wanted, "NCCL_ALGO": "none"}))
    assert wrong.status is TrialStatus.CRASHED and "'NCCL_ALGO': 'tree'" in wrong.stderr_tail


def test_what_the_user_has_set_stays(
    run_alone: Run, every_knob: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    wanted = {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": "2", "NCCL_PROTO": "simple"}
    result = run_alone(every_knob, "--variables", json.dumps(wanted), "--threads", "2")
    assert result.status is TrialStatus.COMPLETED, result.stderr_tail


def test_the_default_trial_tells_cores_and_whether_the_script_sets_threads(run: Run) -> None:
    unset = json.dumps({spec.sets.name: None for spec in TRANSPORT.specs})  # type: ignore[union-attr]
    result = run(Strategy(), "--variables", unset, profile=True)
    assert result.status is TrialStatus.COMPLETED, result.stderr_tail
    assert result.cores == len(os.sched_getaffinity(0)) // 2
    assert result.owned == ()
    fixed = run(Strategy(), "--set-threads", "5", profile=True)
    assert fixed.owned == ("threads_per_rank",)
    assert TrialResult.from_json(fixed.to_json()) == fixed
