"""Which ranks take part in steps that wait for all: stragglers may be left out for a while.

The elastic policy of Sync-Switch (Li et al., ICDCS 2021): the others go on without a straggler; it
waits in Horovod's ``join()`` until they have ended their pass, and has then what they have.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

import torch
from horovod.torch.mpi_ops import rank, size

from hvd_autosync.runtime.state.replicas import Rates, Replicas


class Membership:
    """Of one optimizer.

    Args:
        replicas: Its parameters and states.
        summed: Whether learning rates fit the sum of all ranks' gradients, and not their mean.

    Attributes:
        absent: Ranks that the others go on without until they have ended their pass.
        unequal: Whether ranks make different numbers of steps.
    """

    def __init__(self, replicas: Replicas, *, summed: bool) -> None:
        self.absent: frozenset[int] = frozenset()
        self.unequal = False
        self._replicas = replicas
        self._summed = summed
        #: Learning rates to take over as soon as the script's own scheduler has made its step.
        self._owed_rates: Rates | None = None

    @property
    def replicas_in_sync(self) -> bool:
        """Whether all ranks have made the same steps and have the same learning rates."""
        return not self.unequal and self._owed_rates is None

    def exclude(self, slow: frozenset[int]) -> bool:
        """Let the others go on without some ranks; returns whether this was one of those.

        Such a rank is back when the pass of the others is over.
        """
        if rank() == min(set(range(size())) - slow):
            print(
                f"hvd-autosync: {_ranks(slow)} much slower than the others, who go on without it "
                "until their pass is over",
                file=sys.stderr,
            )
        self.absent, self.unequal = slow, True
        if rank() not in slow:
            return False
        self._owed_rates = self._replicas.resync()
        self.absent = frozenset()
        return True

    def resync(self) -> None:
        """Wait until all ranks are here, and have what the last of them has; a collective."""
        self._replicas.take_rates(self._replicas.resync())
        self.absent = frozenset()

    def epoch_ended(self) -> None:
        """This rank's pass is over; a collective where it is unequal."""
        if self.unequal:
            self.resync()
        elif self._owed_rates is not None:
            self._replicas.take_rates(self._owed_rates)
            self._owed_rates = None

    def rescale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Make means of all ranks those of the ranks that took part."""
        if self.absent and not self._summed:
            factor = size() / (size() - len(self.absent))
            torch._foreach_mul_(list(gradients), factor)


def _ranks(ranks: Collection[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"ranks {names} are" if len(ranks) > 1 else f"rank {names} is"
