"""Runs all tests: those that start jobs one after the other, and the rest beside them.

Many jobs beside each other would slow each other beyond their limits, but one leaves a third of two
processors idle. So there are two rows: jobs; and tests of single functions, then notebooks and the
documentation. The status is that of the first run that failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading

#: Markers of tests that start processes of their own, or take long.
_JOBS = "browser or cluster or mpi or notebook or root or slow"
#: Of these the files that run in the second row.
_BESIDE = (
    "tests/docs", "tests/test_jupyterlab.py", "tests/test_notebook.py", "tests/test_notebooks.py",
)  # fmt: skip
_PYTEST = [sys.executable, "-m", "pytest"]


class _Run:
    """One run of pytest, which says what it has to say when it is asked.

    Args:
        arguments: Of pytest.
        nice: How much it steps back.
    """

    def __init__(self, *arguments: str, nice: int = 0) -> None:
        self._said = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [*_PYTEST, *arguments], stdout=self._said, stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.nice(nice),
        )  # fmt: skip

    def wait(self) -> int:
        """Its status."""
        return self._process.wait()

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def tell(self) -> None:
        """Print what it has said."""
        self._said.seek(0)
        shutil.copyfileobj(self._said, sys.stdout)
        sys.stdout.flush()


def main() -> int:
    """Run both rows; their status."""
    row: list[_Run] = []
    over = threading.Event()

    def beside() -> None:  # a thread waits, so that no zombie is among processes that tests see
        for arguments, nice in (
            (("-m", f"not ({_JOBS})"), 19),
            (("-m", _JOBS, "--durations=10", *_BESIDE), 0),
        ):
            if not over.is_set():
                row.append(_Run(*arguments, nice=nice))
                row[-1].wait()

    thread = threading.Thread(target=beside, daemon=True)
    thread.start()
    try:
        ignored = [f"--ignore={path}" for path in _BESIDE]
        jobs = subprocess.run([*_PYTEST, "--durations=20", "-m", _JOBS, *ignored]).returncode
        print("\nAnd the rest, which ran beside them:", flush=True)
        thread.join()
    finally:
        over.set()
        for run in row:
            run.kill()
    for run in row:
        run.tell()
    return next((status for status in (jobs, *(run.wait() for run in row)) if status), 0)


if __name__ == "__main__":
    sys.exit(main())
