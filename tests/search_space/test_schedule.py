"""Schedules: the published vectors, and what holds for every rule and learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.schedule import Schedule, rounds
from hvd_autosync.search_space.sync_plan import schedule_of

FLOOR = 1e-6
VIT, RESNET = (93_600, 10_000, 0.008), (62_400, 1_560, 0.8)


def cosine(steps: int, warmup: int, peak: float) -> list[float]:
    """Linear warm-up from the floor to ``peak``, then half a cosine down to the floor."""
    falling = (math.pi * t / (steps - warmup) for t in range(steps - warmup))
    return [
        *(FLOOR + (peak - FLOOR) * t / warmup for t in range(warmup)),
        *(FLOOR + (peak - FLOOR) * (1 + math.cos(angle)) / 2 for angle in falling),
    ]


@pytest.mark.parametrize(
    ("recipe", "base", "alpha", "count", "volume", "grows_at", "last"),
    [
        (VIT, 4, 0.0175, 9_711, 10.38, 17_876, [738, 894, 1145, 1612, 2769, 8142]),
        (VIT, 8, 0.0175, 6_461, 6.90, 39_136, [861, 1089, 1501, 2453, 6461, 2339]),
        (RESNET, 2, 0.2, 24_792, 39.73, 47_306, [275, 348, 480, 784, 2051, 829]),
        (RESNET, 4, 0.25, 12_539, 20.09, 47_564, [259, 314, 404, 571, 990, 2876]),
    ],
)
@pytest.mark.parametrize("given", [True, False], ids=["warm-up given", "warm-up seen"])
def test_published_schedules(
    recipe: tuple[int, int, float],
    base: int,
    alpha: float,
    count: int,
    volume: float,
    grows_at: int,
    last: list[int],
    given: bool,
) -> None:
    steps, warmup, _ = recipe
    schedule = Schedule(base, 2, alpha, warmup=warmup if given else None)
    lengths = list(rounds(schedule, cosine(*recipe)))
    assert (len(lengths), round(100 * len(lengths) / steps, 2)) == (count, volume)
    assert lengths[-6:] == last
    begins = [sum(lengths[:index]) for index, h in enumerate(lengths) if h > base]
    assert begins[0] == grows_at


rates_lists = st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=60)
schedules = st.builds(
    Schedule,
    base=st.integers(1, 9),
    power=st.integers(0, 3),
    alpha=st.floats(0.0, 10.0),
    start=st.integers(0, 30),
    warmup=st.none() | st.integers(0, 20),
    cap=st.none() | st.integers(1, 12),
)


@given(schedule=schedules, rates=rates_lists)
def test_rounds_cover_every_step_once(schedule: Schedule, rates: list[float]) -> None:
    lengths = list(rounds(schedule, rates))
    assert sum(lengths) == len(rates) and min(lengths) >= 1
    assert max(lengths) <= (schedule.cap or len(rates))
    ends = {sum(lengths[:count]) for count in range(len(lengths) + 1)}
    # Parallel steps first, and no round begins before the start and ends after it.
    assert ends >= set(range(min(schedule.start, len(rates)) + 1))
    if schedule.parallel:
        assert set(lengths) == {1}


@given(schedule=schedules, rates=rates_lists, remaining=st.integers(1, 5))
def test_a_round_ends_where_it_must(schedule: Schedule, rates: list[float], remaining: int) -> None:
    found = schedule.length(40, rates[0], max(rates), remaining)
    free = schedule.length(40, rates[0], max(rates))
    assert found == min(free, remaining)


def lengths_at(rates: Sequence[float], power: int) -> list[int]:
    schedule = Schedule(2, power, 0.2, cap=100)
    return [schedule.length(10, rate, 0.1) for rate in rates]


def test_powers() -> None:
    rates = [0.09, 0.05, 0.02, 0.01]
    assert lengths_at(rates, 0) == [2, 2, 2, 2]
    assert lengths_at(rates, 1) == [2, 4, 10, 20]
    assert lengths_at(rates, 2) == [4, 16, 100, 100]
    assert lengths_at(rates, 3) == [10, 64, 100, 100]


def test_a_rate_that_never_fell_keeps_the_base() -> None:
    schedule = Schedule(3, 2, 1.0)
    assert schedule.length(5, 0.01, 0.01) == 3
    assert schedule.length(5, 0.0099, 0.01) == 10_203


def test_a_rate_of_zero_has_no_rule() -> None:
    assert Schedule(3, 2, 1.0).length(5, 0.0, 0.1) == 3
    assert Schedule(3, 2, 1.0, cap=16).length(5, 0.0, 0.1) == 16


@pytest.mark.parametrize("rate", [1e-120, 1e-200, 5e-324])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_a_rate_that_has_nearly_vanished_gives_the_longest_rounds(power: int, rate: float) -> None:
    assert Schedule(3, power, 0.01).length(5, rate, 0.1) == 2**53
    assert Schedule(3, power, 0.01, cap=16).length(5, rate, 0.1) == 16


def test_post_local() -> None:
    assert list(rounds(Schedule(4, start=3), [0.1] * 12)) == [1, 1, 1, 4, 4, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"base": 0},
        {"power": 4},
        {"alpha": -1.0},
        {"alpha": math.nan},
        {"start": -1},
        {"warmup": -1},
        {"cap": 0},
    ],
)
def test_numbers_that_make_no_sense_are_named(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(SpaceError, match=f"{name}={value}"):
        Schedule(**wrong)  # type: ignore[arg-type]


def test_the_schedule_of_a_strategy() -> None:
    assert schedule_of({}) is None
    assert schedule_of({"local_steps": 1}) is None
    assert schedule_of({"local_steps": 4, "buckets": 3}) == Schedule(4, cap=256)
    found = schedule_of(
        {"local_steps": 1, "local_power": 2, "local_alpha": 0.1, "local_start": 9, "local_cap": 32}
    )
    assert found == Schedule(1, 2, 0.1, 9, None, 32)
