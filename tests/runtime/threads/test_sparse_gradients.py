"""Gradients that are sparse in some steps only, on ranks that are threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hvd_autosync.runtime.collectives.operations import join, rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.exchange import rows
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.sync_plan import SyncPlan

TABLE, BODY = (6, 2), (3,)
STEPS = 4
CLASSES = {"embedding": ("p0",)}
PLANS = {
    "each alone": ExchangePlan(),
    "one bucket": ExchangePlan(buckets=1),
    "slices": ExchangePlan(embedding=ClassPlan(slices=2)),
    "lossless": ExchangePlan(embedding=ClassPlan(lossless=True)),
    "rows": ExchangePlan(embedding=ClassPlan("rows")),
    "sharded": ExchangePlan(embedding=ClassPlan("sharded")),
    "hierarchical": ExchangePlan(embedding=ClassPlan("hierarchical")),
    "priority": ExchangePlan(order="priority"),
}


def gradient(of_rank: int, step: int) -> torch.Tensor:
    """Small integers, zero in most rows."""
    values = torch.zeros(TABLE)
    values[(of_rank + step) % 6] = torch.tensor([1.0 + of_rank, -2.0 - step])
    values[(of_rank + 3 * step) % 6] += 1
    return values


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("first", ["dense", "absent"])
@pytest.mark.parametrize("sparse_ranks", [(0, 1, 2, 3), (1, 2)])
def test_gradients_that_are_sparse_later_count_as_dense_ones(
    name: str, first: str, sparse_ranks: tuple[int, ...], begin: Any
) -> None:
    """And are sparse where the optimizer sees them, on the ranks that made them so."""

    def body() -> list[torch.Tensor]:
        own = begin([TABLE, BODY], SyncPlan(PLANS[name], CLASSES), momentum=0.5)
        for step in range(STEPS):
            gradients = {1: torch.full(BODY, float(step + rank()))}
            sparse = step > 0 and rank() in sparse_ranks
            if step or first == "dense":
                dense = gradient(rank(), step)
                gradients[0] = dense.to_sparse(1) if sparse else dense
            own.step(gradients)
            if step:
                assert own.parameters[0].grad.is_sparse == sparse
        return own.values()

    ours = ThreadRanks(4, hosts=2, seed=0).run(body)
    table, momentum = torch.ones(TABLE), torch.zeros(TABLE)
    for step in range(STEPS):
        mean = sum(gradient(each, step) for each in range(4)) / 4
        momentum = 0.5 * momentum + (mean if step or first == "dense" else 0)
        table -= 0.5 * momentum
    for values in ours:
        torch.testing.assert_close(values[0], table, rtol=0, atol=0)


def test_sparse_gradients_while_some_rank_has_joined_from_the_beginning(begin: Any) -> None:
    def body() -> torch.Tensor:
        own = begin([TABLE, BODY], SyncPlan(PLANS["rows"], CLASSES))
        for step in range(2 if rank() else 0):
            own.step({0: gradient(rank(), step).to_sparse(1), 1: torch.ones(BODY)})
            assert own.parameters[0].grad.is_sparse
        join()
        values: torch.Tensor = own.values()[0]
        return values

    _, *others = ThreadRanks(3, seed=0).run(body)
    mean = sum(gradient(each, step) for each in (1, 2) for step in range(2)) / 3
    for values in others:
        torch.testing.assert_close(values, 1 - 0.5 * mean)


def test_a_rank_without_a_gradient_gets_a_sparse_one_while_another_has_joined(begin: Any) -> None:
    """As the others, because an optimizer of sparse gradients refuses dense ones."""

    def body() -> torch.Tensor:
        own = begin([TABLE, BODY], SyncPlan(PLANS["rows"], CLASSES))
        for step in range(2 if rank() else 1):
            table = {0: gradient(rank(), step).to_sparse(1)} if step == 0 or rank() == 2 else {}
            own.step({**table, 1: torch.ones(BODY)})
            assert own.parameters[0].grad.is_sparse
        join()
        values: torch.Tensor = own.values()[0]
        return values

    _, *others = ThreadRanks(3, seed=0).run(body)
    total = sum(gradient(each, 0) for each in range(3)) + gradient(2, 1)
    for values in others:
        torch.testing.assert_close(values, 1 - 0.5 * total / 3)


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_that_are_too_many_to_gather_travel_whole(
    sparse: bool, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks' rows of 8 bytes, of which each rank touches two."""

    def body() -> torch.Tensor:
        own = begin([TABLE, BODY], SyncPlan(PLANS["rows"], CLASSES))
        for step in range(STEPS):
            dense = gradient(rank(), step)
            own.step({0: dense.to_sparse(1) if sparse else dense, 1: torch.ones(BODY)})
            assert own.parameters[0].grad.is_sparse == sparse
        values: torch.Tensor = own.values()[0]
        return values

    mean = sum(gradient(each, step) for each in range(2) for step in range(STEPS)) / 2
    gathers = []
    for most in (2**20, 2 * 2 * 8 - 1):
        monkeypatch.setattr(rows, "MOST_GATHERED_BYTES", most)
        ranks = ThreadRanks(2, seed=0)
        for values in ranks.run(body):
            torch.testing.assert_close(values, 1 - 0.5 * mean)
        gathers.append(ranks.calls["allgather"])
    assert gathers[0] > gathers[1]


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
def test_a_sparse_gradient_without_rows_adds_none(ranks: tuple[int, ...], begin: Any) -> None:
    """An optimizer of sparse gradients moves each row that is listed, by its momentum."""
    nothing = torch.zeros(TABLE).to_sparse(1)

    def body() -> list[list[int]]:
        own = begin([TABLE, BODY], SyncPlan(PLANS["rows"], CLASSES))
        listed = []
        for _ in range(2):
            table = nothing if rank() in ranks else gradient(rank(), 3).to_sparse(1)
            own.step({0: table.clone(), 1: torch.ones(BODY)})
            listed.append(own.parameters[0].grad.coalesce().indices()[0].tolist())
        return listed

    expected: list[int] = [] if 0 in ranks else [3]
    assert ThreadRanks(2, seed=0).run(body) == [[expected] * 2] * 2


@pytest.mark.parametrize("dimensions", [(2, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("most", [2**20, 0])
def test_gradients_that_are_sparse_in_two_dimensions(
    dimensions: tuple[int, int], most: int, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of ``torch.gather``; those of a rank that lacks one, or has other dimensions, follow."""
    monkeypatch.setattr(rows, "MOST_GATHERED_BYTES", most)

    def body() -> torch.Tensor:
        own = begin([TABLE, BODY], SyncPlan(ExchangePlan()))
        for step in range(STEPS):
            dense = gradient(rank(), step)
            table = {} if rank() == step else {0: dense.to_sparse(dimensions[rank()])}
            own.step({**table, 1: torch.ones(BODY)})
            # Rank 0 has none in the first step, in which ranks agree on the dimensions.
            assert own.parameters[0].grad.sparse_dim() == dimensions[1]
        values: torch.Tensor = own.values()[0]
        return values

    total = sum(gradient(each, step) for each in range(2) for step in range(STEPS) if each != step)
    for values in ThreadRanks(2, seed=0).run(body):
        torch.testing.assert_close(values, 1 - 0.5 * total / 2)
