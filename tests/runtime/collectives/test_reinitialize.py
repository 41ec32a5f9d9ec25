"""Re-initialization: ranks that end meanwhile, and processes that cannot be initialized again.

The cases on ranks are in ``tests/runtime/workers/cases_reinitialize.py``.
"""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
_WIDE, _MPI = pytest.mark.wide, pytest.mark.mpi


def seconds_since_now(job: Any, ranks: int) -> float:
    """Seconds since the ranks began to initialize Horovod again."""
    times = [float(each) for each in re.findall(r"now ([\d.]+)", job.output)]
    assert len(times) == ranks and "never reached" not in job.output, job.output
    return time.time() - max(times)


@pytest.mark.parametrize(
    ("launcher", "arguments", "limit_s"),
    [
        pytest.param("gloo", "SIGKILL before", 30, marks=_WIDE),
        pytest.param("gloo", "SIGKILL between", 30),
        pytest.param("gloo", "SIGKILL inside", 30, marks=_WIDE),
        pytest.param("gloo", "SIGKILL between HANDLER", 30, marks=_WIDE),
        pytest.param("two levels", "SIGKILL between", 30, marks=_WIDE),
        pytest.param("gloo", "SIGSTOP between", 60, marks=_WIDE),
        pytest.param("mpi", "SIGSTOP between", 60, marks=[_MPI, _WIDE]),
    ],
)
def test_every_rank_says_why_it_ends_with_another(
    launch: Any, launcher: str, arguments: str, limit_s: float
) -> None:
    job = launch("reinitialize_killed.py", *arguments.split(), under=launcher)
    ranks = 4 if launcher == "two levels" else 2
    assert seconds_since_now(job, ranks) < limit_s
    assert job.status not in (0, 124), job.output
    lines = re.findall(r"hvd-autosync: (.*)", job.output)
    pattern = (
        r"rank (\d) cannot initialize Horovod again: another rank has .*\. Start the job again\."
    )
    found = [re.fullmatch(pattern, line) for line in lines]
    assert sorted(match[1] for match in found if match) == [*map(str, range(ranks - 1))], job.output
    assert len(lines) == ranks - 1 and not re.search(r"<stderr>:\s*Traceback", job.output)
    if "SIGSTOP" in arguments:
        assert "has hung for 20 seconds" in job.output


@pytest.mark.mpi
def test_mpirun_ends_the_others_of_a_rank_that_is_killed(launch: Any) -> None:
    job = launch("reinitialize_killed.py", "SIGKILL", "between", under="mpi")
    assert seconds_since_now(job, 2) < 30
    assert job.status not in (0, 124), job.output
    assert re.search(r"rank 1 .*exited on\s+signal 9", job.output), job.output
    assert not re.search(r"<stderr>:\s*Traceback", job.output)


@pytest.mark.parametrize(
    ("launcher", "kind"),
    [
        pytest.param("gloo", "list", marks=_WIDE),
        pytest.param("gloo", "sets"),
        pytest.param("mpi", "sets", marks=[_MPI, _WIDE]),
        pytest.param("mpi", "list", marks=[_MPI, _WIDE]),
        pytest.param("mpi", "reversed", marks=_MPI),
    ],
)
def test_what_the_script_gave_to_init_is_given_again(launch: Any, launcher: str, kind: str) -> None:
    job = launch("reinitialize_init.py", kind, under=launcher)
    assert job.status == 0 and job.output.count("done") == 2, job.output
    assert "cannot" not in job.output


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("freed", "the script has freed the communicator that hvd.init() was given; keep it"),
        (
            "no mpi4py",
            "Horovod's MPI was not initialized by mpi4py before hvd.init(); install mpi4py for "
            "that MPI",
        ),
    ],
)
def test_a_refusal_says_why_and_leaves_the_job_as_it_is(
    launch: Any, kind: str, reason: str
) -> None:
    job = launch("reinitialize_init.py", kind, under="mpi")
    assert job.status == 0 and job.output.count("done") == 2, job.output
    refusal = f"Horovod cannot be initialized again: {reason} (rank 0)"
    assert job.output.count(f"{refusal} Launch the job again with other variables.") == 6
