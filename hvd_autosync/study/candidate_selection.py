"""Candidate selection: which of the tried strategies are judged and confirmed."""

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
from hvd_autosync.study.noninferiority import MOST_JUDGED, Outcome
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import TrialRecord, default_result

if TYPE_CHECKING:
    from hvd_autosync.learner.quality_constraint import QualityConstraint

#: A second candidate is confirmed, too, if its predicted step time is within this of the first's.
_CLOSE_RACE = 0.03
_MOST_CONFIRMED = 2
#: Least share of a step that another strategy saves, times its probability, for which it is judged.
_WORTH_JUDGING = 0.01
#: With the goal time-to-loss a candidate trains for the time of the default, but at most for so
#: many times its steps.
_MOST_STEPS = 3.0
#: It is asked for so many times the steps that are predicted to fit into that time, because it may
#: be faster than predicted; only those that fit are judged.
_SPARE_STEPS = 1.1


def quality_constraint(
    space: SearchSpace,
    verdicts: Sequence[Verdict],
    *,
    excluded: Collection[Strategy] = (),
    closed: bool = False,
    goal: str = "steps",
) -> QualityConstraint:
    """Return the quality constraint that is conditioned on ``verdicts``.

    Args:
        space: The space.
        verdicts: The verdicts so far.
        excluded: Strategies that the loss guard has ended.
        closed: Whether no further strategy is judged, so that only admitted ones may be used.
        goal: The goal of the study.
    """
    from hvd_autosync.learner.quality_constraint import QualityConstraint

    # A training that failed or ended by itself says nothing about other strategies.
    shown = [v for v in verdicts if v.outcome is Outcome.WORSE or math.isfinite(v.loss)]
    nothing = [v.strategy for v in verdicts if v not in shown]
    return QualityConstraint(
        space,
        [verdict.strategy for verdict in shown],
        [verdict.violation for verdict in shown],
        refused=[*excluded, *nothing],
        closed=closed,
        shared=goal == "steps",
    )


def judged_part(space: SearchSpace, strategy: Strategy, goal: str) -> Strategy:
    """Return the part of ``strategy`` that its verdict depends on.

    At equal time it is all of it: the exact knobs decide how many steps it trains for.
    """
    return space.lossy_part(strategy) if goal == "steps" else space.complete(strategy)


def may_be_used(
    space: SearchSpace, strategy: Strategy, verdicts: Sequence[Verdict], goal: str = "steps"
) -> bool:
    """Return whether ``strategy`` is exact, or was admitted by itself or by one judged as it is."""
    part = judged_part(space, strategy, goal)
    return space.is_exact(strategy) or any(
        verdict.admissible and judged_part(space, verdict.strategy, goal) == part
        for verdict in verdicts
    )


def pruned(space: SearchSpace, trials: Sequence[TrialRecord]) -> set[Strategy]:
    """Return the strategies that were clearly slower than the default in all of their trials.

    That is, by more than launches differ, or in a trial that was cut short. They stay pruned
    whatever the model predicts from their neighbours and from related tasks.
    """
    default = default_result(trials)
    default_s = default.step_time.mean_s if default and default.step_time else math.inf
    slow: set[Strategy] = set()
    others: set[Strategy] = set()
    for trial in trials:
        if trial.result is not None and trial.result.step_time is not None:
            cut = trial.result.status is TrialStatus.CUT_SHORT
            limit_s = default_s * (1.0 if cut else LAUNCHES_DIFFER)
            slower = trial.result.step_time.mean_s > limit_s
            (slow if slower else others).add(space.complete(trial.strategy))
    return slow - others


