"""Finds which rank of a failed job failed first, how, and its last output.

Launchers name the rank whose process ended first. Often that rank is not the cause: after one rank
raises an exception, the collectives of all others fail, and they may exit before it does.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping

from hvd_autosync.launch.tail import Tail

#: Gloo (``horovod/runner/gloo_run.py``), Open MPI on an exit status, Open MPI on a signal.
_EXITED = re.compile(
    r"Process (?P<gloo>\d+) exit with status code (?P<status>-?\d+)"
    r"|Process name: +\[.*,(?P<mpi>\d+)\]\s+Exit code: +(?P<code>\d+)"
    r"|process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on\s+signal (?P<signal>\d+)"
)
_TERMINATED = 128 + signal.SIGTERM
_TRACEBACK = "Traceback (most recent call last):"
#: Exception of a collective that failed because another rank failed.
_VICTIM = "HorovodInternalError"


def explain_failure(
    tail: Tail, exit_status: int, statuses: Mapping[int, int] | None = None
) -> tuple[str, str]:
    """Return why a job failed, as text, and the output that shows it.

    Args:
        tail: The job's last lines.
        exit_status: Exit status of the launcher.
        statuses: Exit status of each rank that ended by itself (negative: a signal's number); if
            ``None``, it is parsed from the launcher's output.
    """
    output = {rank: tail.of([rank]) for rank in tail.ranks()}
    victims = {rank for rank, text in output.items() if _VICTIM in text}
    raised = {rank for rank, text in output.items() if _TRACEBACK in text} - victims
    if statuses is None:
        statuses = _exit_statuses(tail.launcher())
    failed = {rank for rank, status in statuses.items() if status not in (0, _TERMINATED)}
    if failed - victims:  # other ranks that have raised something have handled it
        raised &= failed | (output.keys() - statuses.keys())
    failed = failed or set(statuses)
    causes = sorted(raised | (failed - victims) or failed)
    if not causes:
        return f"the job {_ending(exit_status)}", tail.whole()
    alike: dict[str, list[int]] = {}
    for rank in causes:
        alike.setdefault(_how(output.get(rank, ""), statuses.get(rank)), []).append(rank)
    reason = ", ".join(f"{_rank_names(ranks)} {how}" for how, ranks in alike.items())
    return reason, tail.of(ranks[0] for ranks in alike.values())


def _rank_names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = ", ".join(map(str, ranks[:4]))
    return f"ranks {listed}" if len(ranks) <= 4 else f"ranks {listed} and {len(ranks) - 4} more"


def _exit_statuses(text: str) -> dict[int, int]:
    """Parse exit statuses by rank from the launcher's output; 128 + number for signals."""
    found: dict[int, int] = {}
    for match in _EXITED.finditer(text):
        rank = int(match["gloo"] or match["mpi"] or match["rank"])
        status = int(match["status"] or match["code"] or 128 + int(match["signal"] or 0))
        found.setdefault(rank, status)
    return found


def _how(output: str, status: int | None) -> str:
    """Return how a rank failed: its exception if it raised one, else its exit status.

    One that was killed may have raised the exception before, or have handled it.
    """
    _, found, after = output.rpartition(_TRACEBACK)
    exception = next((line for line in after.splitlines() if line[:1].strip()), "")
    if found and exception:
        if status is None or status == _TERMINATED or not _signal_name(status):
            return f"raised {exception}"
        return f"{_ending(status)} after it raised {exception}"
    return "raised an exception" if status is None else _ending(status)


def _ending(status: int) -> str:
    name = _signal_name(status)
    return f"was killed by {name}" if name else f"exited with status {status}"


def _signal_name(status: int) -> str:
    """Return the name of the signal that has ended a process; empty if none has."""
    number = -status if status < 0 else status - 128
    return signal.Signals(number).name if number in {int(s) for s in signal.Signals} else ""
