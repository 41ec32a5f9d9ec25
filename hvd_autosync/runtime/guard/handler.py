"""Heeds the guard of one optimizer: shows it losses, takes its snapshots, and goes back."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import weakref
from typing import Any

from horovod.torch.mpi_ops import local_rank, rank

from hvd_autosync.runtime import current
from hvd_autosync.runtime.guard.fallback import fall_back_to_exact
from hvd_autosync.runtime.guard.guard import Guard
from hvd_autosync.search_space.trial import FALLBACK_FILE, LOSS_WINDOW

#: So many rounds of local steps have to be within what trials predict, where rounds are longer than
#: so many windows: else it is not seen whether replicas that train apart learn as much.
_ROUNDS_PREDICTED, _LONG_ROUND = 2, 2


class LossGuardHandler:
    """The guard's side of one optimizer.

    Args:
        optimizer: Horovod's optimizer, of our class; its ``_guard`` is gone once it was heeded.
    """

    def __init__(self, optimizer: Any) -> None:
        self._reference = weakref.ref(optimizer)
        self._seen = 0
        self._named = False

    def stepped(self) -> None:
        """A step was made in which ranks wait for each other; a collective after each window."""
        optimizer, guard = self._optimizer, self._guard
        if guard is None:
            return
        assert current.losses is not None, "who is guarded has losses"
        if not self._named and optimizer._local is not None and optimizer._local.round_steps:
            self._named = True
            _name_long_rounds(guard, optimizer._local.round_steps)
        local, protocols = optimizer._local, optimizer._protocols
        parts = [each for each in (protocols, local) if each is not None]
        equal = all(each.replicas_in_sync for each in parts)
        near = local is not None and local.near_average
        average = equal or (near and (protocols is None or protocols.replicas_in_sync))
        step = parts[0].step if parts else None
        if not guard.stepped(current.losses, step, average=average):
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
        return self._guard is None or self._guard.accepts_one(loss)

    def on_quiescent(self, step: int, *, waiting: bool, healthy: bool = True) -> None:
        """All ranks stop before or after steps without waiting, and have the same parameters.

        Args:
            step: As of :meth:`Guard.on_quiescent`.
            waiting: As there.
            healthy: Whether what they have is worth to be gone back to.
        """
        if self._guard is not None:
            self._guard.on_quiescent(step, waiting=waiting)
            if healthy and self._guard.wants_snapshot:
                self._take_snapshot(self._guard)

    def fall_back(self) -> None:
        """End what is lossy, and go on with the better of two: what is, and the last snapshot.

        A collective.
        """
        optimizer, guard = self._optimizer, self._guard
        assert guard is not None, "it has judged"
        _write_down(guard)
        optimizer._settle_steps()
        done = "kept what was learned"
        if not guard.keeps:
            if optimizer._zero_step is not None:
                optimizer._zero_step.forget()  # no snapshot has states of shards
            done = f"restored step {guard.restore(optimizer)}"
        elif optimizer._local is not None:
            optimizer._local.average()
        if rank() == 0:
            print(
                f"hvd-autosync: loss guard: {guard.verdict} at step {guard.step}; {done}; the "
                "training continues uncompressed and synchronous",
                file=sys.stderr,
            )
        fall_back_to_exact(optimizer)
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


def _name_long_rounds(guard: Guard, steps: int) -> None:
    """Say where it cannot be seen that replicas learn less apart."""
    predicted = guard.predicted_steps
    if steps <= _LONG_ROUND * LOSS_WINDOW or predicted >= _ROUNDS_PREDICTED * steps or rank():
        return
    known = f"for {predicted} steps only" if predicted else "by no trials"
    print(
        f"hvd-autosync: loss guard: rounds have {steps} steps, and losses are predicted {known}: "
        "a model that learns more slowly than without local steps is not noticed beyond that; use "
        "shorter rounds, or tune with more --autosync-quality-steps",
        file=sys.stderr,
    )


def _write_down(guard: Guard) -> None:
    """Tell the driver, where it is on this host, that the strategy is ended.

    First of all: whatever happens next, the next run of the job knows.
    """
    if not current.driver_folder or local_rank():
        return
    path = os.path.join(current.driver_folder, FALLBACK_FILE)
    with contextlib.suppress(OSError):  # another host
        with open(f"{path}.{rank()}", "w") as file:
            # Without a barrier rank 0 alone knows it.
            reason = guard.verdict or "losses were not as they should be"
            json.dump({"step": guard.step, "reason": reason}, file)
        os.replace(f"{path}.{rank()}", path)
