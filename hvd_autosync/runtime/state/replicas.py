"""Synchronizes whole replicas, after steps that not all ranks have made."""

from __future__ import annotations

import json
import weakref
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from hvd_autosync.runtime.collectives.agreement import on_all, tell_all
from hvd_autosync.runtime.collectives.operations import (
    MOST_GATHERED_BYTES,
    broadcast_,
    join,
    rank,
    size,
)
from hvd_autosync.runtime.state.normalization import RunningStatistics
from hvd_autosync.runtime.state.partition import part_entry, put_together
from hvd_autosync.runtime.state.states import (
    check_states,
    encode_entries,
    parameters_of,
    take_states,
)
from hvd_autosync.util.instances import instances

#: Learning rates of an optimizer, and the states of its schedulers.
Rates = dict[str, Any]


class Replicas:
    """The replicas of one optimizer's parameters, with their states and statistics.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: The optimizer.
    """

    def __init__(self, name: str, optimizer: Any) -> None:
        self._name = f"hvd_autosync.replicas.{name}"
        reference = self._reference = weakref.ref(optimizer)
        self._statistics = RunningStatistics(f"replicas.{name}", lambda: parameters_of(reference()))

    def average_statistics(self) -> None:
        """Set running statistics to their means over ranks; a collective."""
        self._statistics.average(size())

    def check_states(self, problem: str) -> None:
        """Check that every rank could send the optimizer's states to the others; a collective.

        Args:
            problem: What ranks cannot do otherwise.

        Raises:
            NotOnAllError: Some rank could not.
        """
        on_all(
            lambda: check_states(self._optimizer),
            f"{self._name}.sendable",
            problem,
            "Leave the protocol knobs out of the strategy of this script.",
        )

    def resync(self) -> Rates:
        """Wait until all ranks are here, and take over the state of the last one; a collective.

        A waiting rank takes no part in the others' steps, by Horovod's ``join()``.

        Returns:
            The last rank's learning rates, for :meth:`take_rates`.
        """
        last = join()
        optimizer = self._optimizer
        parameters = parameters_of(optimizer)
        for place, tensor in enumerate([*parameters, *self._statistics.tensors]):
            _broadcast(tensor.detach(), last, f"{self._name}.last.{place}")
        states, rates = b"", b""
        if rank() == last:
            entries = [
                part_entry(place, 0, optimizer.state[each], each.shape)
                for place, each in enumerate(parameters)
                if optimizer.state.get(each)
            ]
            states, rates = encode_entries(entries), json.dumps(_rates(optimizer)).encode()
        states = tell_all(states, f"{self._name}.states", last)
        take_states(optimizer, put_together([], parameters, [states]))
        return dict(json.loads(tell_all(rates, f"{self._name}.rates", last)))

    def take_rates(self, rates: Rates) -> None:
        """Apply learning rates, and the counts of schedulers."""
        _take_rates(self._optimizer, rates)

    @property
    def _optimizer(self) -> Any:
        optimizer = self._reference()
        assert optimizer is not None, "its owner is alive"
        return optimizer


def _broadcast(tensor: torch.Tensor, root: int, name: str) -> None:
    """Set a tensor to that of rank ``root``, whatever its type and layout; a collective.

    It travels as bytes: Horovod broadcasts contiguous tensors only, and no bfloat16.
    """
    dense = tensor.contiguous()
    for piece in dense.view(-1).view(torch.uint8).split(MOST_GATHERED_BYTES):
        broadcast_(piece, root, name=name)
    if dense is not tensor:
        tensor.copy_(dense)


def _rates(optimizer: Any) -> Rates:
    """Return the learning rates, and the counts of their schedulers.

    A scheduler that counts steps would continue from fewer on a rank that has made fewer.
    """
    schedulers = [
        {name: value for name, value in vars(each).items() if _plain(value)}
        for each in _schedulers(optimizer)
    ]
    return {
        "rates": [float(group["lr"]) for group in optimizer.param_groups],
        "schedulers": schedulers,
    }


def _take_rates(optimizer: Any, rates: Rates) -> None:
    own = _schedulers(optimizer)
    if len(own) == len(rates["schedulers"]):
        for scheduler, counts in zip(own, rates["schedulers"], strict=True):
            vars(scheduler).update(counts)
    for group, rate in zip(optimizer.param_groups, rates["rates"], strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _schedulers(optimizer: Any) -> list[LRScheduler]:
    """Return the schedulers of an optimizer and of the one that it wraps, in order of their names.

    Horovod's optimizer has the same groups as the script's (``horovod/torch/optimizer.py``).
    """
    first = optimizer.param_groups[0]
    found = [
        each
        for each in instances(LRScheduler)
        if each.optimizer.param_groups and each.optimizer.param_groups[0] is first
    ]
    return sorted(found, key=lambda each: type(each).__qualname__)


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
