"""Snapshots of a training, for the loss guard to restore.

There are two: training after the newer one is still being tested, unless it is old itself, as in
long epochs without a barrier. The memory of each is allocated once and reused.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import torch

from hvd_autosync.runtime.state.normalization import Statistic, statistics_beside
from hvd_autosync.runtime.state.optimizer_states import held_state
from hvd_autosync.runtime.state.states import parameters_of

_KEPT = 2


class Snapshots:
    """The last two snapshots of one optimizer.

    Attributes:
        steps: The steps after which they were taken, the older one first.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._held: list[_Snapshot] = []
        self._statistics: list[Statistic] | None = None
        #: Number of the optimizer's parameters.
        self._count = 0

    def take(self, step: int, optimizer: Any) -> None:
        """Copy parameters, states and running statistics in place of the oldest snapshot."""
        parameters = parameters_of(optimizer)
        if self._statistics is None or len(parameters) != self._count:
            self._statistics = statistics_beside(parameters)
            self._count = len(parameters)
        snapshot = self._held.pop(0) if len(self._held) == _KEPT else _Snapshot()
        if snapshot.count != self._count:  # the script has added some
            snapshot = _Snapshot(self._count)
        snapshot.take(parameters, self._statistics, optimizer)
        self._held.append(snapshot)
        self.steps = [*self.steps, step][-_KEPT:]

    def last_until(self, step: int) -> int:
        """Return the step of the newest snapshot that is not later than ``step``, else the oldest.

        There is one.
        """
        return next((each for each in reversed(self.steps) if each <= step), self.steps[0])

    def restore(self, optimizer: Any, step: int) -> None:
        """Restore the snapshot that was taken then, and forget all.

        What the script has added to the model since keeps its values.
        """
        self._held[self.steps.index(step)].give(optimizer)
        self.forget()

    @property
    def nbytes(self) -> int:
        """The memory of both, bytes."""
        return sum(each.nbytes for each in self._held)

    def keep(self, steps: Collection[int]) -> None:
        """Drop the snapshots of other steps."""
        kept = [pair for pair in zip(self.steps, self._held, strict=True) if pair[0] in steps]
        self.steps, self._held = [step for step, _ in kept], [held for _, held in kept]

    def forget(self) -> None:
        """Drop both snapshots."""
        self.steps, self._held = [], []


class _Snapshot:
    """One snapshot.

    Args:
        count: Number of parameters.
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        #: What was copied, and the copies, the parameters' first.
        self._parameters: Sequence[torch.Tensor] = []
        self._statistics: list[Statistic] = []
        self._tensors: list[torch.Tensor] = []
        #: The state of each parameter.
        self._states: list[dict[str, Any]] = []

    @torch.no_grad()
    def take(
        self, parameters: Sequence[torch.Tensor], statistics: list[Statistic], optimizer: Any
    ) -> None:
        states = [held_state(optimizer, each) or {} for each in parameters]
        old = self._states or [{} for _ in states]
        self._parameters, self._statistics = parameters, statistics
        self._tensors = _copied(self._now(), self._tensors)
        names = [
            (place, name)
            for place, state in enumerate(states)
            for name, value in state.items()
            if _plain(value)
        ]
        copies = _copied(
            [states[i][name].detach() for i, name in names], [old[i].get(name) for i, name in names]
        )
        self._states = [
            {name: None if _plain(value) else copy.deepcopy(value) for name, value in state.items()}
            for state in states
        ]
        for (i, name), value in zip(names, copies, strict=True):
            self._states[i][name] = value

    @property
    def nbytes(self) -> int:
        states = (value for state in self._states for value in state.values())
        tensors = [each for each in states if isinstance(each, torch.Tensor)]
        return sum(each.nbytes for each in (*self._tensors, *tensors))

    @torch.no_grad()
    def give(self, optimizer: Any) -> None:
        torch._foreach_copy_(self._now(), self._tensors)
        for parameter, state in zip(self._parameters, self._states, strict=True):
            if state:
                optimizer.state[parameter] = state
            else:
                optimizer.state.pop(parameter, None)

    def _now(self) -> list[torch.Tensor]:
        """Return what the model has now, whose buffers may be others than at the copy."""
        statistics = (each.tensor for each in self._statistics)
        return [each.detach() for each in (*self._parameters, *statistics)]


def _plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided


def _copied(tensors: list[torch.Tensor], memory: list[Any]) -> list[torch.Tensor]:
    """Copies of ``tensors``, in ``memory`` where shape, type and device fit."""
    into = [
        old if _fits(old, new) else torch.empty_like(new)
        for old, new in zip(memory or [None] * len(tensors), tensors, strict=True)
    ]
    if tensors:
        torch._foreach_copy_(into, tensors)
    return into


def _fits(old: Any, new: torch.Tensor) -> bool:
    return (
        isinstance(old, torch.Tensor)
        and old.shape == new.shape
        and old.dtype == new.dtype
        and old.device == new.device
    )
