"""Runs the tests: those of single functions first, then those that start jobs.

    python tools/run_tests.py --functions

Tests of single functions share two processes. Many jobs beside each other would slow each other
beyond their limits, but one leaves a third of two processors idle, and cases on ranks sleep most of
the time. So there are three rows of jobs of about the same length. Nothing steps back for anything
else: a test that does would see pauses of many seconds. The status is that of the first run that
failed.
"""

from __future__ import annotations

import argparse
import compileall
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

#: Markers of tests that start processes of their own, or take long.
_JOBS = "browser or cluster or mpi or notebook or root or slow"
#: Of these the files that run in the second row, and in the third.
_RANKS = ("tests/runtime/test_on_ranks.py",)
_TUNING = (
    "tests/api",
    "tests/docs",
    "tests/recurring",
    "tests/test_autosync.py",
    "tests/test_hosts.py",
    "tests/test_jupyterlab.py",
    "tests/test_live.py",
    "tests/test_notebooks.py",
    "tests/test_strategies.py",
)
#: How a test says that it is one.
_MARKED = re.compile(rf"\bmark\.({_JOBS.replace(' or ', '|')})\b")
_PACKAGE = Path(__file__).parents[1] / "hvd_autosync"
_PYTEST = [sys.executable, "-m", "pytest"]
#: Of every run. The limit ends what hangs.
_EACH = ("--durations=10", "--timeout=1200")
#: Of the tests of single functions. Those of a file share what it sets up.
_SHARED = ("--numprocesses=2", "--dist=loadfile")

#: How long a run that is interrupted may take to end its jobs.
_PATIENCE_S = 30


class _Run:
    """One run of pytest.

    Args:
        arguments: Of pytest.
        later: Whether it says what it has to say when it is asked.
    """

    def __init__(self, *arguments: str, later: bool = False) -> None:
        self._said = tempfile.TemporaryFile("w+") if later else None  # noqa: SIM115
        self._process = subprocess.Popen(
            [*_PYTEST, *_EACH, *arguments],
            stdout=self._said,
            stderr=self._said and subprocess.STDOUT,
        )

    def wait(self) -> int:
        """Its status."""
        return self._process.wait()

    def interrupt(self) -> None:
        """Let it end itself, with all that it has started."""
        self._process.send_signal(signal.SIGINT)

    def end(self, deadline_s: float) -> None:
        """Wait until then, by the monotonic clock, and end it."""
        try:
            self._process.wait(max(deadline_s - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tell(self) -> None:
        """Print what it has said."""
        if self._said is not None:
            self._said.seek(0)
            shutil.copyfileobj(self._said, sys.stdout)
            sys.stdout.flush()


def _first_row() -> list[str]:
    """Its files; to load all others, only to find no job there, takes many seconds."""
    files = [path for path in Path("tests").rglob("test_*.py") if _MARKED.search(path.read_text())]
    beside = {Path(each) for each in (*_RANKS, *_TUNING)}
    return [str(path) for path in sorted(files) if not beside & {path, *path.parents}]


def _together(*runs: _Run) -> int:
    """Wait for runs that go on beside each other; the status of the first that failed."""
    # Threads wait, so that no zombie is among processes that tests see.
    threads = [threading.Thread(target=run.wait, daemon=True) for run in runs[1:]]
    for thread in threads:
        thread.start()
    interrupted = False
    try:
        runs[0].wait()
        if threads:
            print("\nAnd the rest, which ran beside them:", flush=True)
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        interrupted = True  # the terminal has told them, too
        raise
    finally:
        for run in runs if not interrupted else ():
            run.interrupt()
        for run in runs:
            run.end(time.monotonic() + _PATIENCE_S)
    for run in runs:
        run.tell()
    return next((status for status in (run.wait() for run in runs) if status), 0)


def _parse_args() -> argparse.Namespace:
    """Read the command line."""
    about, _, _ = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--all",
        action="store_true",
        help="run every case of wide matrices (marker wide), not only those that stand for them",
    )
    parser.add_argument(
        "--functions", action="store_true", help="run the tests of single functions alone"
    )
    return parser.parse_args()


def main() -> int:
    """Run all of them; their status."""
    args = _parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Hundreds of processes load it, and each would compile it where Python keeps no bytecode.
    compileall.compile_dir(_PACKAGE, quiet=1)
    jobs, others = f"({_JOBS})", f"not ({_JOBS})"
    if not args.all:
        jobs, others = (f"{each} and not wide" for each in (jobs, others))
    functions = _together(_Run(*_SHARED, "-m", others))
    if args.functions:
        return functions
    print("\nAnd those that start jobs:", flush=True)
    first = tuple(_first_row())
    rows = (first, _RANKS, _TUNING)
    status = _together(*(_Run("-m", jobs, *row, later=row != first) for row in rows))
    return functions or status


if __name__ == "__main__":
    sys.exit(main())
