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
    """The sequence's points in order: even coverage of the space from the first few on.

    Points that snap to a tried or pending strategy are skipped. The sequence follows from the
    seed alone, so pass the same seed at every call.
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
        taken = excluded_keys(space, observations, pending)
        strategy = first_untried(space, taken, lambda count: sobol_points(space, count, seed))
        return None if strategy is None else Suggestion(strategy, "sobol")
