"""The real training: signals that reach it, and its exit status."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_autosync.engine import training
from hvd_autosync.engine.training import (
    Beginning,
    RunReport,
    TrainingContext,
    _watch_for_fallback,
    run_live_training,
    run_training,
)
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.sweep import processes_of
from hvd_autosync.runtime.driver.environment import spec_from_environment
from hvd_autosync.runtime.live.notes import leave_note
from hvd_autosync.search_space import Host, Strategy
from hvd_autosync.search_space.trial import DRIFT_FILE, ENDED_FILE, FALLBACK_FILE, OUTCOME_FILE
from hvd_autosync.util.variables import (
    BEGUN_NOTE,
    ENDED_NOTE,
    FOLDER_VARIABLE,
    JUDGED_VARIABLE,
    STOPPED_VARIABLE,
    with_variables,
)

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tiny.py"
RANKS = {"HOROVOD_RANK", "OMPI_COMM_WORLD_RANK"}
#: What all processes of this run of the tests have in their environment (``conftest.py``).
SESSION = "AUTOSYNC_TEST_SESSION"
pytestmark = pytest.mark.cluster


def trainings() -> list[int]:
    """Processes of a training that this run of the tests started."""
    found = []
    for pid in processes_of("training"):
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).environ().get(SESSION) == os.environ[SESSION]:
                found.append(pid)
    return found


def ranks() -> int:
    """Number of ranks among them."""
    found = 0
    for pid in trainings():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            has_rank = not RANKS.isdisjoint(process.environ())
            found += has_rank and str(SCRIPT) in process.cmdline()[1:2]
    return found


@pytest.mark.parametrize(
    ("number", "whole_group", "controller"),
    [
        pytest.param(signal.SIGTERM, False, "gloo", marks=pytest.mark.wide),
        (signal.SIGTERM, True, "gloo"),
        pytest.param(signal.SIGHUP, False, "gloo", marks=pytest.mark.wide),
        pytest.param(signal.SIGINT, False, "gloo", marks=pytest.mark.wide),
        (signal.SIGINT, True, "gloo"),
        (signal.SIGKILL, False, "gloo"),
        pytest.param(signal.SIGTERM, False, "mpi", marks=pytest.mark.mpi),
        pytest.param(signal.SIGKILL, False, "mpi", marks=pytest.mark.mpi),
        pytest.param(signal.SIGINT, False, "mpi", marks=[pytest.mark.mpi, pytest.mark.wide]),
        pytest.param(signal.SIGINT, True, "mpi", marks=[pytest.mark.mpi, pytest.mark.wide]),
    ],
    ids=[
        "SIGTERM",
        "SIGTERM to the whole group",
        "SIGHUP",
        "SIGINT",
        "SIGINT to the whole group",
        "SIGKILL",
        "SIGTERM under MPI",
        "SIGKILL under MPI",
        "SIGINT under MPI",
        "SIGINT under MPI to the whole group",
    ],
)
def test_what_ends_us_ends_the_training_and_leaves_nothing(
    horovodrun: str, tmp_path: Path, number: signal.Signals, whole_group: bool, controller: str
) -> None:
    """The launcher must not get two SIGTERMs at once, which would block it for ever."""
    driver = textwrap.dedent(
        f"""
        import sys
        from hvd_autosync.launch.job import Job
        from hvd_autosync.search_space import Host, Strategy
        from hvd_autosync.engine.training import run_training
        command = ({sys.executable!r}, {str(SCRIPT)!r}, "--steps", "100000", "--fault", "hang",
                   "--at", "20")
        options = ("-np", "2", "--{controller}")
        job = Job(options, command, (Host("localhost", 2),), {controller!r})
        # Groups make the workers ours, so that they can be found by the trial's name.
        sys.exit(run_training(job, Strategy({{"buckets": 2}})).status)
        """
    )
    # Whoever runs the tests under nohup has these ignored, and bequeaths that.
    command = ["env", "--default-signal=HUP,INT", sys.executable, "-c", driver]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        await_true(lambda: ranks() == 2, 120)
        time.sleep(0.3)  # the launcher is about to watch them
        (os.killpg if whole_group else os.kill)(process.pid, number)
        status = process.wait(timeout=120)
        assert status == (-9 if number == signal.SIGKILL else 128 + number)
        await_true(lambda: not trainings(), 120)
    finally:
        process.kill()
        process.wait()
        for pid in trainings():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.mpi
def test_a_warning_of_a_batch_system_reaches_the_ranks_as_mpirun_sends_it(
    horovodrun: str, tmp_path: Path
) -> None:
    """A script may save then; without us, the launcher has become ``mpirun`` by then."""
    script = tmp_path / "saves.py"
    script.write_text(
        textwrap.dedent(
            """
            import signal, sys, time
            from pathlib import Path
            import horovod.torch as hvd
            hvd.init()
            ended = []
            signal.signal(signal.SIGUSR1, lambda *_: ended.append(1))
            Path(f"ready-{hvd.rank()}").touch()
            while not ended:
                time.sleep(0.05)
            Path(f"saved-{hvd.rank()}").touch()
            """
        )
    )
    driver = textwrap.dedent(
        f"""
        import sys
        from hvd_autosync.launch.job import Job
        from hvd_autosync.search_space import Host, Strategy
        from hvd_autosync.engine.training import run_training
        job = Job(("-np", "2", "--mpi"), ({sys.executable!r}, {str(script)!r}),
                  (Host("localhost", 2),), "mpi")
        sys.exit(run_training(job, Strategy({{"buckets": 2}})).status)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", driver], cwd=tmp_path, start_new_session=True)
    try:
        await_true(lambda: len([*tmp_path.glob("ready-*")]) == 2, 120)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=120) == 0
        assert len([*tmp_path.glob("saved-*")]) == 2
    finally:
        process.kill()
        process.wait()
        for pid in trainings():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("built", "options", "chosen", "may_be"),
    [
        ([], (), None, True),
        (["gloo", "mpi"], (), None, True),
        (["gloo"], (), None, False),
        (["gloo", "mpi"], ("--min-np", "1"), None, False),
        (["gloo", "mpi"], (), "gloo", False),
        (["gloo", "mpi"], (), "mpi", True),
    ],
)
def test_only_what_mpirun_may_carry_gets_its_sigint_late(
    monkeypatch: pytest.MonkeyPatch,
    built: list[str],
    options: tuple[str, ...],
    chosen: str | None,
    may_be: bool,
) -> None:
    """Under Gloo, too, where the user chose nothing and Horovod was built without MPI."""
    monkeypatch.setattr(training, "known_controllers", lambda: built)
    job = Job(options, ("python", "train.py"), (Host("localhost", 2),), chosen)
    assert training._may_be_under_mpi(job, Strategy()) is may_be


