"""Owners' steps on ranks that are threads, while the script changes its optimizer itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.sync_plan import SyncPlan

SHAPES = [(4, 3), (6, 2), (5,)]
SHARDED = SyncPlan(ExchangePlan(buckets=2, rest=ClassPlan("sharded")))


def train(
    begin: Any, plan: SyncPlan, change: Callable[[int, torch.optim.Optimizer], None]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Each rank's parameters and momenta after some steps; it calls ``change`` before each."""

    def body() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        own = begin(SHAPES, plan, momentum=0.5)
        for number in range(4):
            change(number, own.optimizer)
            gradients = [
                torch.full(shape, float(number + place)) for place, shape in enumerate(SHAPES)
            ]
            own.step(dict(enumerate(gradients)))
        own.method.make_whole()
        states = [own.optimizer.state[p]["momentum_buffer"] for p in own.parameters]
        return own.values(), states

    return ThreadRanks(3, seed=0).run(body)


def compare(begin: Any, change: Callable[[int, torch.optim.Optimizer], None]) -> None:
    ours, expected = (train(begin, plan, change) for plan in (SHARDED, SyncPlan()))
    for own, right in zip(ours, expected, strict=True):
        for one, other in zip(own, right, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_parameter_that_the_script_drops_keeps_its_state(begin: Any) -> None:
    """And the places of the others change on no rank's account."""

    def change(number: int, optimizer: torch.optim.Optimizer) -> None:
        parameters = optimizer.param_groups[0]["params"]
        if number == 1:
            optimizer.param_groups[0]["params"] = parameters[1:]

    compare(begin, change)


@pytest.mark.parametrize("dropped", [0, 1, 2])
def test_checkpoints_after_a_parameter_was_dropped(begin: Any, dropped: int) -> None:
    """Before any rank has made another step."""

    def body() -> dict[int, dict[str, Any]]:
        own = begin(SHAPES, SHARDED, momentum=0.5)
        own.step({place: torch.full(shape, 1.0 + place) for place, shape in enumerate(SHAPES)})
        del own.optimizer.param_groups[0]["params"][dropped]
        whole: dict[int, dict[str, Any]] = own.method.whole_states()
        return whole

    kept = [place for place in range(len(SHAPES)) if place != dropped]
    for whole in ThreadRanks(3, seed=0).run(body):
        assert sorted(whole) == [0, 1]
        for place, before in enumerate(kept):
            expected = torch.full(SHAPES[before], 1.0 + before)
            torch.testing.assert_close(whole[place]["momentum_buffer"], expected)


def test_two_parameters_of_one_memory_are_both_stepped(begin: Any) -> None:
    """One after the other, as in place; owners would each write their own over the other's."""

    def change(number: int, optimizer: torch.optim.Optimizer) -> None:
        first, second, _ = optimizer.param_groups[0]["params"]
        if number == 0:
            second.data = first.data.view(second.shape)

    compare(begin, change)


def clear(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def replace(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


@pytest.mark.parametrize("reset", [clear, replace])
@pytest.mark.parametrize("at", [1, 2])
def test_a_reset_of_the_state_takes_effect(
    begin: Any, reset: Callable[[torch.optim.Optimizer], None], at: int
) -> None:
    """Once, and as often as the script does it."""
    compare(begin, lambda number, optimizer: reset(optimizer) if number >= at else None)
    compare(begin, lambda number, optimizer: reset(optimizer) if number == at else None)


@pytest.mark.parametrize("reset", [clear, replace])
def test_a_state_that_was_reset_is_saved_as_empty(
    begin: Any, reset: Callable[[torch.optim.Optimizer], None]
) -> None:
    def body() -> tuple[dict[int, Any], dict[int, Any], dict[Any, Any]]:
        own = begin(SHAPES, SHARDED, momentum=0.5)
        own.step({0: torch.ones(SHAPES[0])})
        before = own.method.whole_states()
        reset(own.optimizer)
        after = own.method.whole_states()
        own.method.make_whole()
        return before, after, own.optimizer.state

    for before, after, state in ThreadRanks(3, seed=0).run(body):
        assert sorted(before) == [0, 1, 2]
        assert after == state == {}
