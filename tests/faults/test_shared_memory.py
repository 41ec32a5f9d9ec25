"""What a job leaves in shared memory is told from what others leave there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Job

_LEAVES = """
import multiprocessing, os
from multiprocessing import resource_tracker
resource_tracker.register = lambda *_: None  # as where all of a launcher was killed
locks = [multiprocessing.get_context("spawn").Lock() for _ in range(2)]
for lock in locks:
    print("sem." + lock._semlock.name.lstrip("/"), end=" ", flush=True)
os._exit(0)
"""


def left(environment: dict[str, str]) -> set[str]:
    command = [sys.executable, "-c", _LEAVES]
    return set(subprocess.check_output(command, env=environment, text=True).split())


def test_semaphores_that_nobody_has_mapped_are_those_of_their_job(job: Job) -> None:
    others, own = left(dict(os.environ)), left(job.environment)
    try:
        assert len(others) == len(own) == 2
        assert job.new_in_shared_memory() & (others | own) == own
    finally:
        for name in others | own:
            Path("/dev/shm", name).unlink(missing_ok=True)
