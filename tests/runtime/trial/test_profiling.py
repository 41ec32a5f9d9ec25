"""Which steps are profiled."""

from __future__ import annotations

import pytest

from hvd_autosync.runtime.trial.profiling import profiled_steps


@pytest.mark.parametrize(("earliest", "shortest"), [(0, 2), (1, 3)])
def test_gradients_are_looked_at_in_one_step_and_others_are_timed(
    earliest: int, shortest: int
) -> None:
    for warmup in range(shortest, 40):
        found = profiled_steps(warmup, earliest)
        assert found is not None
        begin, end = found
        assert earliest <= begin and begin + 2 <= end <= warmup


def test_two_steps_are_timed_and_one_is_left_before_the_measured_ones() -> None:
    for warmup in range(5, 40):
        begin, end = profiled_steps(warmup, earliest=1) or (0, 0)
        assert end == warmup - 1
        assert end - begin >= 3


def test_a_long_warm_up_comes_first() -> None:
    assert profiled_steps(10, earliest=0) == (5, 9)


def test_a_short_warm_up_has_what_it_has() -> None:
    assert profiled_steps(1, earliest=0) == (0, 1)
    assert profiled_steps(2, earliest=1) == (1, 2)
    assert profiled_steps(1, earliest=1) is None
    assert profiled_steps(0, earliest=0) is None
