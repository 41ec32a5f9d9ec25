"""Parameter-group swap: a step of an optimizer for other parameters than the script gave it.

The script's optimizer stays the same object: while its own ``step`` runs, its parameter groups hold
parts of parameters, or some of them, in place of all. The same class updates these with the same
options. That is the same mathematics only for optimizers that treat every element independently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

#: Their update of an element depends on that element alone (``torch/optim``).
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
    """Return the class that the script chose for an optimizer, from which ours was derived."""
    return type(optimizer).__mro__[1]


def steps_by_element(optimizer: Any) -> bool:
    """Return whether an optimizer of our class may step parts of its parameters."""
    return own_class(optimizer) in _ELEMENTWISE


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether code of the script's runs right before or after the optimizer's own step."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or torch_optimizer._global_optimizer_pre_hooks
        or torch_optimizer._global_optimizer_post_hooks
    )


class ParameterGroupSwap:
    """Replaces the parameters in an optimizer's groups temporarily.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._wholes: list[list[torch.nn.Parameter]] | None = None

    @property
    def made(self) -> bool:
        """Whether the groups hold replacements now."""
        return self._wholes is not None

    def make(self, choose: Callable[[torch.nn.Parameter], Iterable[torch.nn.Parameter]]) -> None:
        """Replace each parameter by ``choose(parameter)``."""
        groups = self._optimizer.param_groups
        self._wholes = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [part for whole in group["params"] for part in choose(whole)]

    def undo(self) -> None:
        """Restore the groups, if they hold replacements."""
        if self._wholes is not None:
            for group, whole in zip(self._optimizer.param_groups, self._wholes, strict=True):
                group["params"] = whole
            self._wholes = None
