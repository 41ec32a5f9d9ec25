"""What verdicts say of strategies that were not judged."""

import math

import numpy as np

from hvd_autosync.learner.admissibility import Admissibility
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.search_space.knobs import Condition, categorical_knob, float_knob

SPACE = SearchSpace(
    (
        float_knob("cycle_time_ms", 0.1, 100.0, 1.0, scale="log", help=""),
        categorical_knob("codec", ("none", "bf16", "topk"), "none", help="", exact=False),
        float_knob(
            "ratio", 0.001, 0.25, 0.01, scale="log", help="", exact=False,
            condition=Condition("codec", ("topk",)),
        ),
    )
)  # fmt: skip


def topk(ratio: float, cycle: float = 1.0) -> Strategy:
    return SPACE.complete({"codec": "topk", "ratio": ratio, "cycle_time_ms": cycle})


BF16 = SPACE.complete({"codec": "bf16"})


def test_before_any_verdict_all_are_alike() -> None:
    chances = Admissibility(SPACE, [], []).chances([topk(0.01), topk(0.2), BF16])
    assert np.ptp(chances) < 1e-12 and 0.5 < chances[0] < 0.9


def test_a_refusal_tells_most_of_those_that_are_alike() -> None:
    before = Admissibility(SPACE, [], []).chances([BF16])[0]
    known = Admissibility(SPACE, [topk(0.001)], [math.inf])
    same, near, far, other = known.chances([topk(0.001), topk(0.003), topk(0.25), BF16])
    assert same < near < far < before and same < 0.05
    assert near < other < before


def test_praise_raises_the_chances_of_those_that_are_alike() -> None:
    before = Admissibility(SPACE, [], []).chances([BF16])[0]
    known = Admissibility(SPACE, [topk(0.01)], [0.0])
    near, other = known.chances([topk(0.012), BF16])
    assert near > other > before


def test_exact_knobs_change_no_loss() -> None:
    known = Admissibility(SPACE, [topk(0.01)], [5.0])
    here, there = known.chances([topk(0.01), topk(0.01, cycle=80.0)])
    assert here == there
