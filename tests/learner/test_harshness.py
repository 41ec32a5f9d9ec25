"""What lossy knobs are expected to add to the loss before anything is judged."""

from __future__ import annotations

import pytest

from hvd_autosync.learner.harshness import _CHOICES, _NUMBERS, harshness
from hvd_autosync.learner.points import encode_all
from hvd_autosync.learner.quality_constraint import QualityConstraint
from hvd_autosync.search_space import SearchSpace, catalogue_knob
from hvd_autosync.search_space.catalogue import FAMILIES
from hvd_autosync.search_space.knob_spec import nowhere
from hvd_autosync.search_space.knobs import CategoricalKnob, Knob

#: The lossy knobs that are tuned, so that a study may judge them.
JUDGED = [
    spec.knob
    for family in FAMILIES
    for spec in family.specs
    if not spec.knob.exact and spec.applies is not nowhere
]


@pytest.mark.parametrize("knob", JUDGED, ids=lambda knob: knob.name)
def test_each_choice_of_each_judged_knob_has_a_value(knob: Knob) -> None:
    if isinstance(knob, CategoricalKnob):
        assert {str(choice) for choice in knob.choices} <= _CHOICES.keys()
    else:
        assert {knob.name, knob.name.rpartition("_")[2]} & _NUMBERS.keys()


def test_priority_order_is_not_expected_to_harm() -> None:
    """It makes the steps of the default, each parameter's at its next use."""
    space = SearchSpace((catalogue_knob("order"), catalogue_knob("rest_codec")))
    priority = space.complete({"order": "priority"})
    coded = space.complete({"rest_codec": "fp16"})
    assert harshness(space, encode_all(space, [priority])).tolist() == [0.0]
    likely = QualityConstraint(space, [], []).feasibility_probabilities([priority, coded])
    assert likely[0] >= likely[1] > 0.95
