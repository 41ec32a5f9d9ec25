"""Notices when the steps of a real training have become slower for good.

Each rank looks at itself alone: no collective is added to what the script does. Medians over
windows of steps are compared with what tuning measured, and the time outside of waiting with what
it was at the beginning of this training. Rank 0 says that steps have become slower, and any rank
that it computes more slowly: where none does, the network is what is left. Of accelerators, and in
scripts that reduce by hand, it is not known who waits for whom; there only rank 0 speaks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from horovod.torch.mpi_ops import rank

from hvd_autosync.runtime.measure.step_classifier import StepClassifier
from hvd_autosync.search_space.trial import DRIFT_FILE

#: A window has at least so many steps, and lasts so many seconds.
_WINDOW_STEPS, _WINDOW_S = 64, 5.0
#: Steps are slower for good when so many windows in a row are above the reference by this factor.
FOR_GOOD, FACTOR = 8, 1.25
#: The first window is warm-up; so many that follow are the beginning.
_BEGINNING = 4


class Level:
    """One quantity: what it should be, and whether it has left that for good.

    Args:
        expected: What it should be, seconds; ``None``: the median of the beginning.

    Attributes:
        expected: That, once it is known.
    """

    def __init__(self, expected: float | None = None) -> None:
        self.expected = expected
        self._warm = False
        self._recent: deque[float] = deque(maxlen=FOR_GOOD)

    def moved(self, median: float) -> float | None:
        """Take the median of the next window; what it is now if it has left its level for good."""
        if not self._warm:
            self._warm = True
            return None
        self._recent.append(median)
        if self.expected is None and len(self._recent) == _BEGINNING:
            self.expected = statistics.median(self._recent)
        if self.expected is None or len(self._recent) < FOR_GOOD:
            return None
        slowest = min(self._recent)
        return statistics.median(self._recent) if slowest > FACTOR * self.expected else None


class DriftWatch:
    """Watches the steps of this process.

    Args:
        expected_s: Seconds of a step as tuning measured it.
        folder: Of the driver; where it is on this host, what is noticed is written there.
        round_steps: Steps of a round of local steps; the time of a step is the mean over one.
        clock: Seconds.
        window_s: Shortest window.
    """

    def __init__(
        self,
        expected_s: float,
        folder: str,
        round_steps: int = 1,
        clock: Callable[[], float] = perf_counter,
        window_s: float = _WINDOW_S,
    ) -> None:
        self._expected_s, self._folder, self._round_steps = expected_s, folder, round_steps
        self._clock, self._window_s = clock, window_s
        self._counting = StepClassifier()
        self._steps, self._waited = 0, 0.0
        self._round_began = self._window_began = clock()
        #: Of each round of the window, per step: all of it, and without waiting.
        self._step_s: list[float] = []
        self._own_s: list[float] = []
        self._step, self._own = Level(expected_s), Level()
        self._said = False
        self._said_own = torch.cuda.is_available()  # where synchronize() waits for the device, too

    def waited(self, seconds: float) -> None:
        """So much of the running step was spent waiting for other ranks."""
        self._waited += seconds

    def optimizer_stepped(self, optimizer: Any) -> None:
        """A wrapped optimizer finished a step."""
        if self._counting.is_step(optimizer):
            self._end_step()

    def mark(self) -> None:
        """The script says that a step ends; it may wait anywhere, as it reduces by hand."""
        self._counting.marked = True
        self._said_own = True
        self._end_step()

    def _end_step(self) -> None:
        self._steps += 1
        if self._steps % self._round_steps:
            return
        now = self._clock()
        spent = now - self._round_began
        self._step_s.append(spent / self._round_steps)
        self._own_s.append((spent - self._waited) / self._round_steps)
        self._round_began, self._waited = now, 0.0
        enough = len(self._step_s) * self._round_steps >= _WINDOW_STEPS
        if enough and now - self._window_began >= self._window_s:
            self._end_window()
            self._window_began = self._round_began = self._clock()

    def _end_window(self) -> None:
        step, own = map(statistics.median, (self._step_s, self._own_s))
        self._step_s, self._own_s = [], []
        slower, computing = self._step.moved(step), self._own.moved(own)
        if slower is not None and computing is not None and not self._said_own:
            before = self._own.expected or 0.0
            # Who waits more also computes a little more slowly: waiting takes processors, too.
            if computing - before >= (slower - self._expected_s) / 2:
                self._said_own = True
                self._say(
                    f"rank {rank()} on {socket.gethostname()} computes more slowly: "
                    f"{1e3 * computing:.4g} ms per step outside of waiting, {1e3 * before:.4g} ms "
                    "at the beginning; something else runs on this host, or its clock is lower now"
                )
        if slower is not None and not self._said and rank() == 0:
            self._said = True
            text = (
                f"steps take {1e3 * slower:.4g} ms for good, where tuning measured "
                f"{1e3 * self._expected_s:.4g} ms; unless a rank says that it computes more "
                "slowly, another job may be on the network"
            )
            self._say(text)
            with contextlib.suppress(OSError):  # the driver may be on another host
                with open(os.path.join(self._folder, DRIFT_FILE), "w") as file:
                    file.write(text)

    def _say(self, text: str) -> None:
        print(f"hvd-autosync: {text}", file=sys.stderr)
