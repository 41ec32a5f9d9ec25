from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_autosync.learner import Observation
from hvd_autosync.learner.targets import Targets
from hvd_autosync.search_space import Strategy


def told(*steps: float | None) -> Targets:
    return Targets.of([Observation(Strategy(), step, 0.0) for step in steps])


def test_failures_are_slower_than_everything_measured_and_uncertain() -> None:
    targets = told(0.1, None, 0.2)
    assert targets.log_step[1] > max(targets.log_step[0], targets.log_step[2]) + 0.05
    assert targets.variance[1] > 0 == targets.variance[0]


def test_failures_do_not_drown_small_differences() -> None:
    assert told(0.100, 0.101, 0.102, None).scale < 0.2


def test_the_unit_follows_the_spread() -> None:
    narrow = told(*np.exp(np.full(40, -1.0)))
    wide = told(*np.exp(np.random.default_rng(0).normal(0, 2, 40)))
    assert narrow.scale < 0.06
    assert wide.scale == pytest.approx(2, rel=0.3)


def test_a_unit_of_time_only_moves_the_center() -> None:
    seconds, milliseconds = told(0.1, 0.3, None), told(100.0, 300.0, None)
    assert milliseconds.scale == pytest.approx(seconds.scale)
    assert milliseconds.center - seconds.center == pytest.approx(math.log(1000))


def test_one_failure_alone_has_a_target() -> None:
    assert np.isfinite(told(None).log_step).all()
