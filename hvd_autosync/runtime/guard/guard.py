"""Loss guard: watches the loss of a real training under a lossy strategy.

Ranks sum their losses over windows of steps and test the mean over all ranks one window later, so
no rank ever waits for it::

    | window            | window            | window            |
      sum of losses ... ^ sum is sent       ^ mean is tested, a snapshot is taken

Where optimizers have losses of their own (``measure/losses.py``), which may rise in a training that
is healthy, only a loss that is not finite is detected.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from typing import Any

import torch

from hvd_autosync.runtime.collectives.agreement import (
    agree_any,
    agree_steps,
    gather_texts,
    same_on_all,
)
from hvd_autosync.runtime.collectives.operations import (
    CollectiveError,
    Sum,
    allreduce,
    allreduce_async_,
    once_per_rank,
    size,
    synchronize,
)
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.guard.loss_envelope import LossEnvelope, not_finite
from hvd_autosync.runtime.guard.snapshots import Snapshots
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.runtime.patches.join_hook import JoinHook, register_join_hook
from hvd_autosync.search_space.trial import LOSS_WINDOW, LossPrediction

_LOG = logging.getLogger(__name__)
#: Said on a rank that was away when others did not accept a loss.
_MEANWHILE = "other ranks have not accepted a loss while this one was in join()"
#: Windows between two snapshots: more than the test of a loss takes.
_SNAPSHOT_EVERY = 8


class Guard(JoinHook):
    """The loss guard of one optimizer.

    Without a barrier rank 0 tests losses in the thread of messages (:meth:`accepts_one`), while
    this rank trains. What the tests use is used under a lock then; with a barrier there are no
    such messages.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        prediction: Predicted losses (:class:`LossEnvelope`).

    Attributes:
        step: Steps so far.
        verdict: Why the loss is not accepted; empty while it is.
        keeps: Whether the current parameters are better than the snapshot nevertheless.
    """

    def __init__(self, name: str, prediction: LossPrediction | None = None) -> None:
        self.step = 0
        self.verdict = ""
        self.keeps = False
        self._name = f"hvd_autosync.guard.{name}"
        self._prediction = prediction
        self._envelope = LossEnvelope(prediction)
        #: Of windows in which some ranks waited in ``join()``: their means vary more.
        self._of_some = LossEnvelope()
        #: Losses of this window: of all steps, and of steps from averaged parameters.
        self._all, self._of_averages = _Sum(), _Sum()
        #: Whether parameters after the last step, and before it, were the average, or near it.
        self._at_average = self._before_at_average = True
        self._several = False
        self._seen = 0
        #: The sum that was sent for the window before, and its handle; `None` once it has arrived.
        self._sent: tuple[torch.Tensor, int | None] | None = None
        #: Steps in this window.
        self._made = 0
        #: Losses of any rank that were not tested yet, and windows of such losses since
        #: :attr:`step`.
        self._loose: list[float] = []
        self._loose_windows = 0
        self._snapshots = Snapshots()
        #: Step of a snapshot -> mean loss of the window in which it was taken.
        self._losses: dict[int, float] = {}
        self._warned = False
        #: Why a loss was not accepted while some rank waited in ``join()``.
        self._owed = ""
        #: Whether this rank has loaded a checkpoint, and not all ranks have started over since.
        self._loaded = False
        #: All ranks fall back with their first step after this one; ``None``: they do not.
        self._due_after: int | None = None
        self._lock = threading.Lock()
        sums_under_way()
        register_join_hook(self)

    def about_to_join(self) -> None:
        """Wait for the sum of the last window."""
        self.settle()

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; a collective.

        Ranks with less data have missed windows, so all go on with the tests of a rank that has
        missed the least, and keep the snapshots that all have. Where all have made the same steps,
        as after most epochs, nothing is missed. What others have not accepted meanwhile counts now.
        """
        (owed,) = agree_any([bool(self._owed)], f"{self._name}.owed")
        why, self._owed = self._owed or _MEANWHILE, ""
        seen = [self.step, *self._snapshots.steps, *map(list, sorted(self._losses.items()))]
        if same_on_all(seen, f"{self._name}.joined"):
            return
        self._sent, self._losses = None, {}
        taken = gather_texts(json.dumps(self._snapshots.steps), f"{self._name}.snapshots")
        self._snapshots.keep(set.intersection(*(set(json.loads(steps)) for steps in taken)))
        self.step = agree_steps(self.step, self._name)
        self._begin_windows()
        if owed and self._snapshots.steps:
            self.verdict, self._due_after = why, self.step

    def stepped(self, losses: Losses, step: int | None = None, *, average: bool = True) -> bool:
        """Count a step that was made; a collective after each window.

        Args:
            losses: The losses of this rank.
            step: Its number, if another component counts the steps of all ranks.
            average: Whether parameters after it are the average over ranks, or near it.

        Returns:
            Whether the loss is accepted.
        """
        window = self.step // LOSS_WINDOW
        self.step = self.step + 1 if step is None else step
        self._made += 1
        loss, self._seen, _ = losses.end_step(self._seen)
        self._several = losses.several
        if loss is not None:
            self._all.add(loss)
            if self._before_at_average if losses.late else self._at_average:
                self._of_averages.add(loss)
        self._before_at_average, self._at_average = self._at_average, average
        if self._due_after is not None and self.step > self._due_after:
            self._due_after = None
            if self._may_fall_back():
                return False
            self._owed, self.verdict = self.verdict, ""
        return self.step // LOSS_WINDOW == window or self._test_window()

    def accepts_one(self, loss: float, *, several: bool = False) -> bool:
        """Return whether one rank's loss is accepted, in steps without a barrier.

        One rank tests the losses of all, and tells the others the result.

        Args:
            loss: The loss.
            several: Whether optimizers have losses of their own.
        """
        with self._lock:
            if not math.isfinite(loss):
                self.verdict = f"a loss of {loss:.4g} is not finite"
                return False
            if several:
                return True
            self._loose.append(loss)
            if len(self._loose) < LOSS_WINDOW * size():
                return True
            mean = math.fsum(self._loose) / len(self._loose)
            self._loose.clear()
            self._loose_windows += 1
            window = self.step // LOSS_WINDOW + self._loose_windows - 1
            self.verdict = self.verdict or self._envelope.accepts(mean, window)
            return not self.verdict

    def on_quiescent(self, step: int, *, waiting: bool) -> None:
        """Ranks stop together, after steps without a barrier.

        Args:
            step: Steps of the training so far; the same on all ranks.
            waiting: Whether such steps begin or end. One rank sees the losses of all without a
                barrier, so all go on with its tests.
        """
        if waiting:
            self._await_sent()  # other ranks send it; the lock is for nothing that waits for them
        with self._lock:
            self.step = step
            self._loose_windows = 0
            if waiting:
                self._loose.clear()
        if waiting:
            self._begin_windows()

    def on_load(self) -> None:
        """The script has loaded a checkpoint on this rank: losses may be higher from now on."""
        self._loaded = self._loaded or self.step > 0

    def forget_prediction(self) -> None:
        """Test without a prediction, as several optimizers with losses require."""
        with self._lock:
            self._prediction = None
            self._envelope.forget_prediction()

    @property
    def predicted_steps(self) -> int:
        """Number of steps with predicted losses."""
        return 0 if self._prediction is None else LOSS_WINDOW * len(self._prediction.levels)

    @property
    def wants_snapshot(self) -> bool:
        """Whether the last snapshot is old; none is taken of what a loss may show to be wrong."""
        if self._owed:
            return False
        last = self._snapshots.steps[-1] if self._snapshots.steps else -math.inf
        return self.step - last >= _SNAPSHOT_EVERY * LOSS_WINDOW

    def take_snapshot(self, optimizer: Any) -> None:
        """Copy parameters, which are equal on all ranks, with states and statistics."""
        self._snapshots.take(self.step, optimizer)
        _LOG.debug("step %d: snapshot taken", self.step)

    def restore(self, optimizer: Any) -> int:
        """Restore the last snapshot known to be healthy; returns its step."""
        step = self._healthy_step
        self._snapshots.restore(optimizer, step)
        return step

    @property
    def _healthy_step(self) -> int:
        """Step of the last snapshot after which as many losses were accepted as between two."""
        return self._snapshots.last_until(self.step - _SNAPSHOT_EVERY * LOSS_WINDOW)

    def _begin_windows(self) -> None:
        """Begin a window at the current step, and take over the tests that have seen most.

        A collective.
        """
        self._all, self._of_averages, self._made = _Sum(), _Sum(), 0
        tests = self._envelope, self._of_some
        # A rank that was away has missed that the others have started over.
        unpredicted = self._prediction is None
        own = json.dumps([self._loaded, unpredicted, *(each.to_json() for each in tests)])
        gathered = map(json.loads, gather_texts(own, f"{self._name}.tests"))
        loaded, without, *seen = zip(*gathered, strict=True)
        if any(without):
            self.forget_prediction()
        with self._lock:
            for place, each in enumerate(tests):
                each.take(max(seen[place], key=lambda of: int(of["windows"])))
        if any(loaded):
            self._start_over()

    def settle(self) -> None:
        """Wait for the sum that is under way, and keep it: nothing may be then."""
        if self._sent is not None and self._sent[1] is not None:
            sums_under_way().wait(self._sent[1])
            self._sent = self._sent[0], None

    def _await_sent(self) -> None:
        self.settle()
        self._sent = None

    def _test_window(self) -> bool:
        total = self._exchange()
        if total is None:
            return True
        loss, count, loss_of_averages, count_of_averages, several, ranks, made, loaded = total
        if loaded:
            self._start_over()
            return True
        of_all = ranks == size()
        if not count:
            if of_all:
                self._warn_of_no_losses()
            return True
        # Of the last two complete windows, the sum of the first has arrived.
        window = max(self.step // LOSS_WINDOW - 2, 0)
        mean = loss / count
        _LOG.debug("window %d: mean loss %.6g of %d losses", window, mean, count)
        # The mean of less than half a window varies more than others.
        alone = several or 2 * made < ranks * LOSS_WINDOW
        tests = self._envelope if of_all else self._of_some
        wrong = not_finite(mean) if alone else tests.accepts(mean, window)
        if not of_all:  # some wait in join(), and could not fall back now
            self._owed = self._owed or wrong
            return True
        if not wrong:
            taken = self._snapshots.steps
            found = {step: mean for step in taken if step // LOSS_WINDOW == window}
            self._losses = {k: v for k, v in {**self._losses, **found}.items() if k in taken}
        if not wrong and not alone and 0 < count_of_averages < count:
            mean = loss_of_averages / count_of_averages
            wrong = self._envelope.accepts_average(mean, count_of_averages, count)
        if not wrong or not self._snapshots.steps:
            return True
        if not self._may_fall_back():  # all others have the same result
            self._owed = wrong
            return True
        self.verdict = wrong
        self.keeps = mean < self._losses.get(self._healthy_step, -math.inf)
        return False

    def _may_fall_back(self) -> bool:
        """Return whether no rank has entered ``join()``; a collective of the others.

        None may have loaded a checkpoint either: snapshots are of what it has discarded.
        """
        here = torch.tensor([1, self._loaded], dtype=torch.int64, device="cpu")
        present, loaded = allreduce(here, op=Sum, name=f"{self._name}.verdict").tolist()
        return present == size() and not loaded

    def _start_over(self) -> None:
        """Forget losses and snapshots: the script has loaded a checkpoint; on all ranks."""
        _LOG.debug("step %d: a checkpoint was loaded, the guard starts over", self.step)
        self._loaded, self._owed, self._losses = False, "", {}
        self._snapshots.forget()
        with self._lock:
            self._prediction = None
            for each in (self._envelope, self._of_some):
                each.start_over()

    def _exchange(self) -> list[float] | None:
        """Return what all ranks know of the window before the last, and send the last window's.

        These are sums and counts of losses, the number of ranks with several, that of ranks, that
        of their steps, and the number of ranks that have loaded a checkpoint.
        """
        arrived = None
        sums = torch.tensor(
            [
                *self._all.taken(),
                *self._of_averages.taken(),
                self._several,
                1,
                self._made,
                self._loaded,
            ],
            dtype=torch.float64,
            device="cpu",
        )
        self._made = 0
        sent, self._sent = self._sent, None
        try:
            if sent is not None:
                if sent[1] is not None:
                    sums_under_way().wait(sent[1])
                arrived = sent[0].tolist()
            handle = allreduce_async_(sums, name=self._name, op=Sum)
            sums_under_way().add(handle)
            self._sent = sums, handle
        except CollectiveError:
            return None  # others have ended; if they are still needed, the next collective raises
        return arrived

    def _warn_of_no_losses(self) -> None:
        if not self._warned:
            self._warned = True
            warn_on_rank_0(
                "loss guard: no loss is seen, so this training is not guarded; call "
                "hvd_autosync.report(loss) in every step"
            )


class _UnderWay(JoinHook):
    """The sums of one rank that are under way; a guard may be gone before its own is there."""

    def __init__(self) -> None:
        self._handles: set[int] = set()
        register_join_hook(self)

    def add(self, handle: int) -> None:
        """A sum was sent."""
        self._handles.add(handle)

    def wait(self, handle: int) -> None:
        """Wait for a sum, unless that was done already."""
        if handle in self._handles:
            self._handles.remove(handle)
            synchronize(handle)

    def settle(self) -> None:
        """Wait for all."""
        for handle in [*self._handles]:
            self.wait(handle)

    def about_to_join(self) -> None:
        """Wait for all."""
        self.settle()

    def all_joined(self) -> None:
        """Nothing is under way."""


@once_per_rank
def sums_under_way() -> _UnderWay:
    """Return those of this rank; all ranks call it first as they create the first guard."""
    return _UnderWay()


class _Sum:
    """A sum of losses on their device, so that steps do not wait for the device."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        self._sum = loss.float() if self._sum is None else self._sum + loss.float()
        self._count += 1

    def taken(self) -> tuple[float, int]:
        """Sum and count so far; resets both."""
        taken = 0.0 if self._sum is None else float(self._sum), self._count
        self._sum, self._count = None, 0
        return taken
