"""The importance of each knob over the whole space, estimated from the trials."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_autosync.learner.gp import fit
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray, discretize, sobol_points
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import CategoricalKnob, Knob, SearchSpace

#: Number of strategies at which each knob is varied, and of values for a numeric knob.
_PLACES, _VALUES = 96, 9


def knob_importance(problem: Problem, observations: Sequence[Observation]) -> dict[str, float]:
    """Return each knob's share of the variance of the log step time, by its total effect.

    The total effect of a knob (Homma and Saltelli 1996) is the mean, over strategies, of the
    variance when this knob alone varies, divided by the variance over all strategies. Effects of
    knobs that interact overlap, so shares may add up to more than 1. The variance is that of the
    model's mean, not of single trials.

    Args:
        problem: The space, and what is known before the first trial.
        observations: The outcomes of all trials.

    Raises:
        SpaceError: An observed strategy does not lie in the space.

    Returns:
        Name of each knob -> its share, largest first; 0 for all if the variance is 0.
    """
    space = problem.space
    places = sobol_points(space, _PLACES, 0)
    moved = [_moved(space, places, index, knob) for index, knob in enumerate(space.knobs)]
    model = fit(problem, observations)
    log_step = model.mean_at(np.concatenate([places, *moved]))
    total = float(log_step[: len(places)].var())
    shares, begin = {}, len(places)
    for knob, points in zip(space.knobs, moved, strict=True):
        own = log_step[begin : begin + len(points)].reshape(len(places), -1)
        begin += len(points)
        shares[knob.name] = float(own.var(axis=1).mean()) / total if total > 0 else 0.0
    return dict(sorted(shares.items(), key=lambda entry: -entry[1]))


def _moved(space: SearchSpace, places: FloatArray, index: int, knob: Knob) -> FloatArray:
    """Return each place with every choice of a knob, or with values over its range; discretized."""
    if isinstance(knob, CategoricalKnob):
        values = [knob.to_unit(choice) for choice in knob.choices]
    else:
        # Midpoints of equal parts: including the ends would overestimate the variance.
        values = [(part + 0.5) / _VALUES for part in range(_VALUES)]
    moved = np.repeat(places, len(values), axis=0)
    moved[:, index] = np.tile(values, len(places))
    return discretize(space, moved)
