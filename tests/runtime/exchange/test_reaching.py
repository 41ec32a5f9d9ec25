"""Who reaches for a parameter is seen, wherever the script keeps it."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hvd_autosync.runtime.exchange.reaching import (
    Memory,
    marked_class,
    unwatch_modules,
    watch_modules,
)


class Watch:
    """Marks a parameter, and makes it plain when something reaches for it."""

    def __init__(self) -> None:
        self.reached: list[Any] = []
        self.given: list[Any] = []
        self.cls = marked_class(self.reach, self.given.append)

    def reach(self, parameter: Any) -> None:
        parameter.__class__ = nn.Parameter
        self.reached.append(parameter)

    def mark(self) -> nn.Parameter:
        parameter = nn.Parameter(torch.ones(2, 2))
        parameter.__class__ = self.cls
        return parameter


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p.data,
        lambda p: p.grad,
        lambda p: p.detach(),
        lambda p: p.data_ptr(),
        lambda p: p.untyped_storage(),
        lambda p: p.requires_grad_(False),
        lambda p: p + 1,
        lambda p: torch.ones(2) @ p,
        lambda p: torch.cat([torch.ones(2, 2), p]),
        lambda p: torch._foreach_norm([p]),
        lambda p: nn.functional.linear(torch.ones(1, 2), weight=p),
        lambda p: torch.ops.aten.mul(p, p),
        lambda p: p.tolist(),
        lambda p: copy.deepcopy(p),
        lambda p: copy.copy(p),
        lambda p: pickle.dumps(p),
        lambda p: repr(p),
        lambda p: setattr(p, "data", torch.zeros(2, 2)),
        lambda p: nn.utils.parameters_to_vector([p]),
        lambda p: torch.optim.SGD([p], lr=0.1),
    ],
)
def test_whatever_python_does_with_a_parameter_is_seen_first(use: Callable[[Any], Any]) -> None:
    watch = Watch()
    parameter = watch.mark()
    result = use(parameter)
    assert watch.reached == [parameter]
    assert type(parameter) is nn.Parameter
    assert not isinstance(result, watch.cls)


def test_a_gradient_that_is_computed_without_reading_the_parameter_is_told_first() -> None:
    watch = Watch()
    parameter = watch.mark()
    gradient = torch.func.grad(lambda held: held["p"].pow(2).sum())({"p": parameter})["p"]
    assert not watch.reached
    parameter.grad = None
    assert watch.reached == [parameter] and not watch.given
    parameter.__class__ = watch.cls
    parameter.grad = gradient
    assert watch.given == [parameter]
    assert torch.equal(parameter.grad, 2 * torch.ones(2, 2))


def test_copies_are_plain() -> None:
    watch = Watch()
    for copied in (copy.deepcopy(watch.mark()), pickle.loads(pickle.dumps(watch.mark()))):
        assert type(copied) is nn.Parameter
        assert torch.equal(copied, torch.ones(2, 2))


def test_a_parameter_that_is_only_listed_stays_marked() -> None:
    watch = Watch()
    parameter = watch.mark()
    assert isinstance(parameter, nn.Parameter)
    assert {parameter: 1}[parameter] == 1
    assert not watch.reached


@pytest.mark.parametrize(
    "alias",
    [
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.t(),
        lambda p: p.detach().numpy(),
        lambda p: nn.Parameter(p.data),
    ],
)
def test_other_tensors_of_the_memory_are_counted(alias: Callable[[Any], Any]) -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    memory = Memory(parameter)
    assert not memory.shared()
    other = alias(parameter)
    assert memory.shared()
    del other
    assert not memory.shared()


def test_new_memory_is_no_sharing() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    memory = Memory(parameter)
    parameter.data = torch.zeros(2, 2)
    assert not memory.shared()
    vector = torch.zeros(8)
    parameter.data = vector[:4].view(2, 2)
    assert memory.shared()


def test_a_graph_that_was_used_is_no_sharing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    memories = [Memory(parameter) for parameter in model.parameters()]
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    assert not any(memory.shared() for memory in memories)
    assert loss.grad_fn is not None


def test_modules_tell_until_they_are_left_alone() -> None:
    model, reached = nn.Linear(2, 2), []
    parameters = list(model.parameters())
    assert watch_modules(parameters, reached.append) == set(parameters)
    assert model.weight is parameters[0] and reached == parameters[:1]
    unwatch_modules()
    reached.clear()
    model(torch.ones(1, 2))
    assert not reached
    assert type(model.__dict__["_parameters"]) is dict


def test_parameters_of_scripted_modules_cannot_be_seen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    traced = torch.jit.trace(model[0], torch.ones(1, 2))
    seen = watch_modules(list(model.parameters()), lambda _: None)
    unwatch_modules()
    assert seen == set(model[1].parameters())
    assert traced is not None


def test_modules_that_the_script_has_frozen_tell_too() -> None:
    """By ``gc.freeze()``, as before it forks the workers of a loader."""
    model, reached = nn.Linear(2, 2), []
    parameters = list(model.parameters())
    gc.freeze()
    assert watch_modules(parameters, reached.append) == set(parameters)
    assert model.weight is parameters[0] and reached == parameters[:1]
    gc.freeze()
    unwatch_modules()
    assert type(model.__dict__["_parameters"]) is dict
