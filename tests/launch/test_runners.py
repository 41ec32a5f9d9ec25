"""Every trial runner on real launches: what it measures, and every way in which a trial can end."""

import math
import os
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hvd_autosync.launch.cold import ColdRunner
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.runner import TrialRunner
from hvd_autosync.launch.user_script import user_script
from hvd_autosync.launch.warm import WarmRunner
from hvd_autosync.search_space import Host, Strategy, TrialResult, TrialSpec, TrialStatus

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tiny.py"
PASSES = SCRIPT.with_name("train_passes.py")
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("horovodrun")]

Run = Callable[..., TrialResult]
#: What all processes of this run of the tests have in their environment (``conftest.py``).
SESSION = "AUTOSYNC_TEST_SESSION"


def job_of(*script_arguments: str, controller: str = "gloo") -> Job:
    command = (sys.executable, str(SCRIPT), *script_arguments)
    return Job(("-np", "2", f"--{controller}"), command, (Host("localhost", 2),), controller)


def warm(job: Job) -> WarmRunner:
    return WarmRunner(job, user_script(job.command))


def processes_that_mention(word: str) -> list[int]:
    found = []
    for process in psutil.process_iter():
        try:
            mine = process.environ().get(SESSION) == os.environ[SESSION]
            if mine and any(word in each for each in process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            pass
    return found


def await_end_of_all_but(before: set[int]) -> None:
    until = time.monotonic() + 120
    while not set(processes_that_mention(SCRIPT.name)) <= before:
        assert time.monotonic() < until
        time.sleep(0.1)


#: For tests whose cold form does not stand for others.
MOSTLY_WARM = [pytest.param("cold", marks=pytest.mark.wide), "warm"]
BOTH = pytest.mark.parametrize("run", ["cold", "warm"], indirect=True)
Start = Callable[[tuple[str, ...]], TrialRunner]


def run_tiny(runner: TrialRunner, limits: Limits | None = None, **spec: object) -> TrialResult:
    fields = {"strategy": Strategy(), "warmup_steps": 3, "measured_steps": 10, **spec}
    return runner.run(TrialSpec(uuid.uuid4().hex, **fields), limits or Limits(), lambda p: None)


@pytest.fixture
def start_cold() -> Start:
    """``start_cold(script_arguments)``: a runner of its own for each job."""
    return lambda script_arguments: ColdRunner(job_of(*script_arguments))


@pytest.fixture(scope="module")
def start_warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """``start_warm(script_arguments)``: always the same runner, whose servers have started.

    That takes longer than a trial. The script reads its arguments from a file.
    """
    before = set(processes_that_mention(SCRIPT.name))
    arguments = tmp_path_factory.mktemp("script") / "arguments"
    runner = warm(job_of(f"@{arguments}"))

    def start(script_arguments: tuple[str, ...]) -> TrialRunner:
        arguments.write_text("\n".join(script_arguments))
        return runner

    try:
        assert run_tiny(start(())).status is TrialStatus.COMPLETED
        yield start
    finally:
        runner.close()
    await_end_of_all_but(before)


@pytest.fixture(params=MOSTLY_WARM)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """Runs trials of the tiny script, of which nothing may be left."""
    start: Start = request.getfixturevalue(f"start_{request.param}")
    before = set(processes_that_mention(SCRIPT.name))
    yield lambda *script_arguments, **of_trial: run_tiny(start(script_arguments), **of_trial)
    await_end_of_all_but(before)  # servers have processes for a moment after a trial, too


@BOTH
def test_a_trial_measures_every_step_on_every_rank(run: Run) -> None:
    assert_everything_measured(run(profile=True))


def test_a_probe_measures_the_link_instead_of_running_the_script(run: Run) -> None:
    hosts = (Host("localhost", 2),)
    result = run("--fault", "crash", warmup_steps=0, measured_steps=0, probe=hosts)
    assert (result.status, result.reason) == (TrialStatus.COMPLETED, "")
    assert result.link is not None and result.link.ranks == 2
    assert result.link.latency_s < 1 and result.link.bandwidth_bytes_per_s > 1e6


@pytest.mark.mpi
def test_a_trial_under_mpi_measures_the_same() -> None:
    job = job_of(controller="mpi")
    spec = TrialSpec(uuid.uuid4().hex, Strategy(), 3, 10, profile=True)
    assert_everything_measured(ColdRunner(job).run(spec, Limits(), lambda p: None))


def assert_everything_measured(result: TrialResult) -> None:
    assert (result.status, result.reason, result.exit_status) == (TrialStatus.COMPLETED, "", 0)
    assert [rank.rank for rank in result.ranks] == [0, 1]
    for rank in result.ranks:
        assert len(rank.step_s) == len(rank.blocked_s) == len(rank.losses) == 13
        assert all(0 <= b <= s for b, s in zip(rank.blocked_s, rank.step_s, strict=True))
        assert rank.peak_memory_bytes > 50e6
    assert result.step_time is not None and result.step_time.steps == 10
    assert result.profile is not None
    assert [p.shape for p in result.profile.parameters][:2] == [(128, 64), (128,)]
    assert {p.ready_order for p in result.profile.parameters} == set(range(6))
    assert 0 < result.setup_s < result.total_s


def test_a_strategy_reaches_horovod_and_the_optimizer(run: Run) -> None:
    """A cycle time of 40 ms makes every step wait for the next cycle."""
    slow = run(strategy=Strategy({"cycle_time_ms": 40.0, "buckets": 2}))
    assert slow.step_time is not None and slow.step_time.mean_s > 0.030
    assert slow.blocked_share > 0.5


def test_ranks_tell_at_which_losses_their_replicas_differ(tmp_path: Path) -> None:
    """Rounds of 4 begin after the first step, and again after each pass of 22."""
    job = job_of()
    job = replace(job, command=(sys.executable, str(PASSES), str(tmp_path / "checkpoint")))
    spec = TrialSpec(uuid.uuid4().hex, Strategy({"local_steps": 4}), 4, 60)
    result = ColdRunner(job).run(spec, Limits(), lambda p: None)
    assert result.status is TrialStatus.COMPLETED, result.reason
    averages = {0, *range(1, 22, 4), *range(22, 44, 4), *range(44, 64, 4)}
    for rank in result.ranks:
        assert set(range(64)) - set(rank.in_round) == averages


def test_loader_processes_end_with_the_trial(run: Run) -> None:
    assert run("--workers", "2").status is TrialStatus.COMPLETED


@pytest.mark.parametrize(
    ("script_arguments", "status", "reason"),
    [
        (["--fault", "crash"], TrialStatus.CRASHED, "^rank 0 raised RuntimeError: deliberate"),
        pytest.param(
            ["--fault", "crash", "--at", "5"],
            TrialStatus.CRASHED,
            "raised RuntimeError: deliberate",
            marks=pytest.mark.wide,
        ),
        (
            ["--fault", "crash", "--at", "5", "--rank", "1"],
            TrialStatus.CRASHED,
            "^rank 1 raised RuntimeError: deliberate crash at step 5$",
        ),
        (["--fault", "exit", "--at", "5", "--rank", "1"], TrialStatus.CRASHED, "rank 1 .* 7"),
        (["--fault", "kill", "--at", "5", "--rank", "1"], TrialStatus.CRASHED, "SIGKILL"),
        (["--steps", "9"], TrialStatus.ENDED_EARLY, "after 9 steps"),
        (["--by-hand", "--steps", "5"], TrialStatus.ENDED_EARLY, "without a single"),
    ],
    ids=[
        "at start",
        "at step 5",
        "on rank 1",
        "rank 1 exits",
        "rank 1 killed",
        "ends early",
        "no step",
    ],
)
def test_failures_are_distinguished(
    run: Run, script_arguments: list[str], status: TrialStatus, reason: str
) -> None:
    result = run(*script_arguments)
    assert result.status is status
    assert re.search(reason, result.reason), result.reason
    if "crash" in script_arguments:
        assert "deliberate crash" in result.stderr_tail


@BOTH
def test_what_was_measured_before_the_scripts_end_counts(run: Run) -> None:
    result = run("--steps", "9")
    assert result.step_time is not None and result.step_time.steps == 6


@pytest.mark.parametrize(
    ("at", "setup_s", "reason"),
    [
        pytest.param("-1", 15, "no step within 15 s", marks=pytest.mark.wide),
        ("5", math.inf, "no step for 4 s after step"),
    ],
)
def test_a_hang_is_ended_at_its_limit(run: Run, at: str, setup_s: float, reason: str) -> None:
    began = time.monotonic()
    limits = Limits(setup_s=setup_s, silence_s=4)
    result = run("--fault", "hang", "--at", at, "--rank", "1", limits=limits)
    assert result.status is TrialStatus.HUNG
    assert reason in result.reason
    assert time.monotonic() - began < 90


def test_a_flood_of_output_changes_nothing(run: Run) -> None:
    result = run("--fault", "print", "--at", "4")
    assert result.status is TrialStatus.COMPLETED
    assert len(result.stderr_tail) < 40_000


def test_a_pruned_trial_is_cut_short_on_all_ranks(run: Run) -> None:
    result = run(measured_steps=500, prune_above_s=1e-6)
    assert result.status is TrialStatus.CUT_SHORT
    assert len({len(rank.step_s) for rank in result.ranks}) == 1
    assert result.step_time is not None and result.step_time.steps < 50


@pytest.mark.parametrize("run", ["warm"], indirect=True)
@pytest.mark.parametrize(
    "fault",
    ["hang", *(pytest.param(each, marks=pytest.mark.wide) for each in ("exit", "kill", "crash"))],
)
def test_a_trial_that_fails_does_not_touch_the_next(run: Run, fault: str) -> None:
    arguments = ("--fault", fault, "--at", "5", "--rank", "1", "--under", "HOROVOD_CYCLE_TIME=13.0")
    failing = Strategy({"cycle_time_ms": 13.0})
    # Healthy trials may stand still for as long on a busy machine, and failures may come late.
    hanging = Limits(silence_s=10) if fault == "hang" else Limits()
    statuses = [
        run(*arguments, strategy=strategy, limits=hanging if strategy == failing else None).status
        for strategy in (Strategy(), failing, Strategy(), Strategy({"cycle_time_ms": 3.0}))
    ]
    good, bad = TrialStatus.COMPLETED, statuses[1]
    assert statuses == [good, bad, good, good]
    assert bad is (TrialStatus.HUNG if fault == "hang" else TrialStatus.CRASHED)


def test_servers_that_have_ended_between_two_trials_are_no_fault_of_the_next() -> None:
    """As by a host that was started again, or one that had no memory left."""
    before, runner = set(processes_that_mention(SCRIPT.name)), warm(job_of())
    try:
        assert run_tiny(runner).status is TrialStatus.COMPLETED
        assert runner._servers is not None and runner._servers._process is not None
        runner._servers._process.kill()
        runner._servers._process.wait()
        assert run_tiny(runner).status is TrialStatus.COMPLETED
    finally:
        runner.close()
    await_end_of_all_but(before)


def test_each_trial_starts_with_fresh_randomness(run: Run) -> None:
    """The script prints what a fresh process would: numbers that differ from trial to trial."""
    printed = [run("--print-random").stderr_tail for _ in range(2)]
    numbers = [re.findall(r"random (\S+) (\S+) (\d+)", text)[0] for text in printed]
    assert numbers[0][0] != numbers[1][0] and numbers[0][1] != numbers[1][1]
    assert numbers[0][2] != numbers[1][2]
