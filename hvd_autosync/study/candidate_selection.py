"""Who comes to the end of a study: the tried strategies that are judged and confirmed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from hvd_autosync import learner as learning
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace, Strategy, TrialStatus
from hvd_autosync.study.confirm import LAUNCHES_DIFFER
from hvd_autosync.study.noninferiority import MOST_JUDGED
from hvd_autosync.study.quality import MOST_STEPS_FACTOR, Verdict
from hvd_autosync.traces import TrialRecord, default_result

if TYPE_CHECKING:
    from hvd_autosync.learner.quality_constraint import QualityConstraint

#: A second candidate is confirmed too when it is expected within this of the first.
_CLOSE_RACE = 0.03
_MOST_CONFIRMED = 2
#: Another one is judged only if that is expected to save this share of a step.
_WORTH_JUDGING = 0.01


def admissibility(space: SearchSpace, verdicts: Sequence[Verdict]) -> QualityConstraint:
    """What verdicts say of strategies that were not judged."""
    from hvd_autosync.learner.quality_constraint import QualityConstraint

    return QualityConstraint(space, [v.strategy for v in verdicts], [v.excess for v in verdicts])


def may_be_used(space: SearchSpace, strategy: Strategy, verdicts: Sequence[Verdict]) -> bool:
    """Whether ``strategy`` is exact, or trains what one trains that was judged as good."""
    part = space.lossy_part(strategy)
    return space.is_exact(strategy) or any(
        verdict.admissible and space.lossy_part(verdict.strategy) == part for verdict in verdicts
    )


def pruned(space: SearchSpace, trials: Sequence[TrialRecord]) -> set[Strategy]:
    """Strategies that were never measured but clearly slower than the default.

    By more than launches differ, or in a trial cut short. Whatever a model makes of their
    neighbours and of related tasks.
    """
    default = default_result(trials)
    default_s = default.step_time.mean_s if default and default.step_time else math.inf
    slow: set[Strategy] = set()
    others: set[Strategy] = set()
    for trial in trials:
        if trial.result is not None and trial.result.step_time is not None:
            cut = trial.result.status is TrialStatus.CUT_SHORT
            limit_s = default_s * (1.0 if cut else LAUNCHES_DIFFER)
            refutes = trial.result.step_time.mean_s > limit_s
            (slow if refutes else others).add(space.complete(trial.strategy))
    return slow - others


class CandidateSelection:
    """Chooses among the strategies that were tried.

    Args:
        problem: What the learner works on.
        observations: What was learned so far.
        refuted: Strategies that :func:`pruned` names.
    """

    def __init__(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        pruned: Collection[Strategy] = (),
    ) -> None:
        self._refuted = pruned
        self._problem = problem
        self._observations = observations
        self._space = problem.space

    def top_candidates(self) -> list[Strategy]:
        """The strategies worth confirming, best first; none when all are surely slower.

        Lossy ones down to the best exact one: they may be refused.
        """
        worth = learning.worth_confirming(
            self._problem,
            self._observations,
            self._space.default,
            len(self._observations),
            self._surrogate,
        )
        worth = [strategy for strategy in worth if strategy not in self._refuted]
        exact = [strategy for strategy in worth if self._space.is_exact(strategy)]
        lossy = itertools.takewhile(lambda strategy: not self._space.is_exact(strategy), worth)
        return [*lossy, *exact[:_MOST_CONFIRMED]]

    def to_judge(
        self,
        top_candidates: Sequence[Strategy],
        untried: Sequence[Strategy],
        verdicts: Sequence[Verdict],
    ) -> Strategy | None:
        """The lossy strategy that is judged next: what it saves, times the chance that it may.

        Args:
            leaders: What :meth:`top_candidates` returned.
            untried: The lossy ones of them that were not judged.
            verdicts: Of those that were.

        Returns:
            ``None`` where no further one is worth its trial.
        """
        import numpy as np

        if len(verdicts) >= MOST_JUDGED:
            return None
        feasible = [each for each in top_candidates if may_be_used(self._space, each, verdicts)]
        best = min(self._log_step([self._space.default, *feasible]))
        saved = np.maximum(best - np.array(self._log_step(untried)), 0.0)
        worth = saved * admissibility(self._space, verdicts).feasibility_probabilities(untried)
        most = int(np.argmax(worth))
        return untried[most] if worth[most] > _WORTH_JUDGING else None

    def candidates(
        self, top_candidates: Sequence[Strategy], verdicts: Sequence[Verdict]
    ) -> list[Strategy]:
        """Those of ``top_candidates`` that may be used and are about as fast as the fastest.

        Args:
            leaders: What :meth:`top_candidates` returned.
            verdicts: Of the lossy ones; who has none is not used.
        """
        allowed = [each for each in top_candidates if may_be_used(self._space, each, verdicts)]
        log_step = self._log_step(allowed)
        close = min(log_step, default=0.0) + math.log1p(_CLOSE_RACE)
        near = [each for each, y in zip(allowed, log_step, strict=True) if y <= close]
        return near[:_MOST_CONFIRMED]

    def saving(self, strategy: Strategy) -> float:
        """Share of the default's step that ``strategy`` is expected to save, if it is faster."""
        (saving,) = learning.expected_savings(self._surrogate, [strategy], self._space.default)
        return saving

    def steps_in_time(self, strategy: Strategy, steps: int) -> int:
        """Steps under ``strategy`` in the time of ``steps`` of the default, at least as many."""
        default, own = self._log_step([self._space.default, strategy])
        return math.ceil(steps * min(max(math.exp(default - own), 1.0), MOST_STEPS_FACTOR))

    @cached_property
    def _surrogate(self) -> learning.Surrogate:
        return learning.fit(self._problem, self._observations)

    def _log_step(self, strategies: Sequence[Strategy]) -> list[float]:
        log_step, _ = self._surrogate.predict(strategies)
        return [float(y) for y in log_step]
