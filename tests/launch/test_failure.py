"""Who failed first, from what Horovod 0.28.1 and Open MPI 5.0.11 write."""

import pytest

from hvd_autosync.launch.failure import explain_failure
from hvd_autosync.launch.tail import Tail

VICTIM = """\
[0]<stderr>:Traceback (most recent call last):
[0]<stderr>:  File "mpi_ops.py", line 1290, in synchronize
[0]<stderr>:    raise HorovodInternalError(e)
[0]<stderr>:horovod.common.exceptions.HorovodInternalError: Horovod has been shut down.
"""
CULPRIT = """\
[1]<stderr>:Traceback (most recent call last):
[1]<stderr>:  File "train.py", line 16, in <module>
[1]<stderr>:ValueError: bad batch
[1]<stderr>:Terminated
"""
LAUNCHER = """\
Traceback (most recent call last):
  File "gloo_run.py", line 284, in launch_gloo
RuntimeError: Horovod detected that one or more processes exited with non-zero status
"""
MPI_EXIT = """\
prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-vm-3902@1,1]
   Exit code:    7
"""
MPI_SIGNAL = """\
prterun noticed that process rank 1 with PID 3958 on node vm exited on
signal 9 (Killed).
"""


def explained(text: str, exit_status: int = 1) -> tuple[str, str]:
    tail = Tail(8)
    for line in text.encode().splitlines(keepends=True):
        tail.add(line)
    return explain_failure(tail, exit_status)


def test_the_rank_that_raised_is_named_although_another_one_ended_first() -> None:
    reason, output = explained(
        VICTIM + CULPRIT + "Process 0 exit with status code 1.\n"
        "Process 1 exit with status code 143.\n" + LAUNCHER
    )
    assert reason == "rank 1 raised ValueError: bad batch"
    assert output.startswith("Traceback") and "HorovodInternalError" not in output


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("Process 1 exit with status code 7.\nProcess 0 exit with status code 143.\n", "status 7"),
        ("Process 1 exit with status code 137.\n", "SIGKILL"),
        (MPI_EXIT, "status 7"),
        (MPI_SIGNAL, "SIGKILL"),
    ],
)
def test_a_rank_that_ends_without_a_word_is_named_by_the_launcher(launcher: str, how: str) -> None:
    reason, output = explained(VICTIM + launcher + LAUNCHER)
    assert reason.startswith("rank 1 ") and reason.endswith(how)
    assert output == ""


def test_ranks_that_fail_alike_are_named_together_and_shown_once() -> None:
    everyone = "".join(CULPRIT.replace("[1]", f"[{rank}]") for rank in range(6))
    reason, output = explained(everyone)
    assert reason == "ranks 0, 1, 2, 3 and 2 more raised ValueError: bad batch"
    assert output.count("Traceback") == 1


def test_a_collective_that_fails_on_all_ranks_is_its_own_reason() -> None:
    reason, _ = explained(VICTIM + "Process 0 exit with status code 1.\n")
    assert reason.startswith("rank 0 raised horovod.common.exceptions.HorovodInternalError")


HANDLED = """\
[{0}]<stderr>:Traceback (most recent call last):
[{0}]<stderr>:  File "logging.py", line 1, in emit
[{0}]<stderr>:ConnectionError: no route to the metrics server
[{0}]<stderr>:going on without metrics
"""


def test_an_exception_that_was_handled_does_not_hide_who_was_killed() -> None:
    """As for want of memory; each rank has logged an exception, as libraries do."""
    reason, output = explained(
        HANDLED.format(0)
        + HANDLED.format(1)
        + "Process 1 exit with status code 137.\nProcess 0 exit with status code 143.\n"
        + LAUNCHER
    )
    assert reason == (
        "rank 1 was killed by SIGKILL after it raised "
        "ConnectionError: no route to the metrics server"
    )
    assert output.count("Traceback") == 1


def test_a_rank_that_goes_on_after_an_exception_is_not_the_one_that_failed() -> None:
    reason, _ = explained(
        HANDLED.format(0)
        + "Process 1 exit with status code 7.\nProcess 0 exit with status code 143.\n"
        + LAUNCHER
    )
    assert reason == "rank 1 exited with status 7"


def test_a_job_whose_ranks_say_nothing_is_shown_whole() -> None:
    assert explained("ssh: no route to host\n", 255) == (
        "the job exited with status 255",
        "ssh: no route to host",
    )