def await_true(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"it did not come true in {limit_s} s"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("strategy", "by_itself", "expected"),
    [({"buckets": 2}, False, 143), ({"buckets": 2}, True, 0), ({}, False, 143)],
    ids=["ended", "handled", "nothing of ours"],
)
def test_a_status_that_horovods_launcher_has_lost(
    monkeypatch: pytest.MonkeyPatch, strategy: dict[str, int], by_itself: bool, expected: int
) -> None:
    """The training of ranks that a signal ended did not succeed; one that handled it did.

    Ranks with nothing of ours to do cannot tell which of the two it was.
    """
    folders = []
    spec_of = training._worker_spec

    def spec(*arguments: Any) -> Any:
        folders.append(arguments[2])
        return spec_of(*arguments)

    def run(*_: object) -> tuple[int, int]:
        if by_itself:
            Path(folders[0], ENDED_FILE).touch()
        return 0, signal.SIGTERM

    monkeypatch.setattr(training, "_worker_spec", spec)
    monkeypatch.setattr(training, "_run", run)
    job = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),), "gloo")
    ended = run_training(job, Strategy(strategy))
    assert (ended.status, ended.stopped) == (expected, True)


@pytest.mark.parametrize(
    ("notes", "number", "expected"),
    [
        ((), 0, (0, False)),
        ((BEGUN_NOTE,), 0, (0, True)),
        ((BEGUN_NOTE,), signal.SIGTERM, (143, True)),
        ((BEGUN_NOTE, ENDED_NOTE), signal.SIGTERM, (0, True)),
    ],
)
def test_what_a_training_notes_that_is_tuned_in_its_own_steps(
    notes: tuple[str, ...], number: int, expected: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*given: Any, **_: object) -> tuple[int, int]:
        with with_variables({STOPPED_VARIABLE: given[2][STOPPED_VARIABLE]}):
            for note in notes:
                leave_note(note)
        assert given[2][FOLDER_VARIABLE] == os.getcwd()
        return 0, number

    monkeypatch.setattr(training, "_run", run)
    job = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),), "gloo")
    ended = run_live_training(job, {})
    assert (ended.status, ended.begun) == expected


