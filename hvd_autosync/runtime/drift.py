"""Notices when the steps of a real training have become slower for good.

Each rank looks at itself alone: no collective is added to what the script does. Medians over
windows of steps are compared with what tuning measured, and the time outside of waiting with what
it was at the beginning of this training. Rank 0 says that steps have become slower, and any rank
that it computes more slowly: where none does, the network is what is left.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any

from horovod.torch.mpi_ops import rank

#: A window has at least so many steps, and lasts so many seconds.
_WINDOW_STEPS, _WINDOW_S = 64, 5.0
#: Steps are slower for good when so many windows in a row are above the reference by this factor.
FOR_GOOD, FACTOR = 8, 1.25
#: The first window is warm-up; the next ones are the beginning.
_BEGINNING = slice(1, 5)


class Level:
    """One quantity: what it should be, and whether it has left that for good.

    Args:
        expected: What it should be, seconds; ``None``: the median of the beginning.

    Attributes:
        expected: That, once it is known.
    """

    def __init__(self, expected: float | None = None) -> None:
        self.expected = expected
        self._medians: list[float] = []

    def moved(self, median: float) -> float | None:
        """Take the median of the next window; what it is now if it has left its level for good."""
        self._medians.append(median)
        if self.expected is None and len(self._medians) >= _BEGINNING.stop:
            self.expected = statistics.median(self._medians[_BEGINNING])
        recent = self._medians[1:][-FOR_GOOD:]
        if self.expected is None or len(recent) < FOR_GOOD:
            return None
        return statistics.median(recent) if min(recent) > FACTOR * self.expected else None


class DriftWatch:
    """Watches the steps of this process.

    Args:
        expected_s: Seconds of a step as tuning measured it.
        folder: Of the driver; where it is on this host, what is noticed is written there.
        clock: Seconds.
        window_s: Shortest window.
    """

    def __init__(
        self, expected_s: float, folder: str, clock: Callable[[], float] = perf_counter,
        window_s: float = _WINDOW_S,
    ) -> None:  # fmt: skip
        self._folder = folder
        self._clock, self._window_s = clock, window_s
        self._counted: weakref.ref[Any] | None = None
        self._marked = False
        self._waited = 0.0
        self._last_end = self._began = clock()
        self._step_s: list[float] = []
        self._own_s: list[float] = []
        self._step, self._own = Level(expected_s), Level()
        self._said = self._said_own = False

    def waited(self, seconds: float) -> None:
        """So much of the running step was spent waiting for communication."""
        self._waited += seconds

    def optimizer_stepped(self, optimizer: Any) -> None:
        """A wrapped optimizer finished a step; the first one that does is counted."""
        if self._counted is None or self._counted() is None:
            self._counted = weakref.ref(optimizer)
        if optimizer is self._counted() and not self._marked:
            self._end_step()

    def mark(self) -> None:
        """The script says that a step ends; from then on nothing else is counted."""
        self._marked = True
        self._end_step()

    def _end_step(self) -> None:
        now = self._clock()
        self._step_s.append(now - self._last_end)
        self._own_s.append(now - self._last_end - self._waited)
        self._last_end, self._waited = now, 0.0
        if len(self._step_s) >= _WINDOW_STEPS and now - self._began >= self._window_s:
            self._end_window()
            self._began = self._last_end = self._clock()

    def _end_window(self) -> None:
        step, own = map(statistics.median, (self._step_s, self._own_s))
        self._step_s, self._own_s = [], []
        slower, computing = self._step.moved(step), self._own.moved(own)
        if computing is not None and not self._said_own:
            self._said_own = True
            self._say(
                f"rank {rank()} on {socket.gethostname()} computes more slowly: "
                f"{_ms(computing)} per step outside of waiting, {_ms(self._own.expected)} at the "
                "beginning; something else runs on this host, or its clock is lower now"
            )
        if slower is not None and not self._said and rank() == 0:
            self._said = True
            expected = self._step.expected or 0.0
            if computing is not None:
                cause = "this host computes more slowly"
            elif slower - own >= (slower - expected) / 2:
                cause = (
                    "it is spent waiting for others: another job is on the network, or a host is "
                    "slow, whose ranks then say so"
                )
            else:
                cause = "it is no waiting for others: the script's own steps were shorter then"
            self._say(
                f"steps take {_ms(slower)} for good, where tuning measured {_ms(expected)}: {cause}"
            )

    def _say(self, text: str) -> None:
        print(f"hvd-autosync: {text}", file=sys.stderr)
        with contextlib.suppress(OSError):  # the driver may be on another host
            with open(os.path.join(self._folder, f"rank-{rank()}"), "a") as file:
                file.write(f"{text}\n")


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{1e3 * seconds:.4g} ms"
