"""A step of an optimizer for other parameters than those that the script gave it.

The script's optimizer stays the one object that it is: while its own ``step`` runs, its parameter
groups hold parts of parameters, or some of them, in place of all. The same class updates these with
the same options. That is the same mathematics for optimizers that treat every element by itself,
and only for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

#: What these do to an element depends on that element alone (``torch/optim``).
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD",
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    )
)


def own_class(optimizer: Any) -> Any:
    """The class that the script chose for an optimizer, which a class of ours was derived from."""
    return type(optimizer).__mro__[1]


def steps_by_element(optimizer: Any) -> bool:
    """Whether an optimizer of our class may step parts of its parameters."""
    return own_class(optimizer) in _ELEMENTWISE


class ParameterGroupSwap:
    """Other parameters in an optimizer's groups, for a while.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._wholes: list[list[torch.nn.Parameter]] | None = None

    @property
    def made(self) -> bool:
        """Whether the groups hold others now."""
        return self._wholes is not None

    def make(self, choose: Callable[[torch.nn.Parameter], Iterable[torch.nn.Parameter]]) -> None:
        """Let ``choose(parameter)`` stand in the place of each parameter."""
        groups = self._optimizer.param_groups
        self._wholes = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [part for whole in group["params"] for part in choose(whole)]

    def undo(self) -> None:
        """Put back what was there before, if anything was put in."""
        if self._wholes is not None:
            for group, whole in zip(self._optimizer.param_groups, self._wholes, strict=True):
                group["params"] = whole
            self._wholes = None
