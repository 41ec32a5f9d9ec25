"""Watches the loss of a real training under a lossy strategy, and goes back to exact steps in time.

Ranks add up their losses over windows of steps and look at the mean of all ranks a window later, so
nobody ever waits for it::

    | window            | window            | window            |
      losses add up ... ^ sum is sent       ^ mean is judged, a snapshot is taken
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from horovod.torch.mpi_ops import Sum, allreduce, allreduce_async_, rank, size, synchronize

from hvd_autosync.runtime.agreement import agree_steps, same_on_all
from hvd_autosync.runtime.joining import Joiner, tell_of_joins
from hvd_autosync.runtime.losses import Losses
from hvd_autosync.runtime.normalization import running_statistics
from hvd_autosync.runtime.rank_states import parameters_of
from hvd_autosync.search_space.trial import LOSS_WINDOW

#: Windows between two snapshots: more than a loss takes to be judged.
_SNAPSHOT_EVERY = 8
#: A loss this many deviations of former windows above the highest of the first ones has left its
#: band; of so many windows that is the beginning.
_DEVIATIONS, _BEGINNING = 6.0, 4
#: The band is at least this much wider than the beginning's highest loss, relatively.
_MARGIN = 0.1


class Band:
    """Where the means of windows lie in a healthy training.

    A loss falls, stays, or rises within its noise. It has no reason to rise clearly above where it
    began; a training that begins low, as a fine-tuning may, is judged by its noise. Where exact
    trainings have shown how their losses fall, it has no reason to lag far behind them either.

    Args:
        ceilings: Highest healthy mean of each window; the last holds for all that follow.
    """

    def __init__(self, ceilings: Sequence[float] = ()) -> None:
        self._ceilings = ceilings
        #: Of the first windows, and of the last.
        self._first: list[float] = []
        self._last = 0.0
        #: Sum and number of the squares of differences of neighbours.
        self._squares, self._pairs = 0.0, 0

    def holds(self, mean: float, window: int) -> bool:
        """Whether ``mean``, of the window of that number, is healthy; it is remembered if so."""
        if not math.isfinite(mean):
            return False
        if self._ceilings and mean > self._ceilings[min(window, len(self._ceilings) - 1)]:
            return False
        if len(self._first) == _BEGINNING:
            beginning = max(self._first)
            if mean > beginning + self._margin(beginning):
                return False
        if self._first:
            self._squares += (mean - self._last) ** 2
            self._pairs += 1
        if len(self._first) < _BEGINNING:
            self._first.append(mean)
        self._last = mean
        return True

    def bears(self, mean: float, fewer: float) -> bool:
        """Whether the mean loss of an average of replicas is healthy beside their own.

        Called after :meth:`holds` of their own losses in the same window.

        Args:
            mean: The mean, of some of the window's losses.
            fewer: How many times fewer these are.
        """
        if not math.isfinite(mean):
            return False
        if len(self._first) < _BEGINNING:
            return True  # the noise is not known yet
        return mean <= self._last + self._margin(self._last, fewer)

    def forget_ceilings(self) -> None:
        """Judge without them from now on."""
        self._ceilings = ()

    def _margin(self, level: float, fewer: float = 1.0) -> float:
        """By how much a mean may be above ``level``, of so many times fewer losses."""
        return max(_DEVIATIONS * math.sqrt(fewer) * self._noise(), _MARGIN * abs(level))

    def _noise(self) -> float:
        """Standard deviation of a window's mean.

        Of differences of neighbours, so that a falling loss is no noise.
        """
        return math.sqrt(self._squares / (2 * self._pairs)) if self._pairs else 0.0


class Guard(Joiner):
    """Guards one optimizer.

    Args:
        name: Tells its operations from those of others; equal on all ranks.
        ceilings: As of :class:`Band`.

    Attributes:
        step: Steps so far.
        verdict: What is wrong, once something is.
    """

    def __init__(self, name: str, ceilings: Sequence[float] = ()) -> None:
        self.step = 0
        self.verdict = ""
        self._name = f"hvd_autosync.guard.{name}"
        self._ceilings = ceilings
        self._band = Band(ceilings)
        #: Losses of this window: of all steps, and of those that began with equal parameters.
        self._all, self._of_equal = _Sum(), _Sum()
        self._equal = True
        self._seen = 0
        #: What was sent of the window before, and its handle.
        self._sent: tuple[torch.Tensor, int] | None = None
        #: Losses of any rank that were not judged yet, and windows of such since :attr:`step`.
        self._loose: list[float] = []
        self._loose_windows = 0
        #: The last two snapshots: what came after the first was healthy.
        self._snapshots: list[_Snapshot] = []
        self._statistics: list[torch.Tensor] | None = None
        self._blind = False
        tell_of_joins(self)

    def about_to_join(self) -> None:
        """Wait for what was sent of the last window."""
        self._await_sent()

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; a collective.

        Those with less data have missed windows: all begin anew. They may have missed snapshots.
        """
        self._all, self._of_equal = _Sum(), _Sum()
        self._band = Band(self._ceilings)
        if not same_on_all([each.step for each in self._snapshots], f"{self._name}.snapshots"):
            self._snapshots = []
        self.step = agree_steps(self.step, self._name)

    def stepped(self, losses: Losses, step: int | None = None, *, equal: bool = True) -> bool:
        """A step was made; a collective after each window.

        Args:
            losses: Those of this rank.
            step: Its number, where somebody counts them for all ranks.
            equal: Whether parameters are the same on all ranks after it.

        Returns:
            Whether the training is as it should be.
        """
        window = self.step // LOSS_WINDOW
        self.step = self.step + 1 if step is None else step
        loss = losses.since(self._seen)
        self._seen = losses.count
        if loss is not None:
            self._all.add(loss)
            if self._equal:
                self._of_equal.add(loss)
        self._equal = equal
        return self.step // LOSS_WINDOW == window or self._judged()

    def bears_one(self, loss: float) -> bool:
        """Whether one rank's loss is well, in steps that ranks make without waiting for others.

        One rank looks at the losses of all; it tells them what it finds.
        """
        if not math.isfinite(loss):
            self.verdict = f"a loss, {loss:.4g}, is no number"
            return False
        self._loose.append(loss)
        if len(self._loose) < LOSS_WINDOW * size():
            return True
        mean = math.fsum(self._loose) / len(self._loose)
        self._loose.clear()
        self._loose_windows += 1
        if self._band.holds(mean, self.step // LOSS_WINDOW + self._loose_windows - 1):
            return True
        self.verdict = f"the loss, {mean:.4g}, has left its band"
        return False

    def at_rest(self, step: int, *, waiting: bool) -> None:
        """Ranks stop together, after steps that they made without waiting for each other.

        Args:
            step: Steps of the training so far; the same on all ranks.
            waiting: Whether they wait for each other from now on. Their bands begin anew then, for
                one of them has seen what the others have not.
        """
        self.step = step
        self._loose_windows = 0
        if waiting:
            self._await_sent()
            self._all, self._of_equal = _Sum(), _Sum()
            self._band = Band(self._ceilings)
            self._loose.clear()

    def forget_ceilings(self) -> None:
        """Judge this training by itself alone, as where several optimizers have losses."""
        self._ceilings = ()
        self._band.forget_ceilings()

    @property
    def wants_snapshot(self) -> bool:
        """Whether the last snapshot is old."""
        last = self._snapshots[-1].step if self._snapshots else -math.inf
        return self.step - last >= _SNAPSHOT_EVERY * LOSS_WINDOW

    def take_snapshot(self, optimizer: Any) -> None:
        """Remember parameters, the same on all ranks, with states and statistics."""
        if self._statistics is None:
            self._statistics = running_statistics(parameters_of(optimizer))
        self._snapshots = self._snapshots[-1:]
        self._snapshots.append(_Snapshot(self.step, optimizer, self._statistics))

    def restore(self, optimizer: Any) -> int:
        """Go back to the last snapshot that is surely healthy; returns its step."""
        self._snapshots[0].restore(optimizer)
        return self._snapshots[0].step

    def _await_sent(self) -> None:
        if self._sent is not None:
            synchronize(self._sent[1])
        self._sent = None

    def _judged(self) -> bool:
        total = self._exchange()
        if total is None:
            return True
        loss, count, loss_of_equal, count_of_equal, ranks = total
        if ranks < size():
            return True  # some wait in join(): they cannot heed it
        if not count:
            self._say_that_it_is_blind()
            return True
        # Of the last two that are complete, the first has arrived.
        window = max(self.step // LOSS_WINDOW - 2, 0)
        mean = loss / count
        healthy = self._band.holds(mean, window)
        if healthy and count_of_equal:
            # Replicas that are well each by itself may have drifted too far apart for an average.
            mean = loss_of_equal / count_of_equal
            healthy = self._band.bears(mean, count / count_of_equal)
        if healthy or not self._snapshots:
            return True
        # All ranks come to the same verdict, but for those that have gone to join() since.
        heeding = allreduce(torch.ones(1), op=Sum, name=f"{self._name}.verdict")
        if heeding.item() < size():
            return True
        self.verdict = f"the loss, {mean:.4g}, has left its band"
        return False

    def _exchange(self) -> list[float] | None:
        """Sums and numbers of losses of the window before the last, and ranks; sends the last."""
        arrived = None
        if self._sent is not None:
            synchronize(self._sent[1])
            arrived = self._sent[0].tolist()
        sums = torch.tensor([*self._all.taken(), *self._of_equal.taken(), 1], dtype=torch.float64)
        self._sent = sums, allreduce_async_(sums, name=self._name, op=Sum)
        return arrived

    def _say_that_it_is_blind(self) -> None:
        if not self._blind and rank() == 0:
            self._blind = True
            print(
                "hvd-autosync: no loss is seen, so nobody guards this training; call "
                "hvd_autosync.report(loss) in every step", file=sys.stderr,
            )  # fmt: skip


class _Sum:
    """A sum of losses on their device, so that nobody waits for that in every step."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        self._sum = loss.float() if self._sum is None else self._sum + loss.float()
        self._count += 1

    def taken(self) -> tuple[float, int]:
        """Sum and number so far; both begin anew."""
        taken = 0.0 if self._sum is None else float(self._sum), self._count
        self._sum, self._count = None, 0
        return taken


class _Snapshot:
    """Parameters and states of an optimizer, and statistics of its model, after a step."""

    def __init__(self, step: int, optimizer: Any, statistics: list[torch.Tensor]) -> None:
        self.step = step
        self._statistics = [(each, each.clone()) for each in statistics]
        self._parameters = [each.detach().clone() for each in parameters_of(optimizer)]
        self._states = [copy.deepcopy(optimizer.state.get(p, {})) for p in parameters_of(optimizer)]

    @torch.no_grad()
    def restore(self, optimizer: Any) -> None:
        parameters = parameters_of(optimizer)
        torch._foreach_copy_([each.detach() for each in parameters], self._parameters)
        for now, then in self._statistics:
            now.copy_(then)
        for parameter, state in zip(parameters, self._states, strict=True):
            if state:
                optimizer.state[parameter] = copy.deepcopy(state)
            else:
                optimizer.state.pop(parameter, None)
