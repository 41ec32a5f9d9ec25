"""Turns the output of a job into a trial's result: messages, tails, and how it ended."""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from collections import deque
from typing import IO, Any

from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.launch.wire import Message, MessageDecoder
from hvd_autosync.search_space import (
    Link,
    ModelProfile,
    RankReport,
    TrialResult,
    TrialSpec,
    TrialStatus,
)

_TAIL_LINES, _LINE_BYTES = 60, 500
_CHUNK_BYTES = 64 * 1024
#: A line without text, maybe behind a launcher's prefix.
_EMPTY = re.compile(rb"^(\[[\d,]+\]<std(err|out)>:)?\s*$")
_FAILED_PROCESS = re.compile(r"Process (\d+) exit with status code (-?\d+)")


class Collector:
    """Reads a job's two output streams in threads of its own.

    Lines that are not ours are the script's: the last few are kept, the rest is dropped as it
    comes, so that a job that prints gigabytes costs no memory.
    """

    def __init__(self, spec: TrialSpec, world_size: int) -> None:
        self._spec = spec
        self._world_size = world_size
        self._lock = threading.Lock()
        self._reports: dict[int, dict[str, Any]] = {}
        self._shared: dict[str, Message] = {}
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._threads: list[threading.Thread] = []
        self._started = time.monotonic()
        self.first_step_s = math.nan
        self.last_step_at = self._started

    def read(self, stream: IO[bytes]) -> None:
        """Start reading ``stream`` to its end."""
        thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self, timeout_s: float) -> None:
        """Wait until the streams have ended, at most ``timeout_s`` seconds each."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _read(self, stream: IO[bytes]) -> None:
        decoder = MessageDecoder()
        # A line without an end is cut, so that no output can grow in memory.
        while line := stream.readline(_CHUNK_BYTES):
            ours, complete = decoder.feed(line)
            with self._lock:
                if complete is not None:
                    self._take(*complete)
                elif not ours and not _EMPTY.match(line):
                    self._tail.append(line[:_LINE_BYTES].decode(errors="replace").rstrip())

    def _take(self, rank: int, message: Message) -> None:
        kind = message["type"]
        if kind in ("profile", "link"):
            self._shared[kind] = message
            return
        report = self._reports.setdefault(
            rank, {"host": "", "step_s": [], "blocked_s": [], "losses": [], "end": None}
        )
        if kind == "hello":
            report |= {"host": message["host"], "device": message["device"]}
        elif kind == "steps" and message["step_s"]:
            report["step_s"] += message["step_s"]
            report["blocked_s"] += message["blocked_s"]
            report["losses"] += message["losses"]
            self.last_step_at = time.monotonic()
            if math.isnan(self.first_step_s):
                later = sum(message["step_s"][1:])
                self.first_step_s = max(self.last_step_at - self._started - later, 0.0)
        elif kind == "end":
            report["end"] = message

    def progress(self) -> TrialProgress:
        """Where the trial stands now."""
        with self._lock:
            steps = min((len(r["step_s"]) for r in self._reports.values()), default=0)
        total = self._spec.warmup_steps + self._spec.measured_steps
        if self.all_ended():
            phase = "ending"
        elif math.isnan(self.first_step_s):
            phase = "starting"
        else:
            phase = "measuring" if steps >= self._spec.warmup_steps else "warming up"
        return TrialProgress(phase, steps, total, time.monotonic() - self._started)

    def all_ended(self) -> bool:
        """Whether every rank said that it ends the run."""
        with self._lock:
            ended = [r for r in self._reports.values() if r["end"] is not None]
        return len(ended) == self._world_size

    def result(self, exit_status: int, killed_because: str) -> TrialResult:
        """The result, once the job is gone.

        Args:
            exit_status: Of the launcher.
            killed_because: Why the runner killed the job; empty when it did not.
        """
        with self._lock:
            ranks = tuple(
                RankReport(
                    rank, r["host"], tuple(r["step_s"]), tuple(r["blocked_s"]),
                    tuple(math.nan if x is None else x for x in r["losses"]),
                    r["end"]["peak_memory_bytes"] if r["end"] else 0,
                )
                for rank, r in sorted(self._reports.items())
            )  # fmt: skip
            tail = "\n".join(self._tail)
            device = next((r["device"] for r in self._reports.values() if "device" in r), "")
            profile, link = self._shared.get("profile"), self._shared.get("link")
        status, reason = self._judge(exit_status, killed_because, tail)
        return TrialResult(
            status=status, reason=reason, ranks=ranks, warmup_steps=self._spec.warmup_steps,
            setup_s=self.first_step_s, total_s=time.monotonic() - self._started,
            exit_status=exit_status, stderr_tail=tail,
            profile=ModelProfile.from_json(profile["profile"]) if profile else None,
            link=Link(link["latency_s"], link["bandwidth_bytes_per_s"]) if link else None,
            owned=tuple(profile["owned"]) if profile else (), device=device,
        )  # fmt: skip

    def _judge(self, exit_status: int, killed_because: str, tail: str) -> tuple[TrialStatus, str]:
        with self._lock:
            ends = [r["end"]["cause"] for r in self._reports.values() if r["end"]]
            steps = min((len(r["step_s"]) for r in self._reports.values()), default=0)
        if len(ends) == self._world_size and set(ends) <= {"steps", "hopeless"}:
            if "hopeless" in ends:
                return TrialStatus.CUT_SHORT, "its steps so far exclude beating the best"
            return TrialStatus.COMPLETED, ""
        if killed_because:
            return TrialStatus.HUNG, killed_because
        if exit_status != 0:
            return TrialStatus.CRASHED, _crash_reason(exit_status, tail)
        if not self._reports:
            return TrialStatus.ENDED_EARLY, "the script ended without a single optimizer step"
        return TrialStatus.ENDED_EARLY, f"the script ended after {steps} steps"


def _crash_reason(exit_status: int, tail: str) -> str:
    """Who failed and how. The launcher ends the other ranks with SIGTERM; they are left out."""
    failed = {f"rank {rank}": int(status) for rank, status in _FAILED_PROCESS.findall(tail)}
    ended = 128 + signal.SIGTERM
    failed = {who: status for who, status in failed.items() if status != ended} or failed
    failed = failed or {"the job": exit_status}
    return ", ".join(f"{who} {_ending(status)}" for who, status in sorted(failed.items()))


def _ending(status: int) -> str:
    number = -status if status < 0 else status - 128
    if number in {int(s) for s in signal.Signals}:
        return f"was killed by {signal.Signals(number).name}"
    return f"exited with status {status}"
