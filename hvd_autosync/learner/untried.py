"""What is left to try: never a strategy that was tried, failed or is pending."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import (
    FloatArray,
    can_vary,
    distinct,
    encode_all,
    every_point,
    keys,
)
from hvd_autosync.search_space import SearchSpace, Strategy

#: How many points are drawn in search of an untried one, first and then.
_DRAWS = (64, 4096)


def excluded_keys(
    space: SearchSpace, observations: Sequence[Observation], pending: Sequence[Strategy]
) -> set[bytes]:
    """Keys of the points that may not be suggested again.

    Raises:
        SpaceError: A strategy does not lie in ``space``.
    """
    return set(keys(encode_all(space, [*(seen.strategy for seen in observations), *pending])))


def space_exhausted(space: SearchSpace, taken: set[bytes]) -> bool:
    """Whether no knob is free, or every strategy of a small space is taken."""
    if not any(can_vary(knob) for knob in space.knobs):
        return True
    everything = every_point(space)
    return everything is not None and len(distinct(everything, taken)) == 0


def first_untried(
    space: SearchSpace, taken: set[bytes], draw: Callable[[int], FloatArray]
) -> Strategy | None:
    """The first of the drawn points that is not taken, as a strategy.

    Args:
        space: The space.
        taken: Keys of points that may not be suggested.
        draw: Gives that many snapped points, shape ``count x d``.

    Returns:
        The strategy; ``None`` when nothing is left, or so little that it was not found.
    """
    if space_exhausted(space, taken):
        return None
    for count in _DRAWS:
        left = distinct(draw(count), taken)
        if len(left):
            return space.decode(left[0])
    everything = every_point(space)
    return None if everything is None else space.decode(distinct(everything, taken)[0])
