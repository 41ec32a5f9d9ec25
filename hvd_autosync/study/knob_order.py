"""The order in which a strategy's knobs are shown: largest effect first.

Every line and table describes strategies by :meth:`SearchSpace.describe`. With this order a narrow
terminal cuts off the knobs with the smallest effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hvd_autosync.learner.observation import Observation
from hvd_autosync.search_space import CategoricalKnob, Knob, SearchSpace, Strategy
from hvd_autosync.study.related_studies import observations_of
from hvd_autosync.traces import StudyRecord, TrialRecord

#: Key of the order in a finished study's outcome, for readers that do not load its trials.
KNOB_ORDER = "knob_order"
#: Ridge penalty as a number of trials: it shrinks effects that few trials support.
_RIDGE = 0.5
#: Share of a numeric knob's range from which a change counts fully; many effects saturate early.
_CLEARLY = 0.1


def with_knob_order(study: StudyRecord, trials: Sequence[TrialRecord] = ()) -> StudyRecord:
    """Return ``study`` with its knobs in order: the stored order, else the one from ``trials``."""
    if study.space is None:
        return study
    written = (study.outcome or {}).get(KNOB_ORDER)
    if isinstance(written, list) and written and all(isinstance(name, str) for name in written):
        order = tuple(written)
    else:
        order = knobs_by_effect(study.space, observations_of(study.space, trials))
    return replace(study, space=replace(study.space, shown_first=order))


def knobs_by_effect(space: SearchSpace, observations: Sequence[Observation]) -> tuple[str, ...]:
    """Return the names of the knobs, largest estimated effect on the step time first.

    The estimate is a ridge regression of the log step time over the default's on indicators of
    changed knobs. It takes about a millisecond and serves the order only; the effects that
    ``knob_effects`` reports come from the learner. Without trials the order is that of the
    catalogue.
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
    """Return how far a strategy's value of ``knob`` is from the default's, from 0 to 1."""
    value = strategy.get(knob.name, knob.default)
    if isinstance(knob, CategoricalKnob):
        return float(value != knob.default)
    return min(abs(knob.to_unit(value) - knob.to_unit(knob.default)) / _CLEARLY, 1.0)
