"""Counts the samples of all ranks, by which a protocol measures the progress of a training."""

from __future__ import annotations

from hvd_autosync.runtime.collectives.agreement import agree_steps
from hvd_autosync.runtime.collectives.operations import size
from hvd_autosync.runtime.collectives.warn_once import WarnOnce
from hvd_autosync.runtime.patches.epochs import Epochs
from hvd_autosync.search_space.protocol import Protocol


class SampleCounter:
    """The samples of one optimizer.

    Args:
        protocol: Defines what happens at which share of the samples.
        epochs: The epochs of this rank.

    Attributes:
        samples: Samples of all ranks, as all of them know them.
    """

    def __init__(self, protocol: Protocol, epochs: Epochs) -> None:
        self.samples = 0
        self._ranks = size()  # a script may save once it has shut Horovod down
        #: How many of this rank's are included.
        self._included = 0
        self._protocol = protocol
        self._epochs = epochs
        self._uncounted = WarnOnce(
            "the samples of this training cannot be counted, so the protocol never switches. Use a "
            "torch.utils.data.DataLoader with a length, and with a batch_size or batches whose "
            "tensors all have the samples as their first dimension"
        )

    def new_samples(self) -> int:
        """Return this rank's samples since the last call, to be added to those of the others."""
        new = self._epochs.samples - self._included
        self._included = self._epochs.samples
        return new

    def add(self, samples: float, step: int) -> None:
        """Add the new samples of all ranks, after a step; on all ranks."""
        self.samples += round(samples)
        if self._protocol.needs_total and self._protocol.total and not self.samples:
            self._uncounted.seen(step)

    @property
    def synchronous(self) -> bool:
        """Whether ranks wait for each other at this number of samples."""
        return self._protocol.synchronous(self.samples)

    def agree(self, name: str) -> None:
        """Agree on the number of samples if some rank has missed a sum; a collective."""
        self.samples = agree_steps(self.samples, name)

    def save(self) -> int:
        """Samples of all ranks; those that only each rank knows are estimated from this rank's."""
        return self.samples + (self._epochs.samples - self._included) * self._ranks

    def load(self, samples: int, counted: int | None = None) -> None:
        """Continue from ``samples``.

        Args:
            samples: Samples of all ranks.
            counted: How many of this rank's are included; ``None``: all so far.
        """
        self.samples = samples
        self._included = self._epochs.samples if counted is None else counted
