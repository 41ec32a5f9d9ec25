"""Loss guard handler: passes losses to the guard, takes its snapshots, and falls back."""

from __future__ import annotations

import contextlib
import json
import weakref
from pathlib import Path
from typing import Any

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.operations import local_rank, rank
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.guard.fallback import fall_back_to_exact
from hvd_autosync.runtime.guard.guard import Guard
from hvd_autosync.search_space.trial import FALLBACK_FILE, LOSS_WINDOW

#: This many rounds of local steps must have predicted losses if rounds are longer than this many
#: windows; otherwise a slower learning of separate replicas goes unnoticed.
_ROUNDS_PREDICTED, _LONG_ROUND = 2, 2


class LossGuardHandler:
    """Connects one optimizer to its loss guard.

    Args:
        optimizer: Horovod's optimizer, of our class; its ``_guard`` is ``None`` after a fallback.
    """

    def __init__(self, optimizer: Any) -> None:
        self._reference = weakref.ref(optimizer)
        self._seen = 0
        self._warned = False

    def stepped(self) -> None:
        """A step with a barrier was made; a collective after each window."""
        optimizer, guard = self._optimizer, self._guard
        if guard is None:
            return
        assert current.losses is not None, "a guarded training records losses"
        if not self._warned and optimizer._local is not None and optimizer._local.round_steps:
            self._warned = True
            _warn_of_long_rounds(guard, optimizer._local.round_steps)
        local, phases = optimizer._local, optimizer._phases
        parts = [each for each in (phases, local) if each is not None]
        equal = all(each.replicas_in_sync for each in parts)
        near = local is not None and local.near_average
        average = equal or (near and (phases is None or phases.replicas_in_sync))
        step = parts[0].step if parts else None
        if not guard.stepped(current.losses, step, average=average):
            self.fall_back()
        elif equal and guard.wants_snapshot:
            self._take_snapshot(guard)

    def loss(self) -> float | None:
        """The loss of this rank's last step, if it had one and there is a guard."""
        if self._guard is None or current.losses is None:
            return None
        loss = current.losses.since(self._seen)
        self._seen = current.losses.count
        return None if loss is None else float(loss)

    def healthy(self, loss: float) -> bool:
        """Whether the guard accepts any rank's loss, in steps without a barrier; on one rank."""
        return self._guard is None or self._guard.accepts_one(loss)

    def on_quiescent(self, step: int, *, waiting: bool, healthy: bool = True) -> None:
        """All ranks stop before or after steps without a barrier, with equal parameters.

        Args:
            step: As of :meth:`Guard.on_quiescent`.
            waiting: As of :meth:`Guard.on_quiescent`.
            healthy: Whether the parameters are fit for a snapshot.
        """
        if self._guard is not None:
            self._guard.on_quiescent(step, waiting=waiting)
            if healthy and self._guard.wants_snapshot:
                self._take_snapshot(self._guard)

    def fall_back(self) -> None:
        """End the lossy strategy, and continue from the better of current parameters and snapshot.

        A collective.
        """
        optimizer, guard = self._optimizer, self._guard
        assert guard is not None, "the guard has rejected a loss"
        _report_fallback(guard)
        optimizer._settle_steps()
        done = "kept what was learned"
        if not guard.keeps:
            optimizer._exchange.forget_states()  # snapshots have no states of shards
            done = f"restored step {guard.restore(optimizer)}"
        elif optimizer._local is not None:
            optimizer._local.average()
        warn_on_rank_0(
            f"loss guard: {guard.verdict} at step {guard.step}; {done}; the training continues "
            "uncompressed and synchronous"
        )
        fall_back_to_exact(optimizer)
        if optimizer._local is not None:
            optimizer._local.stop()
        if optimizer._phases is not None:
            optimizer._phases.equalize()

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


def _warn_of_long_rounds(guard: Guard, steps: int) -> None:
    """Warn if slower learning of separate replicas cannot be detected."""
    predicted = guard.predicted_steps
    if steps <= _LONG_ROUND * LOSS_WINDOW or predicted >= _ROUNDS_PREDICTED * steps:
        return
    known = f"for {predicted} steps only" if predicted else "by no trials"
    warn_on_rank_0(
        f"loss guard: rounds have {steps} steps, and losses are predicted {known}; beyond "
        "that, slower learning than without local steps goes unnoticed. Use shorter rounds, or "
        "tune with more --autosync-quality-steps"
    )


def _report_fallback(guard: Guard) -> None:
    """Tell the driver, if it is on this host, that the training falls back.

    This comes first: whatever happens next, the next run of the job knows.
    """
    if not current.driver_folder or local_rank():
        return
    path = Path(current.driver_folder, FALLBACK_FILE)
    own = path.with_name(f"{path.name}.{rank()}")
    # Without a barrier only rank 0 knows the reason.
    reason = guard.verdict or "rank 0 has rejected the losses"
    with contextlib.suppress(OSError):  # the driver is on another host
        own.write_text(json.dumps({"step": guard.step, "reason": reason}))
        own.replace(path)
