"""How far the training of one optimizer is: its steps, counted once for all that need them."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_autosync.runtime.patches.epochs import Epochs


class Progress:
    """The steps of a training whose ranks make all of them together.

    Attributes:
        step: Steps of this rank so far.
    """

    def __init__(self) -> None:
        self.step = 0

    @property
    def agreed_step(self) -> int | None:
        """The number of steps that all ranks agree on; ``None`` if they have not agreed."""
        return None

    def stepped(self) -> None:
        """A step was made."""
        self.step += 1


class EpochProgress(Progress):
    """The steps of a training that is synchronized at the ends of its epochs.

    Args:
        optimizer: The optimizer.
        epochs: Its epochs.
        step: Steps so far; the same on all ranks.

    Attributes:
        epochs: Its epochs.
        highest: The highest learning rate of any step so far.
        script_averages: Whether the script itself says where parameters must be equal.
    """

    def __init__(self, optimizer: Any, epochs: Epochs, step: int) -> None:
        super().__init__()
        self.step = step
        self.epochs = epochs
        self.script_averages = False
        self._optimizer = weakref.ref(optimizer)
        # Schedulers keep the rate from which they fall; earlier steps may have had it.
        self.highest = self._highest("initial_lr") if step else 0.0

    @property
    def agreed_step(self) -> int | None:
        """As of :class:`Progress`; ranks agree after ``join()`` and after async segments."""
        return self.step

    @property
    def rate(self) -> float:
        """The highest learning rate of all groups now; 0 if the script sets none."""
        return self._highest("lr")

    def stepped(self) -> None:
        """As of :class:`Progress`.

        Raises:
            AutosyncError: As of :meth:`Epochs.stepped`.
        """
        self.highest = max(self.highest, self.rate)
        self.step += 1
        self.epochs.stepped()

    def _highest(self, name: str) -> float:
        optimizer = self._optimizer()
        assert optimizer is not None, "its owner is alive"
        rates = [group.get(name) for group in optimizer.param_groups]
        return max((float(rate) for rate in rates if rate is not None), default=0.0)
