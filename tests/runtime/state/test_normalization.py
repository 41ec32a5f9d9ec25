"""Running statistics of ranks, as threads, and their means."""

from __future__ import annotations

import gc
import operator

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.state import normalization
from hvd_autosync.runtime.state.normalization import (
    RunningStatistics,
    Statistic,
    running_statistics,
)

TYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])


class Layer:
    """What has a statistic."""

    def __init__(self, statistic: torch.Tensor) -> None:
        self.running_mean = statistic


@given(st.integers(1, 4), st.lists(st.tuples(TYPES, st.integers(1, 5)), max_size=4))
def test_statistics_become_their_means_over_ranks(
    size: int, layers: list[tuple[torch.dtype, int]]
) -> None:
    def statistics_of(each: int) -> list[torch.Tensor]:
        return [torch.full((count,), 2.0 * each + i).to(t) for i, (t, count) in enumerate(layers)]

    def body() -> tuple[list[torch.Tensor], int]:
        searches = []
        own = RunningStatistics("test", lambda: searches.append(1) or [])
        tensors = statistics_of(rank())
        layers = [Layer(each) for each in tensors]
        with pytest.MonkeyPatch.context() as patch:
            found = [Statistic(each, "running_mean") for each in layers]
            patch.setattr(normalization, "running_statistics", lambda _: found)
            assert all(map(operator.is_, own.tensors, tensors))
        own.average(size)
        before = [each.clone() for each in tensors]
        own.average(size)  # of equal ones, which stay
        assert all(map(torch.equal, before, tensors))
        return tensors, len(searches)

    ranks = ThreadRanks(size, seed=3)
    for tensors, searches in ranks.run(body):
        assert searches == 1
        for place, ((dtype, count), tensor) in enumerate(zip(layers, tensors, strict=True)):
            mean = sum(2.0 * each + place for each in range(size)) / size
            assert tensor.dtype is dtype and tensor.tolist() == [mean] * count


@pytest.mark.parametrize("way", ["another type", "assigned"])
def test_statistics_are_those_that_a_layer_has_now(way: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    own = RunningStatistics("test", lambda: list(model.parameters()))
    first = own.tensors
    assert len(first) == 2
    if way == "another type":
        model.double()
    else:
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    assert all(map(operator.is_, own.tensors, (model[1].running_mean, model[1].running_var)))
    assert not any(map(operator.is_, own.tensors, first))


def test_statistics_of_a_layer_that_is_gone_still_count() -> None:
    """Other ranks may not have collected it yet."""
    layer = torch.nn.BatchNorm1d(3)
    (mean, _) = running_statistics(list(layer.parameters()))
    values = layer.running_mean
    layer.running_mean = None
    assert mean.tensor is values
    del layer
    gc.collect()
    assert mean.tensor is values


def test_statistics_of_a_model_that_the_script_has_frozen_are_found() -> None:
    """By ``gc.freeze()``, as before it forks the workers of a loader."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    gc.freeze()
    mean, variance = running_statistics(list(model.parameters()))
    assert mean.tensor is model[1].running_mean and variance.tensor is model[1].running_var
