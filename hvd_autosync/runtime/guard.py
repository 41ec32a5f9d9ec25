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

from hvd_autosync.runtime.agreement import agree_steps
from hvd_autosync.runtime.joining import tell_after_join
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
        self._means: list[float] = []

    def holds(self, mean: float, window: int) -> bool:
        """Whether ``mean``, of the window of that number, is healthy; it is remembered if so."""
        if not math.isfinite(mean):
            return False
        if self._ceilings and mean > self._ceilings[min(window, len(self._ceilings) - 1)]:
            return False
        if len(self._means) >= _BEGINNING and mean > self.top:
            return False
        self._means.append(mean)
        return True

    @property
    def top(self) -> float:
        """The highest healthy loss."""
        beginning = self._means[:_BEGINNING]
        steps = [b - a for a, b in zip(self._means, self._means[1:], strict=False)]
        # Of differences of neighbours, so that a falling loss is no noise.
        noise = math.sqrt(sum(step**2 for step in steps) / (2 * len(steps)))
        return max(beginning) + max(_DEVIATIONS * noise, _MARGIN * abs(max(beginning)))


class Guard:
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
        #: Losses of this window: their sum, where they are, and number; and those seen before.
        self._sum: torch.Tensor | None = None
        self._count = self._seen = 0
        #: What was sent of the window before, and its handle.
        self._sent: tuple[torch.Tensor, int] | None = None
        #: The last two snapshots: what came after the first was healthy.
        self._snapshots: list[_Snapshot] = []
        self._statistics: list[torch.Tensor] | None = None
        self._blind = False
        tell_after_join(self)

    def all_joined(self) -> None:
        """All ranks have just left ``join()``; a collective.

        Those with less data have missed windows and snapshots: all begin anew.
        """
        if self._sent is not None:
            synchronize(self._sent[1])
        self._sent = self._sum = None
        self._count = 0
        self._band, self._snapshots = Band(self._ceilings), []
        self.step = agree_steps(self.step, self._name)

    def stepped(self, losses: Losses, step: int | None = None) -> bool:
        """A step was made; a collective after each window.

        Args:
            losses: Those of this rank.
            step: Its number, where somebody counts them for all ranks.

        Returns:
            Whether the training is as it should be.
        """
        window = self.step // LOSS_WINDOW
        self.step = self.step + 1 if step is None else step
        loss = losses.since(self._seen)
        self._seen = losses.count
        if loss is not None:  # on its device: nobody waits for that in every step
            self._sum = loss.float() if self._sum is None else self._sum + loss.float()
            self._count += 1
        return self.step // LOSS_WINDOW == window or self._judged()

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

    def _judged(self) -> bool:
        total = self._exchange()
        if total is None:
            return True
        loss, count, ranks = total
        if ranks < size():
            return True  # some wait in join(): they cannot heed it
        if not count:
            self._say_that_it_is_blind()
            return True
        # Of the last two that are complete, the first has arrived.
        window = max(self.step // LOSS_WINDOW - 2, 0)
        if self._band.holds(loss / count, window) or not self._snapshots:
            return True
        # All ranks come to the same verdict, but for those that have gone to join() since.
        heeding = allreduce(torch.ones(1), op=Sum, name=f"{self._name}.verdict")
        if heeding.item() < size():
            return True
        self.verdict = f"the loss, {loss / count:.4g}, has left its band"
        return False

    def _exchange(self) -> tuple[float, float, float] | None:
        """Sum and number of losses of the window before the last, and ranks; sends the last."""
        arrived = None
        if self._sent is not None:
            synchronize(self._sent[1])
            loss, count, ranks = self._sent[0].tolist()
            arrived = loss, count, ranks
        own = 0.0 if self._sum is None else float(self._sum)
        sums = torch.tensor([own, self._count, 1], dtype=torch.float64)
        self._sent = sums, allreduce_async_(sums, name=self._name, op=Sum)
        self._sum, self._count = None, 0
        return arrived

    def _say_that_it_is_blind(self) -> None:
        if not self._blind and rank() == 0:
            self._blind = True
            print(
                "hvd-autosync: no loss is seen, so nobody guards this training; call "
                "hvd_autosync.report(loss) in every step", file=sys.stderr,
            )  # fmt: skip


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
