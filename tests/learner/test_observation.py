from __future__ import annotations

import math

import pytest

from hvd_autosync.learner import Observation
from hvd_autosync.search_space import Strategy


@pytest.mark.parametrize("step_s", [None, math.nan, math.inf, -math.inf, 0.0, -1.0])
def test_what_is_no_duration_is_a_failure(step_s: float | None) -> None:
    observation = Observation(Strategy(), step_s, 0.1)
    assert not observation.measured
    assert math.isnan(observation.log_step)
    assert observation.log_variance == 0.0


def test_relative_error_becomes_the_variance_of_the_logarithm() -> None:
    observation = Observation(Strategy(), 2.0, 0.1)
    assert observation.measured
    assert observation.log_step == math.log(2.0)
    assert observation.log_variance == pytest.approx(0.05**2)


@pytest.mark.parametrize(("error", "variance"), [(math.nan, 0.0), (math.inf, 0.0), (9.0, 1.0)])
def test_odd_standard_errors_are_tamed(error: float, variance: float) -> None:
    assert Observation(Strategy(), 1.0, error).log_variance == variance