def test_the_notes_of_a_flag_that_was_killed_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = textwrap.dedent(
        """
        import os, signal
        from hvd_autosync.engine import training
        from hvd_autosync.launch.job import Job
        from hvd_autosync.search_space import Host
        def run(*given, **_):
            print(os.path.dirname(given[2]["HVD_AUTOSYNC_STOPPED"]), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        training._run = run
        job = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),), "gloo")
        training.run_live_training(job, {})
        """
    )
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    died = subprocess.run([sys.executable, "-c", killed], stdout=subprocess.PIPE, text=True)
    assert died.returncode == -signal.SIGKILL
    left = Path(died.stdout.strip())
    assert left.parent == tmp_path and left.is_dir()
    os.utime(left, (1, 1))  # long ago
    monkeypatch.setattr(training, "_run", lambda *_, **__: (0, 0))
    job = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),), "gloo")
    assert run_live_training(job, {}).status == 0
    assert not list(tmp_path.iterdir())


def test_a_training_that_is_tuned_live_may_begin_under_a_strategy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its ranks are told it, its losses and its step time; guard and drift are listened to."""
    fallbacks: list[tuple[int, str]] = []

    def run(
        job: Job, strategy: Strategy, environment: dict[str, str], **_: object
    ) -> tuple[int, int]:
        spec = spec_from_environment(environment)
        assert spec is not None and spec.strategy == strategy and spec.classes
        assert spec.watched and spec.expected_step_s == 0.1 and not spec.measured_steps
        assert environment[JUDGED_VARIABLE] == "5" and environment["HOROVOD_CACHE_CAPACITY"] == "0"
        Path(spec.driver_folder, FALLBACK_FILE).write_text('{"step": 96, "reason": "it rises"}')
        Path(spec.driver_folder, DRIFT_FILE).write_text("steps have become slower")
        return 0, 0

    monkeypatch.setattr(training, "_run", run)
    job = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),), "gloo")
    strategy = Strategy({"large_codec": "fp16", "cache_capacity": 0})
    context = TrainingContext({"large": ("weight",)}, expected_step_s=0.1)
    beginning = Beginning(strategy, "5", context, lambda *said: fallbacks.append(said))
    ended = run_live_training(job, {}, beginning=beginning)
    assert (ended.status, ended.drift) == (0, "steps have become slower")
    assert fallbacks == [(96, "it rises")]


def test_a_fallback_is_reported_while_the_training_runs(tmp_path: Path) -> None:
    """Also when the file is written just before the end of the watch."""
    for late in (False, True):
        reported: list[tuple[int, str]] = []
        folder = tmp_path / str(late)
        folder.mkdir()
        with _watch_for_fallback(
            str(folder), lambda step, reason, reported=reported: reported.append((step, reason))
        ):
            (folder / FALLBACK_FILE).write_text('{"step": 96, "reason": "it rises"}')
            if not late:
                await_true(lambda reported=reported: bool(reported), 120)
        assert reported == [(96, "it rises")]


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ('{"metric": 0.9, "loss": null, "samples": 640, "steps": 10}', (0.9, 640)),
        ('{"metric": 1, "samples": 640}', (1, 640)),
        ('{"metric": "high", "samples": 640}', None),
        ('{"metric": 0.9, "samples": 640, "mood": "good"}', None),
        ("[" * 100_000, None),
        ("{", None),
    ],
)
def test_a_report_of_a_run_is_what_a_rank_writes_or_none(
    tmp_path: Path, text: str, report: tuple[float, int] | None
) -> None:
    (tmp_path / OUTCOME_FILE).write_text(text)
    found = RunReport.read(str(tmp_path))
    assert (found and (found.metric, found.samples)) == report


def test_a_malformed_report_of_a_fallback_is_no_report(tmp_path: Path) -> None:
    reported: list[int] = []
    with _watch_for_fallback(str(tmp_path), lambda step, _: reported.append(step)):
        (tmp_path / FALLBACK_FILE).write_text('{"step": "many", "reason": "it rises"}')
    assert not reported
