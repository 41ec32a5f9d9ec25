"""The learner without a model: points of a scrambled Sobol sequence."""

from __future__ import annotations

from collections.abc import Sequence

from hvd_autosync.learner.base import Suggestion
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.untried import excluded_keys, first_untried
from hvd_autosync.search_space import Strategy


class SobolLearner:
    """Proposes the points of the sequence in order, which cover the space evenly.

    Points of a tried or pending strategy are skipped. The sequence depends only on the seed, so
    pass the same seed at every call.
    """

    name = "sobol"

    def suggest(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        pending: Sequence[Strategy] = (),
        *,
        seed: int,
    ) -> Suggestion | None:
        """See :class:`hvd_autosync.learner.base.Learner`."""
        space = problem.space
        excluded = excluded_keys(space, observations, pending)
        strategy = first_untried(problem, excluded, lambda count: sobol_points(space, count, seed))
        return None if strategy is None else Suggestion(strategy, "sobol")
