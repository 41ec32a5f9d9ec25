"""A checksum of what ranks must have in common for one of them to make a step for all."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from hvd_autosync.runtime.exchange.changed_gradients import sum_of_bits
from hvd_autosync.runtime.state.optimizer_states import held_state

#: Checksums are below it, so that sums of their squares fit into 64 bits. It is a prime, because a
#: factor of 2 in all weights changes their bits by multiples of a power of 2.
CHECKSUMS = 2**20 - 3


def replica_checksum(optimizer: Any, parameters: Collection[torch.nn.Parameter]) -> int:
    """Return a checksum of this rank's replica, which is the same in every process.

    It covers the options of all groups, as the learning rate, the bits of ``parameters``, and the
    states of these that the optimizer itself holds.

    Args:
        optimizer: The optimizer.
        parameters: Those that owners step.
    """
    total = sum_of_bits(*parameters) + _of_options(optimizer)
    return (total + sum(_of_value(held_state(optimizer, p)) for p in parameters)) % CHECKSUMS


def _of_options(optimizer: Any) -> int:
    return sum(
        _of_value((place, len(group["params"]), name, value))
        for place, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    )


def _of_value(value: Any) -> int:
    """Return a checksum of what an optimizer keeps."""
    if isinstance(value, torch.Tensor):
        return sum_of_bits(value) if value.layout is torch.strided else 0
    if isinstance(value, dict):
        return sum(map(_of_value, value.items()))
    if isinstance(value, (list, tuple)):
        return sum(place * _of_value(each) for place, each in enumerate(value, 1))
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return zlib.crc32(repr(value).encode())
    return 0  # of its nature nothing is known
