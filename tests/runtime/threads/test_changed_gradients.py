"""Scripts that change gradients between ``backward()`` and ``step()``, on ranks in threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.sync_plan import SyncPlan

TABLE, CONVOLUTION = (6, 2), (2, 2, 2, 2)
SHAPES = [TABLE, (5, 3), (3,), CONVOLUTION]
STEPS = 5
CLASSES = {"embedding": ("p0",), "large": ("p1",)}
PLANS = {
    "each alone": ExchangePlan(),
    "one bucket": ExchangePlan(buckets=1),
    "slices": ExchangePlan(embedding=ClassPlan(slices=2), large=ClassPlan(slices=3)),
    "lossless": ExchangePlan(0, embedding=ClassPlan(lossless=True), large=ClassPlan(lossless=True)),
    "rows": ExchangePlan(embedding=ClassPlan("rows")),
    "sharded": ExchangePlan(1, large=ClassPlan("sharded"), rest=ClassPlan("sharded")),
    "hierarchical": ExchangePlan(large=ClassPlan("hierarchical")),
    "priority": ExchangePlan(order="priority"),
}


def gradient(of_rank: int, step: int, place: int) -> torch.Tensor:
    """Small integers."""
    generator = torch.Generator().manual_seed(100 * of_rank + 10 * step + place)
    values = torch.randint(-3, 4, SHAPES[place], generator=generator).float()
    return values * (torch.arange(len(values)) % 2 == step % 2).view(-1, *[1] * (values.dim() - 1))


def arriving(step: int, sparse_from: int) -> dict[int, torch.Tensor]:
    """This rank's gradients: a table's, sparse from some step on, and one that is not in order."""
    own = {place: gradient(rank(), step, place) for place in (2, 0, 3, 1)}
    if step >= sparse_from:
        own[0] = own[0].to_sparse(1)
    own[3] = own[3].to(memory_format=torch.channels_last)
    return own


def expected(ranks: int) -> list[torch.Tensor]:
    """The parameters after steps with the means of what has arrived."""
    return [
        1 - 0.5 * sum(gradient(r, s, place) for r in range(ranks) for s in range(STEPS)) / ranks
        for place in range(len(SHAPES))
    ]


def assert_trained(trained: list[list[torch.Tensor]], wanted: list[torch.Tensor]) -> None:
    for values in trained:
        for own, first, right in zip(values, trained[0], wanted, strict=True):
            assert torch.equal(own, first), "ranks differ"
            torch.testing.assert_close(own, right, rtol=1e-5, atol=1e-6)


def copied(own: torch.Tensor) -> torch.Tensor:
    return own.clone()


def dense(own: torch.Tensor) -> torch.Tensor:
    return own.to_dense() if own.is_sparse else own.contiguous().add(rank())


def dropped(own: torch.Tensor) -> None:
    """Horovod's optimizer ends the training."""


@pytest.mark.parametrize("replaced", [copied, dense, dropped])
@pytest.mark.parametrize("sparse_from", [0, 2, STEPS])
@pytest.mark.parametrize("name", PLANS)
def test_the_mean_of_what_has_arrived_takes_the_place_of_what_has_replaced_it(
    name: str, sparse_from: int, replaced: Callable[[torch.Tensor], Any], begin: Any
) -> None:
    def body() -> list[torch.Tensor]:
        own = begin(SHAPES, SyncPlan(PLANS[name], CLASSES))

        def between() -> None:
            for parameter in own.parameters:
                parameter.grad = replaced(parameter.grad)

        for step in range(STEPS):
            own.step(arriving(step, sparse_from), between=between)
            assert own.parameters[0].grad.is_sparse == (step >= sparse_from)
        values: list[torch.Tensor] = own.values()
        return values

    assert_trained(ThreadRanks(4, hosts=2, seed=0).run(body), expected(4))


def halve(parameter: torch.nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def halve_data(parameter: torch.nn.Parameter) -> None:
    """Which leaves the version of the gradient."""
    parameter.grad.data.mul_(0.5)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, halve) for name in PLANS),
        *((name, halve_data) for name in PLANS if name not in ("each alone", "priority")),
    ],
)
def test_a_factor_that_all_ranks_multiply_by_takes_effect(
    name: str, change: Callable[[torch.nn.Parameter], None], begin: Any, capsys: Any
) -> None:
    def body() -> list[torch.Tensor]:
        own = begin(SHAPES, SyncPlan(PLANS[name], CLASSES))

        def between() -> None:
            for parameter in own.parameters:
                change(parameter)

        for step in range(STEPS):
            own.step(arriving(step, 0 if change is halve else STEPS), between=between)
        values: list[torch.Tensor] = own.values()
        return values

    wanted = [1 - 0.5 * (1 - each) for each in expected(4)]
    assert_trained(ThreadRanks(4, hosts=2, seed=0).run(body), wanted)
    assert capsys.readouterr().err.count("without synchronize(): nothing is sent before") == 1


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("change", [halve, halve_data])
def test_a_script_that_begins_late_to_change_gradients_keeps_replicas_equal(
    seed: int, change: Callable[[torch.nn.Parameter], None], begin: Any, capsys: Any
) -> None:
    """Two ranks that swap lossless codes add what was sent; from the next step on all is right."""
    plan, shape, late = SyncPlan(ExchangePlan(rest=ClassPlan(lossless=True))), (64, 32), 2

    def own_gradient(of_rank: int, step: int) -> torch.Tensor:
        values = torch.zeros(shape)  # its code is short
        values[step + of_rank] = 1.0 + of_rank
        return values

    def body() -> list[torch.Tensor]:
        own = begin([shape], plan)
        after = []
        for step in range(STEPS):

            def between(late: bool = step >= late) -> None:
                if late:
                    change(own.parameters[0])

            own.step({0: own_gradient(rank(), step)}, between=between)
            after += own.values()
        return after

    first, second = ThreadRanks(2, seed=seed).run(body)
    for step, (values, others) in enumerate(zip(first, second, strict=True)):
        assert torch.equal(values, others), "ranks differ"
        if step > late:
            mean = (own_gradient(0, step) + own_gradient(1, step)) / 2
            torch.testing.assert_close(values, first[step - 1] - 0.5 * 0.5 * mean)
    assert capsys.readouterr().err.count("nothing is sent before step()") == 1
