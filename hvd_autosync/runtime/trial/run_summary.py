"""Summarizes a run of a recurring job for the driver: samples, loss, metric.

Rank 0 writes the summary into a folder of the driver: when the script reports its metric, at its
end, and every few seconds, because a script may end without notice.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from hvd_autosync.runtime.collectives.operations import rank, size
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.runtime.measure.step_classifier import StepClassifier
from hvd_autosync.runtime.patches.checkpoints import call_on_checkpoint
from hvd_autosync.runtime.patches.epochs import AlwaysInSync, Epochs
from hvd_autosync.search_space.trial import LOSS_WINDOW, OUTCOME_FILE

#: Windows of losses at the end whose mean substitutes for a metric that the script does not report.
_LAST_WINDOWS = 4
#: Seconds between two writes.
_EVERY_S = 5.0


class RunSummary(AlwaysInSync):
    """The summary of this process's training.

    Args:
        losses: Losses of this process's steps.
        folder: The driver's folder; rank 0 writes there if the driver is on this host.
        clock: Returns seconds.
    """

    def __init__(self, losses: Losses, folder: str, clock: Callable[[], float] = monotonic) -> None:
        self._losses, self._folder, self._clock = losses, folder, clock
        self._classifier = StepClassifier()
        self._epochs = Epochs(self)
        self._steps = self._seen = 0
        #: For the last windows: sum of losses, on their device, and number of losses.
        self._windows: deque[tuple[torch.Tensor, int]] = deque(maxlen=_LAST_WINDOWS + 1)
        self._metric: float | None = None
        #: Whether the loss guard has ended the lossy strategy.
        self.fell_back = False
        #: Whether ranks have made a step without a barrier.
        self.without_barrier = False
        #: Whether the script has gone on from a checkpoint.
        self._resumed = False
        self._written = clock()
        #: Rank and number of ranks; known once Horovod is initialized, also after its shutdown.
        self._rank: int | None = None
        self._size = 1

    def optimizer_created(self, optimizer: Any, owned: frozenset[str]) -> None:
        """The script has wrapped an optimizer."""
        call_on_checkpoint(optimizer, self._load_checkpoint)

    def _load_checkpoint(self) -> None:
        """The script loads one; before the first step it goes on from there."""
        self._resumed = self._resumed or not self._steps

    def optimizer_stepped(self, optimizer: Any) -> None:
        """A wrapped optimizer finished a step."""
        if self._classifier.is_step(optimizer):
            self._end_step()

    def mark(self) -> None:
        """The script marks the end of a step."""
        self._classifier.marked = True
        self._end_step()

    def outcome(self, metric: float) -> None:
        """The script reports its metric."""
        self._metric = metric
        self.write()

    def write(self) -> None:
        """Write the summary so far, on rank 0."""
        self._written = self._clock()
        something = self._steps or self._metric is not None
        if not self._is_first() or not something or not self._folder:
            return
        summary = {
            "metric": self._metric,
            "loss": self._loss(),
            "samples": self._epochs.samples * self._size,
            "steps": self._steps,
            "fell_back": self.fell_back,
            "without_barrier": self.without_barrier,
            "resumed": self._resumed,
        }
        path = Path(self._folder, OUTCOME_FILE)
        new = path.with_name(f"{path.name}.new")
        with contextlib.suppress(OSError):  # the driver may be on another host
            new.write_text(json.dumps(summary))
            new.replace(path)

    def _is_first(self) -> bool:
        if self._rank is None:
            with contextlib.suppress(ValueError):  # Horovod has not begun
                self._rank, self._size = rank(), size()
        return self._rank == 0

    def _end_step(self) -> None:
        if not self._is_first():
            return
        self._steps += 1
        self._epochs.stepped()
        loss, self._seen, _ = self._losses.end_step(self._seen)
        if loss is not None:
            if not self._windows or self._windows[-1][1] >= LOSS_WINDOW:
                self._windows.append((loss.float(), 1))
            else:
                total, count = self._windows[-1]
                self._windows[-1] = total + loss.float(), count + 1
        if self._steps % LOSS_WINDOW == 0 and self._clock() - self._written >= _EVERY_S:
            self.write()

    def _loss(self) -> float | None:
        """Mean of the last losses, including the current window; ``None`` if there is none."""
        count = sum(each for _, each in self._windows)
        if not count or self._losses.several:
            return None
        return math.fsum(float(total) for total, _ in self._windows) / count
