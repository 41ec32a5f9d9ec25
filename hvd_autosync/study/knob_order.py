"""In which order a strategy's knobs are shown: those that matter most come first.

Every line and table shows strategies by :meth:`SearchSpace.describe`; what it shows first is
decided here, so that what a narrow terminal cuts off is what does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hvd_autosync.learner.observation import Observation
from hvd_autosync.search_space import CategoricalKnob, Knob, SearchSpace, Strategy
from hvd_autosync.study.related_studies import observations_of
from hvd_autosync.traces import StudyRecord, TrialRecord

#: Entry of a finished study's outcome: the order, for faces that do not read its trials.
KNOB_ORDER = "knob_order"
#: What holds an effect back that few trials speak for, as a number of trials.
_RIDGE = 0.5
#: Share of a number's range by which it is clearly moved; many do all that they do at once.
_CLEARLY = 0.1


def with_knob_order(study: StudyRecord, trials: Sequence[TrialRecord] = ()) -> StudyRecord:
    """``study`` with a space that shows its knobs in order: as written down, else by ``trials``."""
    if study.space is None:
        return study
    written = (study.outcome or {}).get(KNOB_ORDER)
    if isinstance(written, list) and written and all(isinstance(name, str) for name in written):
        order = tuple(written)
    else:
        order = knobs_by_effect(study.space, observations_of(study.space, trials))
    return replace(study, space=replace(study.space, shown_first=order))


def knobs_by_effect(space: SearchSpace, observations: Sequence[Observation]) -> tuple[str, ...]:
    """Names of the knobs, largest estimated effect on the step time first.

    A linear model of the log step time against the default's: for each knob whether it was moved.
    It is a matter of a millisecond, and of the order alone; what ``knob_effects`` says of a winner
    comes from the learner. Without trials the order is the catalogue's.
    """
    names = tuple(knob.name for knob in space.knobs)
    seen = [(space.complete(o.strategy), o.log_step) for o in observations if o.measured]
    base = [log_step for strategy, log_step in seen if strategy == space.default]
    if not base or len(seen) == len(base):
        return names
    moved = np.array([[_moved(knob, strategy) for knob in space.knobs] for strategy, _ in seen])
    gained = np.array([log_step for _, log_step in seen]) - np.mean(base)
    effects = np.linalg.solve(moved.T @ moved + _RIDGE * np.eye(len(names)), moved.T @ gained)
    sizes = dict(zip(names, abs(effects), strict=True))
    return tuple(sorted(names, key=lambda name: -sizes[name]))


def _moved(knob: Knob, strategy: Strategy) -> float:
    """Whether a strategy's value of ``knob`` is not the default's, or how nearly, 0 to 1."""
    value = strategy.get(knob.name, knob.default)
    if isinstance(knob, CategoricalKnob):
        return float(value != knob.default)
    return min(abs(knob.to_unit(value) - knob.to_unit(knob.default)) / _CLEARLY, 1.0)
