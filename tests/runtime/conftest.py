"""Starts worker scripts, alone or under ``horovodrun``, and reads their messages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hvd_autosync.runtime.driver.decoder import MessageDecoder
from hvd_autosync.runtime.driver.environment import DRIVER_VARIABLE
from hvd_autosync.runtime.driver.messages import RECORDS
from hvd_autosync.runtime.driver.wire import Message
from hvd_autosync.search_space import Strategy, TrialSpec
from hvd_autosync.util.variables import CONTROLLERS_VARIABLE

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parent / "workers"
LAUNCHERS = {
    "gloo": ["-np", "2", "--gloo"],
    "mpi": ["-np", "2", "--mpi", "--binding-args=--bind-to none --map-by slot"],
    # Without yielding, ranks that wait keep processors from those that do not.
    "four ranks": [
        "-np",
        "4",
        "--mpi",
        "--binding-args=--bind-to none --map-by slot",
        "--mpi-args=--oversubscribe --mca mpi_yield_when_idle 1",
    ],
    # Two names of this host are two hosts to Horovod under Gloo.
    "two levels": ["-np", "4", "-H", "localhost:2,127.0.0.1:2", "--gloo"],
}


#: Launchers end with the tests, and do not import torch to look for these controllers.
DRIVEN = {DRIVER_VARIABLE: str(os.getpid()), CONTROLLERS_VARIABLE: "gloo mpi"}


@pytest.fixture(autouse=True)
def _no_epochs_left() -> Iterator[None]:
    """Drops what ranks in threads that have failed would hear of later tests' loaders."""
    yield
    epochs = sys.modules.get("hvd_autosync.runtime.patches.epochs")
    if epochs is not None:
        epochs._LISTENING.clear()


_CASE_TIMES = pytest.StashKey[dict[str, float]]()
#: Cases that are listed.
_SLOWEST = 20


@pytest.fixture(scope="session")
def case_times(request: pytest.FixtureRequest) -> dict[str, float]:
    """Seconds of each case of a job: pytest takes the first test of a job for all of them."""
    return request.config.stash.setdefault(_CASE_TIMES, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Lists the slowest cases."""
    times = terminalreporter.config.stash.get(_CASE_TIMES, {})
    if times:
        terminalreporter.section(f"slowest cases of {len(times)} on ranks")
    for case in sorted(times, key=times.__getitem__, reverse=True)[:_SLOWEST]:
        terminalreporter.line(f"{times[case]:6.1f} s  {case}")


#: Of all trials here, so that whoever reads what they wrote has it.
KEY = "k" * 32


@dataclass
class Ended:
    """A job that has ended.

    Attributes:
        status: Exit status.
        messages: By rank, in order.
        output: All other lines of both outputs.
    """

    status: int
    messages: dict[int, list[Message]]
    output: str

    def of_type(self, kind: str, rank: int = 0) -> list[Message]:
        """The messages of one type that ``rank`` sent."""
        return [m for m in self.messages.get(rank, []) if m["type"] == kind]

    def joined(self, name: str, rank: int = 0) -> list[Any]:
        """A field of all ``steps`` messages of ``rank``, one after the other.

        A message leaves out what is empty in it.
        """
        return [value for message in self.of_type("steps", rank) for value in message.get(name, [])]


def decode(lines: bytes) -> tuple[dict[int, list[Message]], str]:
    """Messages by rank, and the lines of the script."""
    decoder = MessageDecoder(KEY, 8)
    messages: dict[int, list[Message]] = {}
    rest = []
    for line in lines.splitlines(keepends=True):
        ours, complete = decoder.feed(line)
        if complete is not None:
            rank, record = complete
            (kind,) = (name for name, known in RECORDS.items() if isinstance(record, known))
            messages.setdefault(rank, []).append({"type": kind, **record.to_json()})
        elif not ours:
            rest.append(line.decode(errors="replace"))
    return messages, "".join(rest)


def make_spec(**values: Any) -> TrialSpec:
    """A short trial, with some values of its own."""
    values["strategy"] = Strategy(values.get("strategy"))
    short = {"trial_id": "t", "key": KEY, "warmup_steps": 4, "measured_steps": 20}
    return TrialSpec(**{**short, **values})


class Clock:
    """Stands in for ``perf_counter``: every reading is one second later than the one before.

    Attributes:
        now: The last reading; more seconds pass by adding them.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of recorders and profilers, which knows of no busy machine."""
    clock = Clock()
    for module in ("recorder", "profiler"):
        monkeypatch.setattr(f"hvd_autosync.runtime.measure.{module}.perf_counter", clock)
    return clock


@pytest.fixture(name="make_spec", scope="session")
def make_spec_fixture() -> Callable[..., TrialSpec]:
    """:func:`make_spec`, for tests that launch nothing."""
    return make_spec


def worker_environment(*, alone: bool = True) -> dict[str, str]:
    """Of a worker that finds this project and computes in one thread."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HVD_AUTOSYNC")}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if alone:
        # With MPI, a process that ends at once would leave shared memory behind.
        environment |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
    return environment | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def worker_command(spec: TrialSpec, script: str, *arguments: str) -> list[str]:
    """What an interpreter gets to run ``script`` of the workers' folder with hooks of ``spec``."""
    runner = str(WORKERS / "run_worker.py")
    return [runner, spec.to_json(), str(WORKERS / script), *arguments]


@pytest.fixture(scope="session")
def start_worker() -> Callable[..., subprocess.Popen[bytes]]:
    """``start_worker(script, *arguments, **spec)`` starts one worker without a launcher."""

    def start(script: str, *arguments: str, **spec: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *worker_command(make_spec(**spec), script, *arguments)],
            env=worker_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


@pytest.fixture(scope="session")
def run_python() -> Callable[[str], str]:
    """``run_python(code)`` runs code in a fresh interpreter and returns what it prints."""

    def run(code: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", code],
            env=worker_environment(),
            capture_output=True,
            text=True,
            timeout=280,
            check=True,
        ).stdout

    return run


@pytest.fixture(scope="session")
def launch(fork_rank: Callable[[], list[str]]) -> Callable[..., Ended]:
    """``launch(script, *arguments, under="gloo", limit_s=280, **spec)`` runs a job to its end.

    ``under`` is one of ``LAUNCHERS``, or ``alone`` for one rank without ``horovodrun``. Ranks are
    forked from a process that has loaded torch and Horovod.
    """

    def run(
        script: str, *arguments: str, under: str = "gloo", limit_s: float = 280, **spec: Any
    ) -> Ended:
        command = [*fork_rank(), *worker_command(make_spec(**spec), script, *arguments)]
        environment = worker_environment(alone=under == "alone")
        if under != "alone":
            command = ["horovodrun", *LAUNCHERS[under], *command]
            environment |= DRIVEN
        try:
            job = subprocess.run(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired as late:
            return Ended(124, *decode(late.stdout or b""))
        return Ended(job.returncode, *decode(job.stdout))

    return run
