"""Which of the tried strategies is judged next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.search_space.knobs import Condition, categorical_knob, float_knob
from hvd_autosync.study.candidate_selection import CandidateSelection, quality_constraint
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.verdict import Verdict

SPACE = SearchSpace(
    (
        categorical_knob("protocol", ("bsp", "asp"), "bsp", help="", exact=False),
        categorical_knob("codec", ("none", "topk"), "none", help="", exact=False),
        float_knob(
            "ratio",
            0.001,
            0.25,
            0.01,
            scale="log",
            help="",
            exact=False,
            condition=Condition("codec", ("topk",)),
        ),
    )
)
HARSH = SPACE.complete({"codec": "topk", "ratio": 0.065})
MIDDLING = SPACE.complete({"protocol": "asp"})


class Timed(CandidateSelection):
    """A selection that knows how many times as fast as the default each strategy is."""

    def __init__(self, speedups: Mapping[Strategy, float]) -> None:
        super().__init__(Problem(SPACE), [])
        self._speedups = speedups

    def _log_step(self, strategies: Sequence[Strategy]) -> list[float]:
        return [-math.log(self._speedups.get(each, 1.0)) for each in strategies]


def to_judge(speedups: Mapping[Strategy, float]) -> Strategy | None:
    return Timed(speedups).to_judge(list(speedups), list(speedups), [])


def test_the_share_of_a_step_counts_that_a_strategy_saves() -> None:
    """Nine tenths at a probability of a fifth are less than a half at a half."""
    likely = quality_constraint(SPACE, []).feasibility_probabilities([HARSH, MIDDLING])
    assert likely == pytest.approx([0.2, 0.5], abs=0.05)
    assert to_judge({HARSH: 10.0, MIDDLING: 2.0}) == MIDDLING
    assert to_judge({HARSH: 10.0, MIDDLING: 1.1}) == HARSH


def test_what_saves_too_little_is_not_judged() -> None:
    assert to_judge({MIDDLING: 1.0 / 0.985}) is None
    assert to_judge({MIDDLING: 1.0 / 0.975}) == MIDDLING
    assert to_judge({HARSH: 0.5}) is None
    twice = Timed({MIDDLING: 2.0})  # a half of a step, at a probability of about a half
    assert twice.to_judge([MIDDLING], [MIDDLING], [], 0.2) == MIDDLING
    assert twice.to_judge([MIDDLING], [MIDDLING], [], 0.3) is None


@pytest.mark.parametrize(
    ("speedup", "steps"), [(0.5, 100), (1.0, 110), (2.0, 220), (2.9, 300), (9.0, 300)]
)
def test_a_tenth_more_steps_are_asked_for_than_fit_into_the_time(
    speedup: float, steps: int
) -> None:
    assert Timed({HARSH: speedup}).steps_in_time(HARSH, 100) == pytest.approx(steps, abs=1)


def test_a_training_that_failed_says_nothing_about_other_strategies() -> None:
    nothing = Verdict(HARSH, Outcome.NOT_SHOWN, math.nan, math.nan, 0.1, "its training failed")
    before = quality_constraint(SPACE, []).feasibility_probabilities([HARSH, MIDDLING])
    after = quality_constraint(SPACE, [nothing]).feasibility_probabilities([HARSH, MIDDLING])
    assert after[0] == 0.0 and after[1] == before[1]
    worse = replace(nothing, outcome=Outcome.WORSE)
    assert quality_constraint(SPACE, [worse]).feasibility_probabilities([MIDDLING]) < before[1]
