from __future__ import annotations

import torch

from hvd_autosync.learner.features import Features
from hvd_autosync.learner.points import encode_all
from hvd_autosync.search_space import Condition, SearchSpace
from hvd_autosync.search_space.knobs import categorical_knob, float_knob, integer_knob


def test_numbers_come_first_and_fixed_knobs_are_left_out() -> None:
    space = SearchSpace(
        (
            categorical_knob("flag", (False, True), False, help=""),
            categorical_knob("one", ("only",), "only", help=""),
            float_knob("f", 0.0, 4.0, 1.0, help=""),
            float_knob("fixed", 3.0, 3.0, 3.0, help=""),
        )
    )
    features = Features.of(space)
    assert (features.numeric, features.choices, features.switches) == ((2,), (0,), ())
    inputs = features(encode_all(space, [{"flag": True, "f": 2.0}]))
    assert inputs.dtype == torch.float64
    assert inputs.tolist() == [[0.5, 1.0]]


def test_off_is_a_category_of_its_own(mixed_space: SearchSpace) -> None:
    features = Features.of(mixed_space)
    column = len(features.numeric) + features.choices.index(6)
    assert mixed_space.knobs[6].name == "group_fusion"
    strategies = [
        {"groups": 0},
        {"groups": 1, "group_fusion": True},
        {"groups": 1, "group_fusion": False},
    ]
    codes = features(encode_all(mixed_space, strategies))[:, column].tolist()
    assert len(set(codes)) == 3


def test_conditional_numbers_get_a_switch() -> None:
    space = SearchSpace(
        (
            integer_knob("groups", 0, 8, 0, help=""),
            float_knob("f", 0.0, 1.0, 0.5, help="", condition=Condition("groups", (1, 2, 3))),
        )
    )
    features = Features.of(space)
    assert features.switches == (1,)
    assert features.categorical_count == 1
    off, on = features(encode_all(space, [{"groups": 0}, {"groups": 1, "f": 0.5}]))
    assert off[1] == on[1] == 0.5  # the number stands at its default ...
    assert off[2] != on[2]  # ... and yet off is not on
