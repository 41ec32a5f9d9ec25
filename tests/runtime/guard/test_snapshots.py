"""What is gone back to, and the memory that it takes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hvd_autosync.runtime.guard.snapshots import Snapshots
from hvd_autosync.runtime.state import normalization
from hvd_autosync.util import patches


@pytest.fixture
def counted() -> Iterator[None]:
    normalization.count_layers()
    yield
    assert patches.uninstall("normalization layers")


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    states = [v for p in model.parameters() for v in optimizer.state.get(p, {}).values()]
    return [torch.as_tensor(each).clone() for each in (*model.state_dict().values(), *states)]


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_the_older_of_two_is_gone_back_to(counted: None, kind: Any) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    model[1].num_batches_tracked = None  # a count, which nothing is computed from
    momentum = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **momentum)
    snapshots, wanted = Snapshots(), []
    for number in range(1, 6):
        step(model, optimizer)
        snapshots.take(number, optimizer)
        wanted.append(everything(model, optimizer))
    assert snapshots.steps == [4, 5]
    step(model, optimizer)
    assert [snapshots.last_until(each) for each in (0, 4, 5, 9)] == [4, 4, 5, 5]
    snapshots.restore(optimizer, 4)
    assert not snapshots.steps
    found = everything(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted[3], strict=True))
    step(model, optimizer)
    assert not torch.equal(found[0], model.state_dict()["0.weight"])


def test_parameters_may_be_added_between_two(counted: None) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    snapshots = Snapshots()
    for number in (1, 2):
        step(model, optimizer)
        snapshots.take(number, optimizer)
    wanted = everything(model, optimizer)
    model.append(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    model[2][1].num_batches_tracked = None  # a count, which nothing is computed from
    optimizer.add_param_group({"params": [*model[2].parameters()]})
    for number in (3, 4):  # 4 takes the place of one with fewer parameters
        step(model, optimizer)
        if number == 3:
            snapshots.take(number, optimizer)
            added = everything(model[2], optimizer)
    snapshots.restore(optimizer, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(everything(model[:2], optimizer), wanted, strict=True)
    )
    moved = zip(everything(model[2], optimizer), added, strict=True)
    assert not all(torch.equal(a, b) for a, b in moved), "it was not there in step 2"
    for number in (5, 6):
        snapshots.take(number, optimizer)
    wanted = everything(model, optimizer)
    step(model, optimizer)
    snapshots.restore(optimizer, 5)
    found = everything(model, optimizer)
    assert len(found) == len(wanted) > len(added)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_statistics_are_restored_in_the_tensors_that_the_model_has_then(counted: None) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False))
    model[1].num_batches_tracked = None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots, wanted = Snapshots(), []
    for number in range(1, 5):
        step(model, optimizer)
        snapshots.take(number, optimizer)
        wanted.append(everything(model, optimizer))
        for name in ("running_mean", "running_var"):  # as by load_state_dict(assign=True)
            setattr(model[1], name, getattr(model[1], name).clone())
    step(model, optimizer)
    snapshots.restore(optimizer, 3)
    assert all(map(torch.equal, everything(model, optimizer), wanted[2]))


def test_memory_is_taken_once_for_each(counted: None) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    snapshots, places = Snapshots(), []
    for number in range(1, 7):
        step(model, optimizer)
        snapshots.take(number, optimizer)
        held = [
            [*each._tensors, *(v for s in each._states for v in s.values())]
            for each in snapshots._held
        ]
        places.append({tensor.data_ptr() for tensors in held for tensor in tensors})
    # Parameters and two moments each, and a count of steps: twice.
    assert places[1] == places[-1] and len(places[-1]) == 2 * 2 * 4
    assert places[0] < places[1]


def test_a_state_that_did_not_exist_is_gone_again(counted: None) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    snapshots = Snapshots()
    snapshots.take(0, optimizer)
    step(nn.Sequential(nn.Linear(4, 2), model), optimizer)
    assert optimizer.state
    snapshots.restore(optimizer, 0)
    assert not optimizer.state


def test_statistics_are_those_of_layers_that_nobody_else_trains(counted: None) -> None:
    model, other = (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)) for _ in range(2))
    plain, frozen = nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6).requires_grad_(False)
    copied = copy.deepcopy(model)

    def found(trained: nn.Module) -> set[int]:
        return {id(s.tensor) for s in normalization.statistics_beside(list(trained.parameters()))}

    def of(layer: nn.Module) -> set[int]:
        return {id(layer.running_mean), id(layer.running_var)}

    assert found(model) == of(model[1]) | of(plain) | of(frozen)
    assert found(copied) == of(copied[1]) | of(plain) | of(frozen), "no __init__ has made it"
    del copied, other
    assert len(normalization._layers or ()) == 3, "layers that are gone are forgotten"
