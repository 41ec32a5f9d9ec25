"""How batches are cut for ranks that are not equally fast."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler

from hvd_autosync.runtime.balancing import Balancing, sizes
from hvd_autosync.runtime.pace import WINDOW

speeds_of = st.lists(st.floats(0.05, 20.0), min_size=2, max_size=4)


@given(speeds_of, st.integers(0, 30))
def test_sizes_are_whole_and_within_their_limits(speeds: list[float], more: int) -> None:
    samples = len(speeds) + more
    found = sizes(samples, tuple(speeds))
    assert sum(found) == samples
    assert min(found) >= 1 and max(found) <= 2 * -(-samples // len(speeds))


@given(st.lists(st.floats(0.3, 1.0), min_size=2, max_size=3), st.integers(0, 9))
def test_no_other_sizes_are_ready_sooner(speeds: list[float], more: int) -> None:
    samples = len(speeds) + more
    most = 2 * -(-samples // len(speeds))
    found = sizes(samples, tuple(speeds))
    if len(set(speeds)) == 1:
        assert max(found) - min(found) <= 1
        return

    def ready(counts: tuple[int, ...]) -> float:
        return max(count / speed for count, speed in zip(counts, speeds, strict=True))

    every = itertools.product(range(1, most + 1), repeat=len(speeds))
    best = min(ready(each) for each in every if sum(each) == samples)
    assert ready(found) == pytest.approx(best)


def balanced(
    rank: int, ranks: int, samples: int, size: int, **options: Any
) -> tuple[Balancing, Any, Any]:
    """What a rank has: its part, the iterator of a pass, and the loader."""
    keeps = {name: options.pop(name) for name in ("shuffle", "drop_last") if name in options}
    data = list(range(samples))
    sampler = DistributedSampler(data, ranks, rank, **keeps)  # type: ignore[arg-type]
    loader = DataLoader(
        data, batch_size=size, sampler=sampler, collate_fn=list, **options  # type: ignore[arg-type]
    )  # fmt: skip
    own = Balancing(rank, ranks)
    iterator = iter(loader)
    own.begun(loader, iterator)
    own.fed_by([iterator])
    return own, iterator, loader


def windows(parts: list[Balancing], seconds: list[float], times: int) -> list[list[int]]:
    """What every rank comes to after some windows of so many seconds per step."""
    for _ in range(times):
        places = [part.place for part in parts]
        found = [part.window(seconds, places) for part in parts]
        assert all(each == found[0] for each in found)
    return found


@given(
    ranks=st.integers(1, 4), samples=st.integers(60, 200), size=st.integers(2, 5),
    shuffle=st.booleans(), drop_last=st.booleans(), slow=st.floats(1.5, 6.0),
)  # fmt: skip
def test_all_ranks_together_have_the_same_samples_in_every_step(
    ranks: int, samples: int, size: int, shuffle: bool, drop_last: bool, slow: float
) -> None:
    options = {"shuffle": shuffle, "drop_last": drop_last}
    plain = [iter(balanced(r, ranks, samples, size, **options)[2]) for r in range(ranks)]
    every = [balanced(r, ranks, samples, size, **options) for r in range(ranks)]
    parts = [each[0] for each in every]
    seconds = [1.0] * (ranks - 1) + [slow]
    for step, batches in enumerate(zip(*(iterator for _, iterator, _ in every), strict=True)):
        wanted: list[int] = sorted(sum((next(each) for each in plain), []))
        assert sorted(sum(batches, [])) == wanted
        weights = [part.weight() for part in parts]
        for batch, weight in zip(batches, weights, strict=True):
            assert weight == pytest.approx(len(batch) * ranks / len(wanted))
        if step % WINDOW == WINDOW - 1:
            windows(parts, seconds, 1)
    # Nothing is left, neither here nor there.
    assert next(plain[0], None) is None


def loops(iterator: Iterator[Any], steps: int) -> None:
    for _ in range(steps):
        next(iterator)


def test_a_slow_rank_has_smaller_batches_after_three_windows_and_keeps_them() -> None:
    every = [balanced(rank, 4, 800, 8) for rank in range(4)]
    parts = [each[0] for each in every]
    for _, iterator, _ in every:
        loops(iterator, WINDOW)
    slow = [1.0, 1.0, 1.0, 4.0]
    assert windows(parts, slow, 2) == [[]] * 4, "too early"
    (found,) = {tuple(each) for each in windows(parts, slow, 1)}
    assert found == (10, 10, 10, 2)
    assert windows(parts, slow, 5) == [[]] * 4, "its windows are those of before"
    for _, iterator, _ in every:
        assert len(next(iterator)) in (10, 2)
        loops(iterator, WINDOW)
    assert windows(parts, [1.25, 1.25, 1.25, 1.0], 9) == [[]] * 4, "equally fast now"
    # The next pass of the same loader begins with them.
    for part, _, loader in every:
        again = iter(loader)
        part.begun(loader, again)
        assert len(next(again)) in (10, 2)


def test_noise_changes_nothing() -> None:
    every = [balanced(rank, 2, 400, 8) for rank in range(2)]
    for _, iterator, _ in every:
        loops(iterator, WINDOW)
    parts = [each[0] for each in every]
    for seconds in ([1.0, 1.3], [1.3, 1.0], [1.0, 1.0]) * 5:
        assert windows(parts, seconds, 1) == [[]] * 2


def test_batches_that_workers_already_have_stay_as_they_are() -> None:
    own, iterator, _ = balanced(0, 2, 400, 4, num_workers=2)
    assert own.place[0] == 4, "two for each worker"
    loops(iterator, WINDOW)
    planned, used = own.place
    assert planned > used
    for _ in range(3):
        found = own.window([1.0, 3.0], [own.place] * 2)
    assert found == [6, 2]
    lengths = [len(batch) for batch in iterator]
    ahead = planned - used
    assert lengths[:ahead] == [4] * ahead and set(lengths[ahead:]) == {6}


@pytest.mark.parametrize("kind", ["no sampler", "evaluation", "two loaders"])
def test_other_loops_are_left_alone(kind: str) -> None:
    import torch

    own = Balancing(0, 2)
    data = list(range(100))
    sampler = DistributedSampler(data, 2, 0)  # type: ignore[arg-type]
    loader = DataLoader(
        data, batch_size=4, sampler=None if kind == "no sampler" else sampler  # type: ignore[arg-type]
    )  # fmt: skip
    iterator = iter(loader)
    with torch.set_grad_enabled(kind != "evaluation"):
        own.begun(loader, iterator)
    other = iter(loader)
    own.begun(loader, other)
    own.fed_by([iterator, other] if kind == "two loaders" else [iterator])
    loops(iterator, WINDOW)
    assert own.place == (0, 0) and own.weight() == 1.0
    assert own.window([1.0, 9.0], [own.place] * 2) == []
