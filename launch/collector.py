"""Turns a job's output into a trial's result: messages, last lines and the trial's status."""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO

from hvd_autosync.launch.failure import explain_failure
from hvd_autosync.launch.limits import LEAST_UNLIKE_S, Limits
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.launch.tail import Tail
from hvd_autosync.runtime.driver.decoder import MessageDecoder
from hvd_autosync.runtime.driver.messages import End, Files, Hello, Profile, Refused, Steps
from hvd_autosync.search_space import Link, RankReport, TrialResult, TrialSpec, TrialStatus
from hvd_autosync.search_space.records import Record
from hvd_autosync.search_space.trial import OUT_OF_TIME, PRUNED
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.awake_clock import AwakeClock

_CHUNK_BYTES = 64 * 1024


def lines_of(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of ``stream``; very long lines are split, to bound the memory."""
    while line := stream.readline(_CHUNK_BYTES):
        yield line


@dataclass
class _Report:
    """What one rank has sent.

    Attributes:
        host: Host name.
        device: As of :class:`Hello`; empty before it.
        cores: As of :class:`Hello`.
        step_s: Seconds of each step.
        blocked_s: Seconds of each step in which the rank waited for communication.
        losses: The losses.
        in_round: As of :class:`RankReport`.
        several_losses: As of :class:`RankReport`.
        untypical: As of :class:`RankReport`.
        unlike: As of :class:`Steps`.
        end: The end of the run.
    """

    host: str = ""
    device: str = ""
    cores: tuple[int, ...] = ()
    step_s: list[float] = field(default_factory=list)
    blocked_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    in_round: list[int] = field(default_factory=list)
    several_losses: bool = False
    untypical: list[int] = field(default_factory=list)
    unlike: int = 0
    end: End | None = None


class Collector:
    """Collects a job's output, line by line or from streams that it reads in its own threads.

    Lines that are no messages belong to the script. Only the last few are kept, so that a job that
    prints gigabytes costs no memory.

    Args:
        spec: The trial.
        world_size: Number of the job's ranks.
    """

    def __init__(self, spec: TrialSpec, world_size: int) -> None:
        self._spec = spec
        self.world_size = world_size
        self._lock = threading.Lock()
        self._reports: dict[int, _Report] = {}
        self._profile: Profile | None = None
        self._link: Link | None = None
        self._decoder = MessageDecoder(spec.key, world_size)
        self._most_steps = spec.warmup_steps + spec.measured_steps
        self._tail = Tail(world_size)
        self._exits: dict[int, int] = {}
        #: Messages about the trial's files.
        self.files: list[Refused | Files] = []
        self._changed = threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []
        self._clock = AwakeClock()
        self._started = self._clock.now()
        self.first_step_s = self._launch_s = math.nan
        self.last_step_at = self._last_sign_at = self._started
        self._all_ended_at = math.inf

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
        for line in lines_of(stream):
            self.feed(line)

    def feed(self, line: bytes) -> None:
        """Take one line of the job's output; may be called from any thread."""
        with self._lock:
            is_message, complete = self._decoder.feed(line)
            if complete is not None:
                self._take(*complete)
            elif not is_message:
                self._tail.add(line)

    def _take(self, rank: int, message: Record) -> None:
        match message:
            case Profile():
                self._profile = message
            case Link():
                self._link = message
            case Refused() | Files():
                self.files.append(message)
            case Hello():
                report = self._reports.setdefault(rank, _Report())
                report.host, report.device = message.host, message.device
                report.cores = message.cores
                if message.script_s is not None:
                    began_s = max(self._clock.now() - self._started - message.script_s, 0.0)
                    known_s = self._launch_s
                    self._launch_s = began_s if math.isnan(known_s) else max(began_s, known_s)
            case Steps():
                self._take_steps(self._reports.setdefault(rank, _Report()), message)
            case End():
                self._reports.setdefault(rank, _Report()).end = message

    def _take_steps(self, report: _Report, message: Steps) -> None:
        if message.unlike > report.unlike or message.step_s:
            self._last_sign_at = self._clock.now()
        report.unlike = message.unlike
        left = self._most_steps - len(report.step_s)
        # A message was damaged on the way: later steps, and their losses, would be misplaced.
        if left > 0 and message.first > len(report.step_s):
            return
        # A step has one loss at most, and a trial no more steps than it was asked for.
        known = len(report.losses)
        losses = message.losses[: self._most_steps - known]
        report.losses += losses
        report.in_round += [known + index for index in message.in_round if 0 <= index < len(losses)]
        report.several_losses = message.several_losses
        if not message.step_s[:left] or message.first != len(report.step_s):
            return
        report.step_s += message.step_s[:left]
        steps = range(message.first, len(report.step_s))
        report.untypical += [index for index in message.untypical if index in steps]
        report.blocked_s += message.blocked_s[:left]
        self.last_step_at = self._clock.now()
        if math.isnan(self.first_step_s):
            later = sum(message.step_s[1:])
            self.first_step_s = max(self.last_step_at - self._started - later, 0.0)

    def exited(self, rank: int, trial_id: str, status: int) -> None:
        """Record a fork server's message that its rank of a trial has ended."""
        with self._lock:
            if trial_id == self._spec.trial_id:
                self._exits[rank] = status
                self._changed.notify_all()

    def progress(self) -> TrialProgress:
        """Return the trial's phase and steps so far."""
        with self._lock:
            steps = min((len(r.step_s) for r in self._reports.values()), default=0)
        total = self._spec.warmup_steps + self._spec.measured_steps
        if self.all_ended():
            phase = "ending"
        elif math.isnan(self.first_step_s):
            phase = "starting"
        else:
            phase = "measuring" if steps >= self._spec.warmup_steps else "warming up"
        return TrialProgress(phase, steps, total, self._clock.now() - self._started)

    def overdue(self, limits: Limits) -> str:
        """Return why the trial has exceeded ``limits``; "" if it has not.

        Called several times a second, for the clock.
        """
        now, state = self._clock.now(), self.progress()
        if state.elapsed_s > limits.total_s:
            return OUT_OF_TIME
        if state.phase == "ending":
            self._all_ended_at = min(self._all_ended_at, now)
            if now - self._all_ended_at > limits.exit_s:
                return f"ranks did not exit within {limits.exit_s:.0f} s of their last step"
        elif state.phase == "starting":
            if state.elapsed_s > limits.setup_s:
                return f"no step within {limits.setup_s:.0f} s of the launch"
        elif now - self._last_sign_at > (limit_s := self._silence_s(limits)):
            return f"no step for {limit_s:.0f} s after step {state.steps}"
        return ""

    def _silence_s(self, limits: Limits) -> float:
        """Return how long the ranks may give no sign.

        The default's first steps have not shown how long an evaluation or a checkpoint takes.
        """
        with self._lock:
            unlike = any(report.unlike for report in self._reports.values())
        return max(limits.silence_s, LEAST_UNLIKE_S) if unlike else limits.silence_s

    def all_ended(self) -> bool:
        """Return whether every rank has reported the end of its run."""
        with self._lock:
            ended = [r for r in self._reports.values() if r.end is not None]
        return len(ended) == self.world_size

    def exits(self, wait_s: float = 0.0) -> dict[int, int]:
        """Return the exit status of each ended rank of a warm trial, negative for signals.

        Args:
            wait_s: Longest wait for all ranks to end.
        """
        with self._lock:
            self._changed.wait_for(lambda: len(self._exits) == self.world_size, wait_s)
            return dict(self._exits)

    def result(
        self, exit_status: int, killed_because: str, statuses: dict[int, int] | None = None
    ) -> TrialResult:
        """Return the trial's result, after all its processes have ended.

        Args:
            exit_status: Exit status of the launcher.
            killed_because: Why the runner killed the job; "" if it did not.
            statuses: Exit status of each rank that ended by itself; ``None`` if unknown.
        """
        with self._lock:
            ranks = tuple(
                RankReport(
                    rank,
                    r.host,
                    tuple(r.step_s),
                    tuple(r.blocked_s),
                    tuple(r.losses),
                    r.end.peak_memory_bytes if r.end else 0,
                    tuple(r.in_round),
                    r.several_losses,
                    tuple(r.untypical),
                )
                for rank, r in sorted(self._reports.items())
            )
            cores = self._cores_each()
            device = next((r.device for r in self._reports.values() if r.device), "")
            profile, link = self._profile, self._link
            status, reason, output = self._judge(exit_status, killed_because, statuses)
        return TrialResult(
            status=status,
            reason=reason,
            ranks=ranks,
            warmup_steps=self._spec.warmup_steps,
            round_steps=self._spec.round_steps,
            setup_s=self.first_step_s,
            launch_s=self._launch_s,
            total_s=self._clock.now() - self._started,
            exit_status=exit_status,
            stderr_tail=output,
            profile=profile.profile if profile else None,
            owned=profile.owned if profile else (),
            device=device,
            cores=cores,
            link=link,
        )

    def _cores_each(self) -> int:
        """Return how many cores a rank has to itself where it has the fewest.

        Launchers may bind each rank to its own cores, or let all ranks of a host share them.
        """
        ranks: Counter[str] = Counter()
        cores: defaultdict[str, set[int]] = defaultdict(set)
        for report in self._reports.values():
            ranks[report.host] += 1
            cores[report.host].update(report.cores)
        return min((len(cores[host]) // ranks[host] for host in ranks), default=0)

    def _judge(
        self, exit_status: int, killed_because: str, statuses: dict[int, int] | None
    ) -> tuple[TrialStatus, str, str]:
        """Return the trial's status, the reason, and the output that shows it."""
        ends = [r.end.cause for r in self._reports.values() if r.end]
        if len(ends) == self.world_size and set(ends) <= {"steps", "pruned", "probe"}:
            if "pruned" in ends:
                return TrialStatus.CUT_SHORT, PRUNED, self._tail.whole()
            return TrialStatus.COMPLETED, "", self._tail.whole()
        if killed_because == OUT_OF_TIME:
            return TrialStatus.CUT_SHORT, killed_because, self._tail.whole()
        if killed_because:
            return TrialStatus.HUNG, killed_because, self._tail.whole()
        if exit_status != 0:
            return TrialStatus.CRASHED, *explain_failure(self._tail, exit_status, statuses)
        steps = min((len(r.step_s) for r in self._reports.values()), default=0)
        made = "without a single optimizer step"
        if self._reports:
            made = f"after {amount(steps, 'step')}"
        return TrialStatus.ENDED_EARLY, f"the script ended {made}", self._tail.whole()
