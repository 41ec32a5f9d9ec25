"""Re-initialization: ranks that end meanwhile, and processes that cannot be initialized again.

The cases on ranks are in ``tests/runtime/workers/cases_reinitialize.py``.
"""

from __future__ import annotations

import time
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.mark.parametrize(
    ("launcher", "number", "limit_s"),
    [
        pytest.param("gloo", "SIGKILL", 60),
        pytest.param("mpi", "SIGKILL", 60, marks=[pytest.mark.mpi, pytest.mark.wide]),
        pytest.param("gloo", "SIGSTOP", 90, marks=pytest.mark.wide),
    ],
)
def test_a_rank_that_ends_meanwhile_ends_the_job(
    launch: Any, launcher: str, number: str, limit_s: float
) -> None:
    began = time.monotonic()
    job = launch("reinitialize_killed.py", number, under=launcher, limit_s=limit_s)
    assert time.monotonic() - began < limit_s
    assert job.status not in (0, 124), job.output
    assert job.output.count("now") == 2 and "never reached" not in job.output
    if number == "SIGSTOP":
        assert "rank 0 cannot initialize Horovod again: another rank has ended" in job.output
