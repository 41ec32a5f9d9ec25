from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_autosync.learner import Observation
from hvd_autosync.learner.targets import Targets
from hvd_autosync.search_space import Strategy


def told(*steps: float) -> Targets:
    seen = [Observation(Strategy(), step, 0.0) for step in steps]
    return Targets.of(seen, np.zeros(len(seen)), 0.25)


def test_what_experts_explain_is_no_spread() -> None:
    seen = [Observation(Strategy(), step) for step in (0.1, 0.2, 0.4)]
    explained = Targets.of(seen, np.log([1.0, 2.0, 4.0]), 0.1)
    assert explained.center == pytest.approx(math.log(0.1))
    assert explained.scale < 0.1 < Targets.of(seen, np.zeros(3), 0.1).scale


def test_the_unit_follows_the_spread() -> None:
    narrow = told(*np.exp(np.full(40, -1.0)))
    wide = told(*np.exp(np.random.default_rng(0).normal(0, 2, 40)))
    assert narrow.scale < 0.06
    assert wide.scale == pytest.approx(2, rel=0.3)


def test_a_unit_of_time_only_moves_the_center() -> None:
    seconds, milliseconds = told(0.1, 0.3), told(100.0, 300.0)
    assert milliseconds.scale == pytest.approx(seconds.scale)
    assert milliseconds.center - seconds.center == pytest.approx(math.log(1000))
