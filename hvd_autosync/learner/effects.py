"""The effect of each knob of the winner on the step time, estimated from the trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_autosync.learner.gp import fit
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.surrogate import HALF_WIDTH_90
from hvd_autosync.search_space import Strategy, Value


@dataclass(frozen=True)
class KnobEffect:
    """The effect of one knob: step time with the winner's value / with the default's.

    Attributes:
        name: The knob.
        default: Its value in the default strategy.
        chosen: Its value in the winner.
        ratio: Factor on the step time (median); below 1 the choice helps.
        low: Lower end of the factor's 90 % interval.
        high: Upper end.
    """

    name: str
    default: Value
    chosen: Value
    ratio: float
    low: float
    high: float


def knob_effects(
    problem: Problem, observations: Sequence[Observation], winner: Strategy
) -> list[KnobEffect]:
    """Return the effect of each knob in which ``winner`` differs from the default, best first.

    The effect is the factor on the step time of changing this knob alone from the default's value
    to the winner's, with the other knobs at the winner's values. It includes the conditional knobs
    that the default's value switches off. Knobs interact, so the product of the factors need not be
    the total.

    Args:
        problem: The space, and what is known before the first trial.
        observations: The outcomes of all trials.
        winner: A strategy of the space.

    Raises:
        SpaceError: ``winner`` or an observed strategy does not lie in ``problem.space``.
    """
    space = problem.space
    winner = space.complete(winner)
    changed = [k for k in space.knobs if k.name in winner and winner[k.name] != k.default]
    without = [space.complete(winner.replacing(**{k.name: k.default})) for k in changed]
    mean, covariance = fit(problem, observations).joint([winner, *without])
    effects = []
    for row, knob in enumerate(changed, start=1):
        log_ratio = float(mean[0] - mean[row])
        variance = covariance[0, 0] + covariance[row, row] - 2 * covariance[0, row]
        margin = HALF_WIDTH_90 * math.sqrt(max(float(variance), 0.0))
        ratio, low, high = (math.exp(log_ratio + shift) for shift in (0.0, -margin, margin))
        effects.append(KnobEffect(knob.name, knob.default, winner[knob.name], ratio, low, high))
    return sorted(effects, key=lambda effect: effect.ratio)
