"""How much of its work a training has done, which its protocol counts in samples of all ranks."""

from __future__ import annotations

from horovod.torch.mpi_ops import size

from hvd_autosync.runtime.collectives.agreement import agree_steps
from hvd_autosync.runtime.collectives.warn_once import WarnOnce
from hvd_autosync.runtime.patches.epochs import Epochs
from hvd_autosync.search_space.protocol import Protocol


class SampleCounter:
    """The samples of one optimizer.

    Args:
        protocol: Says what a share of them is good for.
        passes: Those of this rank.

    Attributes:
        samples: Of all ranks, as all of them know it.
    """

    def __init__(self, protocol: Protocol, passes: Epochs) -> None:
        self.samples = 0
        #: How many of this rank that includes.
        self._included = 0
        self._protocol = protocol
        self._epochs = passes
        self._uncounted = WarnOnce(
            "samples of this training cannot be counted, so that it never switches; feed it by a "
            "torch.utils.data.DataLoader that has a length, and a batch_size or batches whose "
            "tensors all are as long as they have samples"
        )

    def new_samples(self) -> int:
        """Samples of this rank that no other knows of, to be added to those of others."""
        new = self._epochs.samples - self._included
        self._included = self._epochs.samples
        return new

    def add(self, samples: float, step: int) -> None:
        """Add new ones of all ranks, after a step; on all ranks."""
        self.samples += round(samples)
        if self._protocol.needs_total and self._protocol.total and not self.samples:
            self._uncounted.seen(step)

    @property
    def synchronous(self) -> bool:
        """Whether ranks wait for each other after so much of it."""
        return self._protocol.synchronous(self.samples)

    def agree(self, name: str) -> None:
        """Have the same number again where some rank has missed a sum; a collective."""
        self.samples = agree_steps(self.samples, name)

    def save(self) -> int:
        """Samples of all ranks, those estimated of which this rank alone knows its own."""
        return self.samples + (self._epochs.samples - self._included) * int(size())

    def load(self, samples: int) -> None:
        """Go on from there."""
        self.samples, self._included = samples, self._epochs.samples
