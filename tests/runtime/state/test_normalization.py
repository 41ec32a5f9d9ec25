"""Running statistics of ranks, as threads, and their means."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.state import normalization
from hvd_autosync.runtime.state.normalization import RunningStatistics

TYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])


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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(normalization, "running_statistics", lambda _: tensors)
            assert own.tensors is tensors
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
