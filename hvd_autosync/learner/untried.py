"""Strategies that are left to try: those neither tried, failed nor pending."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import (
    BoolArray,
    FloatArray,
    can_vary,
    distinct,
    encode_all,
    every_point,
    keys,
)
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace, Strategy

#: Points to draw in search of an untried one: at the first attempt, and at the second.
_DRAWS = (64, 4096)


def excluded_keys(
    space: SearchSpace, observations: Sequence[Observation], pending: Sequence[Strategy]
) -> set[bytes]:
    """Return the keys of the points that may not be suggested again.

    Raises:
        SpaceError: A strategy does not lie in ``space``.
    """
    return set(keys(encode_all(space, [*(seen.strategy for seen in observations), *pending])))


def space_exhausted(space: SearchSpace, excluded: set[bytes]) -> bool:
    """Return whether no knob can vary, or every strategy of an enumerable space is excluded."""
    if not any(can_vary(knob) for knob in space.knobs):
        return True
    everything = every_point(space)
    return everything is not None and len(distinct(everything, excluded)) == 0


def usable(problem: Problem, points: FloatArray) -> BoolArray:
    """Return which of ``points``, ``n x d``, may satisfy the quality constraint, ``(n,)``."""
    if problem.feasible is None:
        return np.ones(len(points), dtype=np.bool_)
    return problem.feasible(points) > 0.0


def preferred(mask: BoolArray) -> BoolArray:
    """Return ``mask``; if it selects nothing, one that selects everything."""
    return mask if mask.any() else ~mask


def first_untried(
    problem: Problem, excluded: set[bytes], draw: Callable[[int], FloatArray]
) -> Strategy | None:
    """Return the first drawn point that is not excluded, as a strategy.

    A point that can never be used is returned only if no other was found.

    Args:
        problem: The space, and what may be used of it.
        excluded: Keys of points that may not be suggested.
        draw: From ``count`` to so many discretized points, shape ``count x d``.

    Returns:
        The strategy; ``None`` if the space is exhausted, or no draw found what is left.
    """
    space = problem.space
    if space_exhausted(space, excluded):
        return None
    left = np.empty((0, space.dimension))
    for count in _DRAWS:
        left = distinct(draw(count), excluded)
        found = left[usable(problem, left)]
        if len(found):
            return space.decode(found[0])
    everything = every_point(space)
    if everything is not None:
        left = distinct(everything, excluded)
    return space.decode(left[preferred(usable(problem, left))][0]) if len(left) else None
