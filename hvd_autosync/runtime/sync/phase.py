"""The phase of a training: what its steps synchronize now, and which phase may follow which.

All ranks enter a phase together. They vote on what can begin (:class:`Votes`); what ends, ends
where all of them stop.
"""

from __future__ import annotations

import logging
from enum import Enum

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.operations import size
from hvd_autosync.runtime.collectives.warn_once import WarnOnce

_LOG = logging.getLogger(__name__)


class Phase(Enum):
    """What the steps of a training synchronize."""

    EXCHANGE = "gradients are exchanged in every step"
    #: Until all ranks have epochs again, as rounds need them.
    RESTORED = "gradients are exchanged by replicas restored from the middle of rounds"
    ROUNDS = "replicas make local steps, and are averaged"
    NO_BARRIER = "parameter servers make the steps, and no rank waits for all others"
    EXACT = "the loss guard has ended a lossy strategy: gradients are exchanged, exactly"


#: Phase -> those that may follow. A checkpoint can be loaded in any phase with a barrier.
_MAY_FOLLOW = {
    Phase.EXCHANGE: {Phase.RESTORED, Phase.ROUNDS, Phase.NO_BARRIER, Phase.EXACT},
    Phase.RESTORED: {Phase.EXCHANGE, Phase.ROUNDS, Phase.EXACT},
    Phase.ROUNDS: {Phase.EXCHANGE, Phase.RESTORED, Phase.EXACT},
    Phase.NO_BARRIER: {Phase.EXCHANGE},
    Phase.EXACT: set(),
}


class TrainingPhase:
    """The phase of one optimizer's training.

    Attributes:
        now: The phase.
    """

    def __init__(self) -> None:
        self.now = Phase.EXCHANGE

    def enter(self, phase: Phase) -> None:
        """Enter a phase, on all ranks; nothing happens in it already.

        Raises:
            AutosyncError: It may not follow the present phase, which stays.
        """
        if phase is self.now:
            return
        if phase not in _MAY_FOLLOW[self.now]:
            raise AutosyncError(
                f"phase {phase.name} ({phase.value}) may not follow {self.now.name} "
                f"({self.now.value})",
                hint="This is a fault of hvd_autosync. Please report it.",
            )
        _LOG.debug("from here on: %s", phase.value)
        self.now = phase


class Votes:
    """When ranks vote on a phase that needs the ends of epochs, and whether it can begin.

    Args:
        without_end: What rank 0 prints if no end of an epoch is known for long.

    Attributes:
        last: The step of the last vote; the same on all ranks.
    """

    EVERY = 8

    def __init__(self, without_end: str) -> None:
        self.last = -self.EVERY
        self._no_epoch_end = WarnOnce(without_end)

    def due(self, step: int, first: int = 1) -> bool:
        """Return whether ranks vote after this step.

        Args:
            step: Number of steps so far.
            first: The step of the first vote.
        """
        return step >= first and step - self.last >= self.EVERY

    def passed(self, in_favour: float, step: int, *, wanted: bool, known: bool) -> bool:
        """Return whether all ranks are in favour.

        Args:
            in_favour: Their number.
            step: The step of the vote.
            wanted: Whether this rank would enter the phase if it knew the ends of epochs.
            known: Whether it does.
        """
        if known:
            self._no_epoch_end.gone()
        elif wanted and in_favour < size():
            self._no_epoch_end.seen(step)
        return bool(in_favour == size())
