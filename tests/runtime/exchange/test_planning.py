"""Buckets of plans for large models, whose tensors have no memory here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch
from torch import nn

from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.exchange import planning
from hvd_autosync.runtime.exchange.buckets import FlatBucket
from hvd_autosync.runtime.exchange.codecs import PowerSGD
from hvd_autosync.runtime.exchange.exchanges import Scaling
from hvd_autosync.runtime.exchange.factors import pays
from hvd_autosync.runtime.exchange.planning import Planning, layout, share_memory
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan

GIB = 2**30
MIB = 2**20
#: Plans whose exchanges gather what they have reduced.
GATHERING = {
    "sharded": ClassPlan("sharded"),
    "hierarchical": ClassPlan("hierarchical"),
    "lossless": ClassPlan(lossless=True),
    "bf16": ClassPlan(codec="bf16"),
    "topk": ClassPlan(codec="topk", ratio=0.125),
}
#: What reduces without gathering.
OTHERS = {
    "allreduce": ClassPlan(),
    "fp16": ClassPlan(codec="fp16"),
    "a small share": ClassPlan(codec="topk", ratio=0.001),
}


def sizes(
    plan: ExchangePlan, parameters: Sequence[int], dtype: torch.dtype = torch.float32
) -> dict[str, int]:
    """Name of each bucket -> elements in it, for parameters of so many elements."""

    def body() -> dict[str, int]:
        own = [nn.Parameter(torch.empty(n, dtype=dtype, device="meta")) for n in parameters]
        names = {p: (f"p{number}", "large") for number, p in enumerate(own)}
        found = {}
        for bucket in Planning(plan, names, Scaling()).buckets(own, {}):
            flat = getattr(bucket, "_whole", bucket)  # that of a bucket of owners
            whole = sum(p.numel() for p in bucket.parameters)
            bounds = flat._slice if isinstance(flat, FlatBucket) else slice(None)
            found[bucket.name] = len(range(*bounds.indices(whole)))
        return found

    first, *others = ThreadRanks(4, hosts=2, seed=0).run(body)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("name", GATHERING)
def test_no_bucket_is_more_than_can_be_gathered(name: str) -> None:
    plan = ExchangePlan(large=GATHERING[name])
    large = GIB  # elements: 4 GiB
    found = sizes(plan, [large, 100])
    assert list(found) == ["p0[0]", "p0[1]", "p0[2]", "p1"]
    assert sum(found.values()) == large + 100
    assert 4 * max(found.values()) < 2**31 - MIB // 2
    assert list(sizes(plan, [GIB // 2 - MIB])) == ["p0"]


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_gathered_stays_whole(name: str) -> None:
    assert list(sizes(ExchangePlan(large=OTHERS[name]), [GIB])) == ["p0"]


def test_only_plans_of_fused_buckets_depend_on_the_layout() -> None:
    placed = [nn.Parameter(torch.empty(2, device=each)) for each in ("cpu", "meta", "cpu")]
    swapped = [nn.Parameter(torch.empty(2, device=each)) for each in ("meta", "cpu", "meta")]
    single = [ClassPlan(), ClassPlan("rows"), ClassPlan("factors"), ClassPlan(codec="powersgd")]
    for each in single:
        assert layout(ExchangePlan(order="priority", large=each), placed) == [""] * 3
    fused = [ExchangePlan(buckets=2), *(ExchangePlan(large=each) for each in GATHERING.values())]
    for plan in fused:
        assert len({*layout(plan, placed)}) == 2
        assert layout(plan, placed) == layout(plan, swapped)
    assert (
        "not contiguous"
        in layout(ExchangePlan(large=ClassPlan("sharded")), [nn.Parameter(torch.empty(2, 3).t())])[
            0
        ]
    )


def test_a_bucket_of_several_parameters_is_split_before_it_is_too_large() -> None:
    plan = ExchangePlan(buckets=1, large=ClassPlan("sharded"))
    assert list(sizes(plan, [200 * MIB] * 5)) == ["p0+1", "p2+1", "p4"]
    assert list(sizes(plan, [200 * MIB] * 5, torch.float16)) == ["p0+4"]
    # They travel as float32.
    assert list(sizes(plan, [200 * MIB] * 5, torch.bfloat16)) == ["p0+1", "p2+1", "p4"]
    assert list(sizes(ExchangePlan(buckets=1), [200 * MIB] * 5)) == ["p0+4"]


def test_top_k_numbers_no_more_elements_than_an_int32_can() -> None:
    plan = ExchangePlan(buckets=1, large=OTHERS["a small share"])
    assert sizes(plan, [2 * GIB]) == {"p0[0]": GIB, "p0[1]": GIB}
    assert sizes(plan, [2 * GIB - 1]) == {"p0": 2 * GIB - 1}
    assert sizes(plan, [GIB - 1, GIB, 100]) == {"p0+1": 2 * GIB - 1, "p2": 100}
    assert sizes(ExchangePlan(), [4 * GIB]) == {"p0": 4 * GIB}


@pytest.mark.parametrize("alike", [True, False])
def test_powersgd_is_for_ranks_that_multiply_alike(
    alike: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rank orthogonalizes and multiplies itself, and replicas must get the same bits."""
    monkeypatch.setattr(planning, "arithmetic", lambda _: ["a processor", alike or rank()])
    plan = ExchangePlan(large=ClassPlan(codec="powersgd"))

    def body() -> list[bool]:
        names = {nn.Parameter(torch.ones(4, 3)): ("p", "large")}
        buckets = Planning(plan, names, Scaling()).buckets(list(names), {})
        return [isinstance(bucket.codec, PowerSGD) for bucket in buckets]

    assert ThreadRanks(2).run(body) == [[alike]] * 2
    assert capsys.readouterr().err.count("the codec powersgd is not used") == (not alike)


def test_factors_that_cannot_be_gathered_do_not_pay() -> None:
    weight = torch.empty(2**16, 2**16, device="meta")
    assert pays(4000, weight, 4)
    assert not pays(4096, weight, 4)
    assert pays(4096, weight, 2)


def test_parameters_that_share_memory() -> None:
    memory = torch.zeros(100)
    pieces = [memory[:20], memory[20:40], memory[35:50], memory[60:], memory[70:80], memory[0:0]]
    pieces += [torch.zeros(20), memory[40:60].view(4, 5).t(), memory[51:60:2]]
    parameters = [nn.Parameter(piece) for piece in pieces]
    assert [place for place, own in enumerate(share_memory(parameters)) if own] == [
        1,
        2,
        3,
        4,
        7,
        8,
    ]
    assert share_memory(parameters[:2]) == [False, False]
