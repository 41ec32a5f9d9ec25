"""Detects when the steps of a real training have become slower or faster permanently.

Each rank watches itself only: no collective is added to the script's. Trimmed means over windows of
steps are compared with what tuning measured, which is such a mean, too: the median of steps of
several lengths is another number. The median must have left it, too, or what it was at the
beginning: the mean alone may hold evaluations that trials left out. The compute time (without
waiting) is compared with that at the beginning of this training. Rank 0 reports slower steps, and
any rank reports that it computes more slowly: if none does, the network remains as the cause. With
accelerators, and in scripts that reduce by hand, it is not known which rank waits for which; there
only rank 0 reports. It reports faster steps, too: on a network that is free again another strategy
may be the fastest.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.measure.step_classifier import StepClassifier
from hvd_autosync.search_space.trial import DRIFT_FILE, StepTime, left_out
from hvd_autosync.util.amounts import four_digits
from hvd_autosync.util.print_line import print_line

#: A window has at least this many steps and lasts at least this many seconds.
_WINDOW_STEPS, _WINDOW_S = 64, 5.0
#: Steps have become slower, or faster, if this many windows in a row exceed the reference by this
#: factor, or fall below it by as much.
FOR_GOOD, FACTOR = 8, 1.25
#: The first window is warm-up; this many that follow are the beginning.
_BEGINNING = 4


class Level:
    """One quantity: its expected value, and whether it has left that permanently.

    Args:
        expected: The expected value, seconds; ``None``: that of the beginning.

    Attributes:
        expected: The expected value, once it is known.
    """

    def __init__(self, expected: float | None = None) -> None:
        self.expected = expected
        self._warm = False
        self._recent: deque[float] = deque(maxlen=FOR_GOOD)

    def moved(self, value: float) -> float | None:
        """Take the value of the next window.

        Returns:
            The current level if it is permanently higher or lower, else ``None``.
        """
        if not self._warm:
            self._warm = True
            return None
        self._recent.append(value)
        if self.expected is None and len(self._recent) == _BEGINNING:
            self.expected = statistics.median(self._recent)
        if self.expected is None or len(self._recent) < FOR_GOOD:
            return None
        higher = min(self._recent) > FACTOR * self.expected
        lower = max(self._recent) < self.expected / FACTOR
        return statistics.median(self._recent) if higher or lower else None


class DriftWatch:
    """Watches the steps of this process.

    Args:
        expected_s: Seconds of a step as tuning measured it.
        folder: The driver's folder; a report is written there if on this host. Empty: no report.
        round_steps: Steps of a round of local steps; the time of a step is the mean over one.
        clock: Returns seconds.
        window_s: Shortest window, seconds.
        on_drift: Called on rank 0 with the report.
        counts: Whether it finds out what the training's steps are; if not, each is told it by
            :meth:`end_step`.
    """

    def __init__(
        self,
        expected_s: float,
        folder: str,
        round_steps: int = 1,
        clock: Callable[[], float] = perf_counter,
        window_s: float = _WINDOW_S,
        on_drift: Callable[[str], None] = lambda _: None,
        *,
        counts: bool = True,
    ) -> None:
        self._on_drift, self._counts = on_drift, counts
        self._expected_s, self._folder, self._round_steps = expected_s, folder, round_steps
        self._clock, self._window_s = clock, window_s
        self._classifier = StepClassifier()
        self._waited, self._unlike = 0.0, False
        self._last_end = self._window_began = clock()
        #: For each step of the window: total time, and time without waiting.
        self._step_s: list[float] = []
        self._own_s: list[float] = []
        #: Steps of the window that are unlike the others.
        self._untypical: set[int] = set()
        self._step, self._own = Level(expected_s), Level()
        #: The median of steps, against what tuning measured and against the beginning.
        self._medians = Level(expected_s), Level()
        self._reported = False
        self._reported_own = False

    def waited(self, seconds: float) -> None:
        """Add seconds of the current step that were spent waiting for other ranks."""
        self._waited += seconds

    def optimizer_stepped(self, optimizer: Any) -> None:
        """A wrapped optimizer finished a step."""
        classifier = self._classifier
        if self._counts and classifier.is_step(optimizer) and not classifier.other_model:
            self.end_step()

    def mark(self) -> None:
        """The script marks the end of a step; it may wait anywhere, because it reduces by hand."""
        self._classifier.marked = True
        self._reported_own = True
        if self._counts:
            self.end_step()

    def unlike_others(self) -> None:
        """The current step contains what others do not, such as an evaluation."""
        self._unlike = True

    def epoch_begins(self, loader: Any, iterator: Any) -> None:
        """A loader begins an epoch, of the training or of an evaluation."""
        self.unlike_others()

    def end_step(self, *, typical: bool = True) -> None:
        """End a step.

        Args:
            typical: Whether it is like the others: no evaluation, no checkpoint, no new epoch.
        """
        if self._unlike or not typical:
            self._untypical.add(len(self._step_s))
        now = self._clock()
        spent = now - self._last_end
        self._step_s.append(spent)
        self._own_s.append(spent - self._waited)
        self._last_end, self._waited, self._unlike = now, 0.0, False
        steps = len(self._step_s)
        enough = steps >= _WINDOW_STEPS and steps % self._round_steps == 0
        if enough and now - self._window_began >= self._window_s:
            self._end_window()
            self._window_began = self._last_end = self._clock()

    def _end_window(self) -> None:
        # There synchronize() waits for the device, too. It is not asked for earlier: that would
        # initialize CUDA before the script has chosen its GPU.
        self._reported_own = self._reported_own or torch.cuda.is_initialized()
        steps, own_steps = map(self._rounds_like_trials, (self._step_s, self._own_s))
        step, own = (StepTime.from_steps(each).mean_s for each in (steps, own_steps))
        middle = statistics.median(steps)
        self._step_s, self._own_s, self._untypical = [], [], set()
        moved, computing = self._step.moved(step), self._own.moved(own)
        slower = moved is not None and moved > self._expected_s
        if slower not in [
            now > (level.expected or 0.0)
            for level in self._medians
            if (now := level.moved(middle)) is not None
        ]:
            moved = None
        if moved is not None and slower and computing is not None and not self._reported_own:
            before = self._own.expected or 0.0
            # A rank that waits more also computes a little more slowly: waiting takes processors
            # too.
            if computing - before >= (moved - self._expected_s) / 2:
                self._reported_own = True
                print_line(
                    f"rank {rank()} on {socket.gethostname()} computes more slowly: "
                    f"{four_digits(1e3 * computing)} ms per step without waiting, "
                    f"{four_digits(1e3 * before)} ms at the beginning; another process may run on "
                    "this host, or its processors may be throttled"
                )
        if moved is not None and not self._reported and rank() == 0:
            self._reported = True
            why = (
                "unless a rank reports that it computes more slowly, another job may use the "
                "network"
                if slower
                else "another strategy may be the fastest now"
            )
            text = (
                f"steps have become {'slower' if slower else 'faster'}: "
                f"{four_digits(1e3 * moved)} ms, "
                f"tuning measured {four_digits(1e3 * self._expected_s)} ms; {why}"
            )
            print_line(text)
            self._on_drift(text)
            if self._folder:
                with contextlib.suppress(OSError):  # the driver may be on another host
                    Path(self._folder, DRIFT_FILE).write_text(text)

    def _rounds_like_trials(self, step_s: Sequence[float]) -> Sequence[float]:
        """Return means over rounds, without the steps that trials leave out."""
        out = left_out(range(len(step_s)), self._untypical)
        typical = [each for i, each in enumerate(step_s) if i not in out]
        kept = typical if len(typical) >= self._round_steps else step_s
        ends = range(self._round_steps, len(kept) + 1, self._round_steps)
        return [statistics.fmean(kept[end - self._round_steps : end]) for end in ends]
