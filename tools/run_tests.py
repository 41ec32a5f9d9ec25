"""Runs all tests: those that start jobs one after the other, and the rest beside them.

Jobs of several ranks beside each other would slow each other beyond their limits. Tests of single
functions take what jobs leave of the processors. The status is that of the run that failed.
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
_PYTEST = [sys.executable, "-m", "pytest"]


def main() -> int:
    """Run both halves; their status."""
    with tempfile.TemporaryFile("w+") as said:
        rest = subprocess.Popen(
            [*_PYTEST, "-m", f"not ({_JOBS})"], stdout=said, stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.nice(19),
        )  # fmt: skip
        # No zombie of ours among the processes that tests look through.
        threading.Thread(target=rest.wait, daemon=True).start()
        try:
            jobs = subprocess.run([*_PYTEST, "--durations=20", "-m", _JOBS]).returncode
            print("\nAnd the rest, which ran beside them:", flush=True)
            status = rest.wait()
        finally:
            rest.kill()
            rest.wait()
        said.seek(0)
        shutil.copyfileobj(said, sys.stdout)
    return jobs or status


if __name__ == "__main__":
    sys.exit(main())
