"""Which ranks are stragglers: slow ones soon, equal ones never, and none after they recovered."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_autosync.runtime.stragglers.detector import Detector, excesses

SOON = 8


def flow(
    ranks: int,
    count: int,
    *,
    slow: Sequence[int] = (),
    factor: float = 1.0,
    noise: float = 0.2,
    seed: int = 0,
) -> Iterator[list[float]]:
    """Median seconds of windows of 8 steps."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        steps = np.exp(random.normal(0, noise, (ranks, 8)))
        steps += (random.random(steps.shape) < 1 / 200) * random.pareto(1.5, steps.shape)
        steps[list(slow)] *= factor
        yield [float(each) for each in np.median(steps, axis=1)]


def fed(detector: Detector, windows: Iterator[list[float]]) -> list[frozenset[int]]:
    return [detector.window(each) for each in windows]


seconds = st.floats(1e-6, 1e3)
tables = st.integers(2, 9).flatmap(
    lambda ranks: st.lists(
        st.lists(seconds, min_size=ranks, max_size=ranks), min_size=1, max_size=30
    )
)


@given(st.integers(1, 16), st.lists(seconds, min_size=1, max_size=50))
def test_equal_ranks_are_never_flagged(ranks: int, shared: list[float]) -> None:
    detector = Detector(ranks)
    assert all(not detector.window([each] * ranks) for each in shared)


@given(tables, st.integers(-20, 20))
def test_the_unit_of_time_does_not_matter(table: list[list[float]], power: int) -> None:
    one, other = Detector(len(table[0])), Detector(len(table[0]))
    for row in table:
        assert one.window(row) == other.window([each * 2.0**power for each in row])


@given(tables, st.randoms(use_true_random=False))
def test_nor_does_the_order_of_ranks(table: list[list[float]], random: object) -> None:
    places = list(range(len(table[0])))
    random.shuffle(places)  # type: ignore[attr-defined]
    one, other = Detector(len(places)), Detector(len(places))
    for row in table:
        moved = other.window([row[place] for place in places])
        assert one.window(row) == {places[rank] for rank in moved}


@given(tables)
def test_all_ranks_come_to_the_same_verdict(table: list[list[float]]) -> None:
    one, other = Detector(len(table[0])), Detector(len(table[0]))
    assert [one.window(row) for row in table] == [other.window(row) for row in table]


@given(
    ranks=st.integers(2, 9),
    rank=st.integers(0, 8),
    factor=st.floats(2.0, 50.0),
    seed=st.integers(0, 1000),
    before=st.integers(0, 40),
)
@settings(max_examples=50)
def test_a_slow_rank_is_flagged_soon_and_no_other(
    ranks: int, rank: int, factor: float, seed: int, before: int
) -> None:
    detector, rank = Detector(ranks), rank % ranks
    assert not any(fed(detector, flow(ranks, before, seed=seed, noise=0.1)))
    slow = flow(ranks, SOON, slow=[rank], factor=factor, seed=seed + 1, noise=0.1)
    assert fed(detector, slow)[-1] == {rank}


@given(
    ranks=st.integers(2, 9),
    rank=st.integers(0, 8),
    factor=st.floats(1.5, 50.0),
    seed=st.integers(0, 1000),
)
@settings(max_examples=50)
def test_it_is_none_any_more_soon_after_it_recovered(
    ranks: int, rank: int, factor: float, seed: int
) -> None:
    detector, rank = Detector(ranks), rank % ranks
    fed(detector, flow(ranks, 40, slow=[rank], factor=factor, seed=seed, noise=0.1))
    assert detector.slow == {rank}
    assert not fed(detector, flow(ranks, SOON, seed=seed + 1, noise=0.1))[-1]


@pytest.mark.parametrize("ranks", [2, 4, 16])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_no_false_alarm_in_ten_thousand_steps(ranks: int, noise: float) -> None:
    assert not any(fed(Detector(ranks), flow(ranks, 1250, noise=noise)))


@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_one_of_four_and_two_of_four(factor: float) -> None:
    for slow in ([2], [0, 3]):
        detector = Detector(4)
        fed(detector, flow(4, 20))
        verdicts = fed(detector, flow(4, 3 * SOON, slow=slow, factor=factor, seed=1))
        assert verdicts[-1] == set(slow)
        assert all(each <= set(slow) for each in verdicts)


def test_one_of_two() -> None:
    detector = Detector(2)
    assert fed(detector, flow(2, 20, slow=[1], factor=2.0))[-1] == {1}


def test_two_windows_are_no_straggler_and_one_hides_none() -> None:
    detector = Detector(4)
    fed(detector, flow(4, 20, noise=0.05))
    assert not any(fed(detector, flow(4, 2, slow=[1], factor=50.0, noise=0.05)))
    assert not any(fed(detector, flow(4, 20, noise=0.05)))
    assert fed(detector, flow(4, 10, slow=[1], factor=2.0, noise=0.05))[-1] == {1}
    assert fed(detector, flow(4, 1, noise=0.05)) == [{1}]
    assert fed(detector, flow(4, 1, slow=[1], factor=2.0, noise=0.05)) == [{1}]


def test_a_rank_that_is_always_a_little_slower_is_no_straggler() -> None:
    assert not any(fed(Detector(4), flow(4, 500, slow=[1], factor=1.12, noise=0.05)))


def test_what_all_ranks_share_is_no_news() -> None:
    detector = Detector(4)
    for number, row in enumerate(flow(4, 500, noise=0.1)):
        level = 1 + number / 20 + 10 * (number % 50 > 40)
        assert not detector.window([level * each for each in row])


def test_a_rank_of_which_nothing_is_known_stays_what_it_was() -> None:
    detector = Detector(3)
    fed(detector, flow(3, 20, slow=[1], factor=2.0))
    assert detector.slow == {1}
    for row in flow(3, 50, noise=0.1):
        assert detector.window([row[0], math.nan, row[2]]) == {1}
    assert detector.window([math.nan, 1.0, 0.0]) == {1}
    assert not fed(detector, flow(3, 20))[-1]


def test_a_single_rank_has_nobody_to_be_compared_with() -> None:
    detector = Detector(1)
    assert not any(detector.window([each]) for each in (1.0, 5.0, 0.1))


@given(st.lists(seconds, min_size=2, max_size=12))
def test_the_median_is_of_the_others(row: list[float]) -> None:
    for rank, found in enumerate(excesses(row)):
        others = statistics.median(row[:rank] + row[rank + 1 :])
        assert found == pytest.approx(math.log(row[rank] / others), abs=1e-9)