class CandidateSelection:
    """Chooses among the strategies that were tried.

    Args:
        problem: The input of the learner.
        observations: The outcomes of the trials so far.
        excluded: Strategies that are never chosen: those that the loss guard has ended, and those
            of :func:`pruned`.
        goal: The goal of the study.
    """

    def __init__(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        excluded: Collection[Strategy] = (),
        goal: str = "steps",
    ) -> None:
        self._excluded = excluded
        self._goal = goal
        self._problem = problem
        self._observations = observations
        self._space = problem.space

    def top_candidates(self) -> list[Strategy]:
        """Return the strategies worth confirming, best first; none if all are very likely slower.

        They are the lossy ones that are faster than the best exact one, and the best exact ones:
        each lossy one may be refused.
        """
        worth = learning.worth_confirming(
            self._problem,
            self._observations,
            self._space.default,
            len(self._observations),
            self._surrogate,
        )
        worth = [strategy for strategy in worth if strategy not in self._excluded]
        exact = [strategy for strategy in worth if self._space.is_exact(strategy)]
        lossy = itertools.takewhile(lambda strategy: not self._space.is_exact(strategy), worth)
        return [*lossy, *exact[:_MOST_CONFIRMED]]

    def to_judge(
        self,
        top_candidates: Sequence[Strategy],
        untried: Sequence[Strategy],
        verdicts: Sequence[Verdict],
        least: float = 0.0,
    ) -> Strategy | None:
        """Return the lossy strategy to judge next.

        It has the largest product of the share of a step that it saves, against the best usable
        strategy so far, and its feasibility probability.

        Args:
            top_candidates: The result of :meth:`top_candidates`.
            untried: The lossy ones among them that were not judged.
            verdicts: The verdicts on the others.
            least: Least product that pays for the trials.

        Returns:
            ``None`` if no further one is worth its trials.
        """
        import numpy as np

        if len(verdicts) >= MOST_JUDGED:
            return None
        feasible = self._usable(top_candidates, verdicts)
        best = min(self._log_step([self._space.default, *feasible]))
        saved = -np.expm1(-np.maximum(best - np.array(self._log_step(untried)), 0.0))
        constraint = quality_constraint(self._space, verdicts, goal=self._goal)
        worth = saved * constraint.feasibility_probabilities(untried)
        most = int(np.argmax(worth))
        return untried[most] if worth[most] > max(least, _WORTH_JUDGING) else None

    def candidates(
        self, top_candidates: Sequence[Strategy], verdicts: Sequence[Verdict]
    ) -> list[Strategy]:
        """Return those of ``top_candidates`` that may be used and are about as fast as the best.

        Args:
            top_candidates: The result of :meth:`top_candidates`.
            verdicts: Verdicts on the lossy ones; one without a verdict is not used.
        """
        allowed = self._usable(top_candidates, verdicts)
        log_step = self._log_step(allowed)
        close = min(log_step, default=0.0) + math.log1p(_CLOSE_RACE)
        near = [each for each, y in zip(allowed, log_step, strict=True) if y <= close]
        return near[:_MOST_CONFIRMED]

    def _usable(
        self, strategies: Sequence[Strategy], verdicts: Sequence[Verdict]
    ) -> list[Strategy]:
        return [s for s in strategies if may_be_used(self._space, s, verdicts, self._goal)]

    def saving(self, strategy: Strategy) -> float:
        """Return the share of the default's step that ``strategy`` is expected to save."""
        (saving,) = learning.expected_savings(self._surrogate, [strategy], self._space.default)
        return saving

    def steps_in_time(self, strategy: Strategy, steps: int) -> int:
        """Return the steps of ``strategy`` to run for the time of ``steps`` of the default.

        They are not fewer, and some more than predicted.
        """
        default, own = self._log_step([self._space.default, strategy])
        factor = _SPARE_STEPS * math.exp(default - own)
        return math.ceil(steps * min(max(factor, 1.0), _MOST_STEPS))

    @cached_property
    def _surrogate(self) -> learning.Surrogate:
        return learning.fit(self._problem, self._observations)

    def _log_step(self, strategies: Sequence[Strategy]) -> list[float]:
        log_step, _ = self._surrogate.predict(strategies)
        return [float(y) for y in log_step]
