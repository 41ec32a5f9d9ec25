"""What ranks agree on before the first step of a round of local steps, and at its end."""

from __future__ import annotations

from enum import Enum

import torch

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.operations import Sum, allreduce_async_, size, synchronize


class RoundAverage(Enum):
    """What the average at the end of a round makes equal."""

    PARAMETERS = "parameters, by what codecs have sent; statistics stay apart"
    ALL = "parameters and statistics, exactly"
    #: Some scripts change parameters after each step: not twice in a row.
    ALL_AND_SET = "the same, and what the script has set on some rank is sent whole"


class Proposal:
    """This rank's proposal for the length of the round that begins.

    It uses sums only, where Horovod substitutes zeros for a rank that waits in ``hvd.join()``: n
    numbers are equal if n times the sum of their squares is the square of their sum.

    Args:
        name: Name of the operation.
        length: Length of the round; 0 to average parameters instead, before any step of it.
        ends_epoch: Whether an epoch ends with it.
        sends_set: Whether it sends whole what the script has set.
    """

    def __init__(
        self, name: str, length: int, *, ends_epoch: bool = False, sends_set: bool = False
    ) -> None:
        numbers = [1, length, length**2, ends_epoch, sends_set, length == 0]
        self._sums = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        self._handle = allreduce_async_(self._sums, name=f"{name}.length", op=Sum)

    def agreed(self) -> tuple[int, RoundAverage]:
        """Return the agreed length, and what the round's average makes equal.

        It is exact if an epoch ends on any rank, or what the script has set on it is sent.

        Raises:
            ConfigurationError: Some ranks begin the round, the others average.
        """
        synchronize(self._handle)
        ranks, lengths, lengths_2, ending, sending, averaging = self._sums.tolist()
        check_together(round(averaging), round(ranks))
        equal = ranks == size() and ranks * lengths_2 == lengths**2
        length_of_all = round(lengths / ranks) if equal else 1
        if sending > 0:
            return length_of_all, RoundAverage.ALL_AND_SET
        return length_of_all, RoundAverage.ALL if ending > 0 else RoundAverage.PARAMETERS


class RoundEnd:
    """This rank's end of a round: with the others it finds out whether all end it for one reason.

    Ranks that end it for different ones would average in different ways and wait for each other.

    Args:
        name: Name of the operation.
        early: Whether it ends before its agreed length.
    """

    def __init__(self, name: str, *, early: bool) -> None:
        self._sums = torch.tensor([1, early], dtype=torch.int32, device="cpu")
        self._handle = allreduce_async_(self._sums, name=f"{name}.end", op=Sum)

    def agreed(self) -> int:
        """Return how many ranks take part; those that wait in ``hvd.join()`` do not.

        Raises:
            ConfigurationError: Some ranks end the round early, the others do not.
        """
        synchronize(self._handle)
        ranks, ended_early = map(int, self._sums)
        check_together(ended_early, ranks)
        return ranks


def check_together(ended_early: int, ranks: int) -> None:
    """Check that a round ends early on all ranks or on none.

    Args:
        ended_early: On how many it does.
        ranks: How many ranks take part.

    Raises:
        ConfigurationError: It does on some.
    """
    if ended_early not in (0, ranks):
        raise ConfigurationError(
            f"{ended_early} of {ranks} ranks have ended a round of local steps early, the "
            "others have not; or one of them has failed, then see its error",
            hint="Evaluate on all ranks or between epochs, where parameters are equal, or "
            "leave the schedule knobs out of the strategy.",
        )
