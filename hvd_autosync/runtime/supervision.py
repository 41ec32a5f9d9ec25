"""Heeds the guard of one optimizer: shows it losses, takes its snapshots, and goes back."""

from __future__ import annotations

import sys
import weakref
from typing import Any

from horovod.torch.mpi_ops import rank

from hvd_autosync.runtime import current
from hvd_autosync.runtime.checkpoints import go_exactly
from hvd_autosync.runtime.guard import Guard


class Supervision:
    """The guard's side of one optimizer.

    Args:
        optimizer: Horovod's optimizer, of our class; its ``_guard`` is gone once it was heeded.
    """

    def __init__(self, optimizer: Any) -> None:
        self._reference = weakref.ref(optimizer)
        self._seen = 0

    def stepped(self) -> None:
        """A step was made in which ranks wait for each other; a collective after each window."""
        optimizer, guard = self._optimizer, self._guard
        if guard is None:
            return
        assert current.losses is not None, "who is guarded has losses"
        parts = [each for each in (optimizer._protocols, optimizer._local) if each is not None]
        equal = all(each.equal for each in parts)
        step = parts[0].step if parts else None
        if not guard.stepped(current.losses, step, equal=equal):
            self.fall_back()
        elif equal and guard.wants_snapshot:
            self._take_snapshot(guard)

    def loss(self) -> float | None:
        """The loss of this rank's last step, if it had one and somebody is to judge it."""
        if self._guard is None or current.losses is None:
            return None
        loss = current.losses.since(self._seen)
        self._seen = current.losses.count
        return None if loss is None else float(loss)

    def healthy(self, loss: float) -> bool:
        """Whether any rank's loss is well, in a phase in which ranks do not wait; on one rank."""
        return self._guard is None or self._guard.bears_one(loss)

    def at_rest(self, step: int, *, waiting: bool, healthy: bool = True) -> None:
        """All ranks stop before or after steps without waiting, and have the same parameters.

        Args:
            step: As of :meth:`Guard.at_rest`.
            waiting: As there.
            healthy: Whether what they have is worth to be gone back to.
        """
        if self._guard is not None:
            self._guard.at_rest(step, waiting=waiting)
            if healthy and self._guard.wants_snapshot:
                self._take_snapshot(self._guard)

    def fall_back(self) -> None:
        """Go back to the last healthy state, and on exactly; a collective."""
        optimizer, guard = self._optimizer, self._guard
        assert guard is not None, "it has judged"
        optimizer._settle_steps()
        if optimizer._owners is not None:
            optimizer._owners.forget()  # states of shards are in no snapshot: they begin anew
        back = guard.restore(optimizer)
        if rank() == 0:
            print(
                f"hvd-autosync: {guard.verdict} at step {guard.step}: the training goes on "
                f"exactly, from the parameters after step {back}", file=sys.stderr,
            )  # fmt: skip
        go_exactly(optimizer)
        if optimizer._local is not None:
            optimizer._local.stop()
        if optimizer._protocols is not None:
            optimizer._protocols.equalize()

    @property
    def _optimizer(self) -> Any:
        optimizer = self._reference()
        assert optimizer is not None, "its owner is alive"
        return optimizer

    @property
    def _guard(self) -> Guard | None:
        guard: Guard | None = self._optimizer._guard
        return guard

    def _take_snapshot(self, guard: Guard) -> None:
        self._optimizer._settle_steps()
        guard.take_snapshot(self._optimizer)
