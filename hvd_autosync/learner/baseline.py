"""Random search, the baseline of all learners."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvd_autosync.learner.base import Suggestion
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import spread
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.untried import excluded_keys, first_untried
from hvd_autosync.search_space import Strategy


class RandomLearner:
    """Proposes independent uniform points of the unit cube; all choices are equally likely."""

    name = "random"

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
        rng = np.random.default_rng([seed, len(observations), len(pending)])
        excluded = excluded_keys(space, observations, pending)
        strategy = first_untried(
            problem, excluded, lambda count: spread(space, rng.random((count, space.dimension)))
        )
        return None if strategy is None else Suggestion(strategy, "random")
