"""Spaces and a synthetic job for the learner's tests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import numpy as np
import pytest

from hvd_autosync.learner import Observation, gp
from hvd_autosync.search_space import Condition, SearchSpace, Strategy
from hvd_autosync.search_space.knobs import categorical_knob, float_knob, integer_knob

Tell = Callable[..., Observation]


@pytest.fixture(autouse=True)
def forget_fits() -> None:
    """Each test fits its own models."""
    gp._fit.cache_clear()


@pytest.fixture
def mixed_space() -> SearchSpace:
    """Four numeric and four categorical knobs, two of them conditional."""
    return SearchSpace(
        (
            integer_knob(
                "fusion",
                0,
                1 << 28,
                1 << 27,
                help="",
                scale="log",
                log_offset=65536.0,
                multiple=65536,
            ),
            float_knob("cycle", 0.1, 100.0, 1.0, help="", scale="log"),
            integer_knob("streams", 1, 4, 1, help=""),
            categorical_knob("hierarchical", (False, True), False, help=""),
            categorical_knob(
                "torus",
                (False, True),
                False,
                help="",
                condition=Condition("hierarchical", (False,)),
            ),
            integer_knob("groups", 0, 16, 0, help="", scale="log", log_offset=1.0),
            categorical_knob(
                "group_fusion",
                (False, True),
                True,
                help="",
                condition=Condition("groups", tuple(range(1, 17))),
            ),
            categorical_knob("codec", ("none", "fp16", "int8"), "none", help=""),
        )
    )


@pytest.fixture
def tiny_space() -> SearchSpace:
    """Two flags, one of them conditional, and three choices: nine strategies."""
    return SearchSpace(
        (
            categorical_knob("a", (False, True), False, help=""),
            categorical_knob("b", (False, True), False, help="", condition=Condition("a", (True,))),
            categorical_knob("c", ("x", "y", "z"), "x", help=""),
        )
    )


@pytest.fixture
def log_step(mixed_space: SearchSpace) -> Callable[[Strategy], float]:
    """True log step time over ``mixed_space``; the optimum is -2 and the default about -1.17."""

    def function(strategy: Strategy) -> float:
        fusion, cycle = mixed_space["fusion"], mixed_space["cycle"]
        value = -2.0
        value += 0.8 * (fusion.to_unit(strategy["fusion"]) - 0.5) ** 2
        value += 0.8 * (cycle.to_unit(strategy["cycle"]) - 0.2) ** 2
        value += 0.25 * (not strategy["hierarchical"])
        value += {"none": 0.2, "fp16": 0.0, "int8": 0.3}[str(strategy["codec"])]
        groups = int(strategy["groups"])
        value += 0.15 if groups == 0 or strategy["group_fusion"] else 0.0
        return value

    return function


@pytest.fixture
def tell(log_step: Callable[[Strategy], float]) -> Tell:
    """Measure a strategy with 3 % noise that follows from ``seed``."""

    def observe(strategy: Strategy, seed: int = 0) -> Observation:
        digits = int(hashlib.sha256(strategy.to_json().encode()).hexdigest()[:12], 16) % 2**31
        noise = 0.03 * float(np.random.default_rng([seed, digits]).standard_normal())
        return Observation(strategy, math.exp(log_step(strategy) + noise))

    return observe
