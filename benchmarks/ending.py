"""The end of a training that would go on for hours."""

from __future__ import annotations

import subprocess
from typing import Any


def end_training(job: subprocess.Popen[Any]) -> None:
    """End a job that trains on: the first signal may end its tuning only."""
    for _ in range(3):
        job.terminate()
        try:
            job.wait(20)
        except subprocess.TimeoutExpired:
            continue
        return
    job.kill()
    job.wait()
