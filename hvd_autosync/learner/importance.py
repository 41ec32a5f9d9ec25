"""How much each knob matters over the whole space, as far as the trials can tell."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_autosync.learner.gp import fit
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import FloatArray, discretize, sobol_points
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import CategoricalKnob, Knob, SearchSpace

#: Strategies at which each knob is moved, and values that a number is moved through.
_PLACES, _VALUES = 96, 9


def knob_importance(problem: Problem, observations: Sequence[Observation]) -> dict[str, float]:
    """Share of the spread of the log step time that is left when all other knobs are known.

    The total effect of a knob (Homma and Saltelli 1996): the mean, over strategies, of the variance
    when it alone moves, over the variance of all. Shares of knobs that act together overlap, so
    they may add up to more than 1. It speaks of the model's mean, not of single trials.

    Args:
        problem: The space, and what is known of it.
        observations: All that was learned.

    Raises:
        SpaceError: An observed strategy does not lie in the space.

    Returns:
        Name of each knob -> its share, largest first; 0 for all where nothing makes a difference.
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
    """Each place with every choice of a knob, or with values all over its range; snapped."""
    if isinstance(knob, CategoricalKnob):
        values = [knob.to_unit(choice) for choice in knob.choices]
    else:
        # Middles of equal parts: with the ends the variance would be too large.
        values = [(part + 0.5) / _VALUES for part in range(_VALUES)]
    moved = np.repeat(places, len(values), axis=0)
    moved[:, index] = np.tile(values, len(places))
    return discretize(space, moved)
