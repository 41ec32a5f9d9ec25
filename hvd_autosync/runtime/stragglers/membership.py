"""Membership: which ranks take part in steps with a barrier; stragglers may be excluded.

This is the elastic policy of Sync-Switch (Li et al., ICDCS 2021): the others continue without a
straggler. It waits in Horovod's ``join()`` until they have ended their epoch, and then takes over
their parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from hvd_autosync.runtime.collectives.operations import rank, size
from hvd_autosync.runtime.state.replicas import Rates, Replicas
from hvd_autosync.util.print_line import print_line


class Membership:
    """The membership of one optimizer.

    Args:
        replicas: Its parameters and states.
        summed: Whether learning rates fit the sum of all ranks' gradients rather than their mean.

    Attributes:
        absent: Ranks that the others exclude until the end of their epoch.
        unequal: Whether ranks make different numbers of steps.
    """

    def __init__(self, replicas: Replicas, *, summed: bool) -> None:
        self.absent: frozenset[int] = frozenset()
        self.unequal = False
        self._replicas = replicas
        self._summed = summed
        #: Learning rates to apply as soon as the script's own scheduler has made its step.
        self._owed_rates: Rates | None = None

    @property
    def replicas_in_sync(self) -> bool:
        """Whether all ranks have made the same steps and have the same learning rates."""
        return not self.unequal and self._owed_rates is None

    def exclude(self, slow: frozenset[int]) -> bool:
        """Exclude some ranks; returns whether this rank is one of them; a collective.

        An excluded rank returns when the epoch of the others is over.

        Raises:
            NotOnAllError: Some rank could not send its optimizer's states then.
        """
        self._replicas.check_states("a straggler cannot be excluded")
        if rank() == min(set(range(size())) - slow):
            print_line(
                f"{_ranks(slow)} much slower than the others and excluded until the end of their "
                "epoch"
            )
        self.absent, self.unequal = slow, True
        if rank() not in slow:
            return False
        self._owed_rates = self._replicas.resync()
        self.absent = frozenset()
        return True

    def resync(self) -> None:
        """Wait until all ranks are here, and take over the state of the last one; a collective."""
        self._replicas.take_rates(self._replicas.resync())
        self.absent = frozenset()

    def epoch_ended(self) -> None:
        """This rank's epoch is over; a collective if ranks are unequal."""
        if self.unequal:
            self.resync()
        elif self._owed_rates is not None:
            self._replicas.take_rates(self._owed_rates)
            self._owed_rates = None

    def rescale(self, gradients: Sequence[torch.Tensor]) -> None:
        """Turn means over all ranks into means over the ranks that took part."""
        if self.absent and not self._summed:
            factor = size() / (size() - len(self.absent))
            torch._foreach_mul_(list(gradients), factor)


def _ranks(ranks: Collection[int]) -> str:
    names = ", ".join(map(str, sorted(ranks)))
    return f"ranks {names} are" if len(ranks) > 1 else f"rank {names} is"
