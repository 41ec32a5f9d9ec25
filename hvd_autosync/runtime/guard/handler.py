"""Loss guard handler: passes losses to the guard, takes its snapshots, and falls back."""

from __future__ import annotations

import contextlib
import functools
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.operations import local_rank, once_per_rank, rank
from hvd_autosync.runtime.collectives.settling import settle_before
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.guard.fallback import fall_back_to_exact
from hvd_autosync.runtime.guard.guard import Guard, sums_under_way
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.runtime.patches.backward import watch_backward
from hvd_autosync.runtime.patches.checkpoints import call_on_checkpoint
from hvd_autosync.search_space.trial import FALLBACK_FILE, LOSS_WINDOW

#: This many rounds of local steps must have predicted losses if rounds are longer than this many
#: windows; otherwise a slower learning of separate replicas goes unnoticed.
_ROUNDS_PREDICTED, _LONG_ROUND = 2, 2


#: The guards in order of creation, which is the same on all ranks.
_GUARDS: list[weakref.ref[Guard]] = []


class Guarded(Protocol):
    """What the handler uses of an optimizer's method of synchronization."""

    @property
    def replicas_in_sync(self) -> bool:
        """Whether parameters are the same on all ranks."""

    @property
    def near_average(self) -> bool:
        """Whether they are equal, or nearly so."""

    @property
    def round_steps(self) -> int:
        """Steps of the current round of local steps."""

    def average(self) -> None:
        """Make parameters equal; a collective."""

    def settle(self) -> None:
        """Make all deferred updates."""

    def forget_states(self) -> None:
        """Drop states of parts of parameters."""


class LossGuardHandler:
    """Connects one optimizer to its loss guard.

    The thread of messages takes :attr:`guard` once for each loss, and the other thread may end it
    meanwhile: the guard itself locks what both use. Of the losses of this process it reads only
    whether there are several of them, which needs no lock.

    Attributes:
        guard: The guard; ``None`` if the training is exact, by its plan or after a fallback.
    """

    def __init__(self) -> None:
        self.guard: Guard | None = None
        self._optimizer: Callable[[], Any] = lambda: None
        self._sees_loads = False
        self._seen = 0
        self._warned = False

    @property
    def watches(self) -> bool:
        """Whether there is a guard."""
        return self.guard is not None

    def watch(self, name: str, optimizer: Any) -> None:
        """Guard the training of ``optimizer`` from now on; on all ranks.

        Args:
            name: As of :class:`Guard`.
            optimizer: Horovod's optimizer, of our class.
        """
        if current.losses is None:
            current.losses = Losses()
            watch_backward(current.losses)
        self._optimizer = weakref.ref(optimizer)
        self.guard = _new_guard(name)
        if not self._sees_loads:
            self._sees_loads = True
            call_on_checkpoint(optimizer, self._on_load)

    def stepped(self, method: Guarded, step: int | None) -> None:
        """A step with a barrier was made; a collective after each window.

        Args:
            method: What synchronizes the optimizer.
            step: Its number, if all ranks agree on it.
        """
        guard = self.guard
        if guard is None:
            return
        assert current.losses is not None, "a guarded training records losses"
        if not self._warned and method.round_steps:
            self._warned = True
            _warn_of_long_rounds(guard, method.round_steps)
        if current.losses.several:
            _warn_of_several_losses()
        average = method.near_average
        if not guard.stepped(current.losses, step, average=average):
            self.fall_back()
        elif method.replicas_in_sync and guard.wants_snapshot:
            self._take_snapshot(guard)

    def loss(self) -> float | None:
        """Return the loss of this rank's last step, if it had one and there is a guard."""
        if self.guard is None or current.losses is None:
            return None
        loss, self._seen, _ = current.losses.end_step(self._seen)
        if current.losses.several:
            _warn_of_several_losses()
        return None if loss is None else float(loss)

    def healthy(self, loss: float) -> bool:
        """Return whether the guard accepts a rank's loss, in steps without a barrier; on one rank.

        Called in the thread of messages.
        """
        guard, losses = self.guard, current.losses
        several = losses is not None and losses.several
        return guard is None or guard.accepts_one(loss, several=several)

    def on_quiescent(self, step: int, *, waiting: bool, healthy: bool = True) -> None:
        """All ranks stop before or after steps without a barrier, with equal parameters.

        Args:
            step: As of :meth:`Guard.on_quiescent`.
            waiting: As of :meth:`Guard.on_quiescent`.
            healthy: Whether the parameters are fit for a snapshot.
        """
        guard = self.guard
        if guard is not None:
            guard.on_quiescent(step, waiting=waiting)
            if healthy and guard.wants_snapshot:
                self._take_snapshot(guard)

    def fall_back(self) -> None:
        """End the lossy strategy, and continue from the better of current parameters and snapshot.

        A collective.
        """
        optimizer, guard = self._optimizer(), self.guard
        assert guard is not None, "the guard has rejected a loss"
        _report_fallback(guard)
        method: Guarded = optimizer._sync.method
        method.settle()
        done = "kept what was learned"
        if not guard.keeps:
            method.forget_states()  # snapshots have no states of shards
            done = f"restored step {guard.restore(optimizer)}"
        else:
            method.average()
        warn_on_rank_0(
            f"loss guard: {guard.verdict} at step {guard.step}; {done}; the training continues "
            "uncompressed and synchronous"
        )
        fall_back_to_exact(optimizer, together=True)

    def end(self) -> None:
        """Guard no longer; nothing would wait for what the guard has sent."""
        if self.guard is not None:
            self.guard.settle()
        self.guard = None

    def _on_load(self) -> None:
        if self.guard is not None:
            self.guard.on_load()

    def _take_snapshot(self, guard: Guard) -> None:
        optimizer = self._optimizer()
        optimizer._sync.method.settle()
        guard.take_snapshot(optimizer)


def _new_guard(name: str) -> Guard:
    """Return a guard with predicted losses, unless there are several guards.

    The prediction is of one optimizer's losses, and it is unknown of which.
    """
    _settle_before_reinitialization()
    prediction = None if _GUARDS else current.loss_prediction
    if prediction is not None and not prediction.levels:
        warn_on_rank_0(
            "loss guard: no quality trials predict the losses of this training; only a loss that "
            "rises or is not finite is detected. Tune with --autosync-allow for a prediction"
        )
    guard = Guard(name, prediction)
    if len(_GUARDS) == 1 and (first := _GUARDS[0]()) is not None:
        first.forget_prediction()
    _GUARDS.append(weakref.ref(guard))
    return guard


@functools.cache
def _settle_before_reinitialization() -> None:
    settle_before(lambda: sums_under_way().settle())


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


@once_per_rank
def _warn_of_several_losses() -> None:
    """Warn once, for all optimizers."""
    warn_on_rank_0(
        "loss guard: the script has several losses, so only one that is not finite is detected; "
        "call hvd_autosync.report(loss) in every step"
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
