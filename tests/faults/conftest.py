"""What the tables of faults share: a job whose driver can be watched and stopped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hvd_autosync.traces import TraceStore

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tiny.py"
#: What all processes of this run of the tests have in their environment (``tests/conftest.py``).
SESSION = "AUTOSYNC_TEST_SESSION"
#: What other tests keep in shared memory begins so (``tests/reporting/conftest.py``).
_STORES = "autosync-test-"
#: Read by every Python of a job at its start: semaphores of other jobs have other names.
_NAMING = """
from multiprocessing import process
process.current_process()._config["semprefix"] = "/{prefix}"
"""


class Life:
    """One driver, from its start to its end.

    Attributes:
        lines: What it has said so far.
    """

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        # Whoever runs the tests in the background of a shell, or under nohup, has these ignored,
        # and bequeaths that.
        self.process = subprocess.Popen(
            ["env", "--default-signal=INT,HUP", *command],
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
        )
        self.lines: list[str] = []
        self._printed: list[str] = []
        assert self.process.stderr is not None and self.process.stdout is not None
        self._readers = [
            threading.Thread(target=lines.extend, args=(stream,), daemon=True)
            for lines, stream in (
                (self.lines, self.process.stderr),
                (self._printed, self.process.stdout),
            )
        ]
        for reader in self._readers:
            reader.start()

    @property
    def trials(self) -> int:
        """How many trials it has reported."""
        return sum(bool(re.search(r"\btrial \d+ \(", line)) for line in self.lines)

    def until(self, condition: Callable[[], bool], limit_s: float = 240.0) -> bool:
        """Wait for ``condition``; whether it came true before the driver's end."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, self.said
            time.sleep(0.005)
        return True

    def kill(self, *signals: signal.Signals) -> None:
        """Send it signals, one right after the other."""
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.05)

    def wait(self) -> int:
        """Its exit status."""
        status = self.process.wait(500)
        for reader in self._readers:
            reader.join(120)
        return status

    def end(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.wait()

    @property
    def said(self) -> str:
        """All of its output so far."""
        return "".join(self.lines)

    @property
    def printed(self) -> str:
        """All that the job has printed."""
        return "".join(self._printed)


class Job:
    """A tiny job of two ranks with a store, and a folder for temporary files, of its own.

    Args:
        folder: Of the test.
        horovodrun: Its path.
        keep_links: The fixture.
    """

    def __init__(
        self, folder: Path, horovodrun: str, keep_links: Callable[[Path, list[str]], None]
    ) -> None:
        self.store_path = folder / "traces.db"
        self.store_option = str(self.store_path)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._semaphores = f"mp-{uuid.uuid4().hex[:12]}"
        naming = folder / "naming"
        naming.mkdir()
        (naming / "sitecustomize.py").write_text(_NAMING.format(prefix=self._semaphores))
        paths = os.pathsep.join(filter(None, [str(naming), os.environ.get("PYTHONPATH")]))
        self.environment = {**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": paths}
        self._horovodrun = horovodrun
        self._keep_links = keep_links
        self._lives: list[Life] = []
        self._shared_memory = set(os.listdir("/dev/shm"))

    def keep_links(self) -> None:
        """Spare its drivers to measure them."""
        self._keep_links(self.store_path, ["-np", "2", "--gloo", sys.executable, str(SCRIPT)])

    def start(
        self, *script: str, trials: int = 3, options: tuple[str, ...] = (), trains: bool = False
    ) -> Life:
        """Start a driver that tunes, and trains afterwards only if asked to."""
        options = options if trains else ("--autosync-tune-only", *options)
        command = [
            self._horovodrun,
            "-np",
            "2",
            "--gloo",
            "--autosync",
            "--autosync-mode",
            "launched",
            "--autosync-trials",
            str(trials),
            "--autosync-steps",
            "8",
            "--autosync-warmup",
            "3",
            "--autosync-store",
            self.store_option,
            *options,
            sys.executable,
            str(SCRIPT),
            *script,
        ]
        self._lives.append(Life(command, self.environment))
        return self._lives[-1]

    def end(self) -> None:
        """Kill the drivers that a failed test left, and whatever else of it still runs then."""
        for life in self._lives:
            life.end()
        try:
            self.await_nothing()
        finally:
            for process in self._processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()

    @property
    def store(self) -> TraceStore:
        """Its store."""
        return TraceStore(self.store_path)

    def results(self) -> list[object]:
        """The results of all trials of its only study; none before there is one."""
        studies = self.store.studies()
        assert len(studies) <= 1
        trials = self.store.trials(studies[0].study_id) if studies else []
        return [trial.result for trial in trials if trial.result is not None]

    def temporary_files(self) -> list[str]:
        """What lies in its folder for temporary files, but for the compiler's cache of torch."""
        return [n for n in os.listdir(self.temporary) if not n.startswith("torchinductor_")]

    def await_nothing(self, limit_s: float = 120.0) -> None:
        """Wait until nothing of it runs and nothing more than before lies in shared memory.

        What lies there belongs to the whole machine: other jobs may come and go meanwhile.
        """
        deadline = time.monotonic() + limit_s
        while left := [*self._processes().values(), *self.new_in_shared_memory()]:
            assert time.monotonic() < deadline, "\n".join(left)
            time.sleep(0.1)

    def new_in_shared_memory(self) -> set[str]:
        """Look for what lies there since this job began, but for what can only be of others."""
        new = set(os.listdir("/dev/shm")) - self._shared_memory
        new -= {name for name in new if name.startswith(_STORES)}
        # Nobody has those mapped that a killed launcher has left.
        own = f"sem.{self._semaphores}-"
        new -= {name for name in new if name.startswith("sem.") and not name.startswith(own)}
        if new:
            self._shared_memory |= mapped_by_others_only(new)
        return new - self._shared_memory

    def _processes(self) -> dict[psutil.Process, str]:
        found = {}
        for process in psutil.process_iter():
            try:
                mine = process.environ().get("TMPDIR") == str(self.temporary)
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found[process] = " ".join(process.cmdline())
            except psutil.Error:
                pass
        return found


def mapped_by_others_only(names: set[str]) -> set[str]:
    """Those in shared memory that processes have mapped, but none of this run of the tests."""
    mark = f"{SESSION}={os.environ[SESSION]}"
    ours: set[int] = set()
    others: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # By number: a semaphore's file was mapped under a name that is gone.
            maps = re.findall(r"(\d+) +/dev/shm/", (folder / "maps").read_text(errors="replace"))
            environment = (folder / "environ").read_text(errors="replace").split("\0")
        except OSError:  # gone meanwhile, or another user's
            continue
        mine = mark in environment or folder.name == str(os.getpid())
        (ours if mine else others).update(map(int, maps))
    numbers = {entry.name: entry.inode() for entry in os.scandir("/dev/shm")}
    return {name for name in names if numbers.get(name) in others - ours}


@pytest.fixture
def job(
    tmp_path: Path, horovodrun: str, keep_links: Callable[[Path, list[str]], None]
) -> Iterator[Job]:
    """A job; nothing of it may outlive the test."""
    job = Job(tmp_path, horovodrun, keep_links)
    yield job
    job.end()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount).returncode:
        pytest.skip("a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
