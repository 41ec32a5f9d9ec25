"""Codecs of ranks in threads: any exchange, buckets and slices.

Gradients are small integers. Whatever a codec does to them, all ranks get the same bits; and what
error feedback keeps is just what was not sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_autosync.runtime.collectives.operations import join, rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.patches.epochs import SyncPoint
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan

_SHAPES = [(4, 3), (6, 2), (5,), (2, 8), (7, 3)]
_STEPS = 4


@dataclass(frozen=True)
class Case:
    """A short training.

    Attributes:
        ranks: How many.
        hosts: On how many hosts.
        seed: Of the order of the ranks' turns.
        plan: The plan, with the same codec for all parameters.
        arrivals: Rank -> the order in which its gradients arrive.
    """

    ranks: int
    hosts: int
    seed: int
    plan: ExchangePlan
    arrivals: tuple[tuple[int, ...], ...]


@st.composite
def cases(draw: st.DrawFn, *codecs: str) -> Case:
    ranks = draw(st.integers(2, 4))
    hosts = 2 if ranks == 4 and draw(st.booleans()) else 1
    rest = ClassPlan(
        "hierarchical" if hosts > 1 else "allreduce",
        draw(st.integers(1, 2)),
        draw(st.sampled_from(codecs)),
        ratio=draw(st.sampled_from([0.01, 0.3, 0.9])),
        rank=1,
    )
    rule = draw(st.sampled_from(["ordered", "size"]))
    plan = ExchangePlan(draw(st.integers(0, 3)), rule, rest=rest)
    order = st.permutations(range(len(_SHAPES))).map(tuple)
    arrivals = tuple(draw(order) for _ in range(ranks))
    return Case(ranks, hosts, draw(st.integers(0, 10**6)), plan, arrivals)


def gradient(of_rank: int, step: int, place: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * of_rank + 100 * step + place)
    return torch.randint(-9, 10, _SHAPES[place], generator=generator).float()


def sent(case: Case, begin: Any) -> list[list[torch.Tensor]]:
    """What one rank's optimizer gets in each step, then what error feedback keeps."""
    own, found = begin(_SHAPES, SyncPlan(case.plan)), []
    for step in range(_STEPS):
        arriving = case.arrivals[rank()]
        own.step({place: gradient(rank(), step, place) for place in arriving})
        found.append([each.grad.clone() for each in own.parameters])
    for each in own.parameters:
        each.grad = torch.zeros_like(each)
    own.method.dispatcher.take_left_out()
    return [*found, [each.grad for each in own.parameters]]


def run(case: Case, begin: Any) -> list[list[list[torch.Tensor]]]:
    ranks = ThreadRanks(case.ranks, hosts=case.hosts, seed=case.seed)
    found = ranks.run(lambda: sent(case, begin))
    for each in found[1:]:
        for own, same in zip(each[:_STEPS], found[0][:_STEPS], strict=True):
            assert all(map(torch.equal, own, same)), "ranks differ"
    return found


@given(case=cases("fp16", "bf16", "int8"))
@settings(max_examples=25)
def test_all_ranks_get_the_same_bits_near_the_mean(case: Case, begin: Any) -> None:
    found = run(case, begin)
    for step in range(_STEPS):
        for place, own in enumerate(found[0][step]):
            mean = sum(gradient(r, step, place) for r in range(case.ranks)) / case.ranks
            torch.testing.assert_close(own, mean, rtol=0, atol=0.5)


@given(case=cases("topk", "powersgd"))
@settings(max_examples=40)
def test_error_feedback_keeps_what_was_not_sent(case: Case, begin: Any) -> None:
    found = run(case, begin)
    for place, shape in enumerate(_SHAPES):
        total, whole = torch.zeros(shape), torch.zeros(shape)
        for step in range(_STEPS):
            total += found[0][step][place] * case.ranks
            whole += sum(gradient(r, step, place) for r in range(case.ranks))
        for each in found:
            total += each[_STEPS][place]
        torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_an_average_over_two_levels_has_what_was_left_out(codec: str, begin: Any) -> None:
    plan = ExchangePlan(2, rest=ClassPlan("hierarchical", codec=codec, ratio=0.1, rank=1))

    def body() -> list[torch.Tensor]:
        own = begin(_SHAPES, SyncPlan(plan, schedule=Schedule(3)))
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        local = 0
        for step in range(20):
            local += own.method.running
            own.step({place: torch.ones(shape) for place, shape in enumerate(_SHAPES)})
            if own.method.running and not local:  # what exchanges before have left out is lost
                own.method.average()
                start = step, own.values()
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        join()
        steps = 19 - start[0]
        return [b - a + 0.5 * steps for a, b in zip(start[1], own.values(), strict=True)]

    for each in ThreadRanks(4, hosts=2, seed=3).run(body):
        for change in each:
            torch.testing.assert_close(change, torch.zeros_like(change), rtol=0, atol=1e-4)


@pytest.mark.parametrize("codec", ["fp16", "bf16", "int8", "topk", "powersgd"])
def test_a_step_under_autocast_sends_what_another_does(codec: str, begin: Any) -> None:
    shapes = [(8, 8)]

    def body() -> list[torch.Tensor]:
        values = []
        for enabled in (False, True):
            own = begin(shapes, SyncPlan(ExchangePlan(1, rest=ClassPlan(codec=codec))))
            for step in range(4):
                gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(step + rank()))
                with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                    own.step({0: gradient})
            values += own.values()
        return values

    for plain, autocast in ThreadRanks(2, seed=1).run(body):
        assert torch.equal(plain, autocast)
