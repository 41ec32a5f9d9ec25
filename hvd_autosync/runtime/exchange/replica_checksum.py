"""A checksum of what ranks must have in common for one of them to make a step for all."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import torch

from hvd_autosync.runtime.exchange.changed_gradients import sum_of_bits
from hvd_autosync.runtime.state.states import parameters_of

#: Checksums are below it, so that sums of their squares fit into 64 bits.
CHECKSUMS = 2**20
#: Steps between two looks at all parameters.
_CHECK_EVERY = 64


class ReplicaChecksum:
    """Checksums of one optimizer, of which each rank takes one in each step.

    It covers the options of all groups, as the learning rate, and the states that the optimizer
    itself holds. Of the parameters it covers those that have changed since the last step in a way
    that torch counts, as by ``max_norm`` of an embedding; in the first step and in every 64th it
    covers all, because nobody counts what is written through ``.data``.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._steps = 0
        self._versions: dict[torch.nn.Parameter, int] = {}

    def take(self, *, apart: bool) -> int:
        """Return the checksum of this step.

        Args:
            apart: Whether owners have the states.
        """
        parameters = parameters_of(self._optimizer)
        all_of_them = self._steps % _CHECK_EVERY == 0
        self._steps += 1
        moved = (
            each
            for each in parameters
            if all_of_them or self._versions.get(each, each._version) != each._version
        )
        states = (
            self._optimizer.state[each] for each in parameters if each in self._optimizer.state
        )
        total = sum(map(sum_of_bits, moved)) + sum(map(_of_value, states))
        return (total + _of_options(self._optimizer) + apart) % CHECKSUMS

    def note(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """All ranks have the same ``parameters`` now."""
        self._versions = {each: each._version for each in parameters}


def _of_options(optimizer: Any) -> int:
    return sum(
        _of_value((place, len(group["params"]), name, value))
        for place, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    )


def _of_value(value: Any) -> int:
    """Return a checksum of what an optimizer keeps; it is the same in every process."""
    if isinstance(value, torch.Tensor):
        return sum_of_bits(value) if value.layout is torch.strided else 0
    if isinstance(value, dict):
        return sum(map(_of_value, value.items()))
    if isinstance(value, (list, tuple)):
        return sum(place * _of_value(each) for place, each in enumerate(value, 1))
    if value is None or isinstance(value, (bool, int, float, str)):
        return zlib.crc32(repr(value).encode())
    return 0  # of its nature nothing is known
