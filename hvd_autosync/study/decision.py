"""The next action of a study, as a function of its settings and of the trials so far.

Nothing here writes, launches or keeps state, so the same trials give the same trial request after a
crash and in a replay of the trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.learner.base import Learner, Suggestion
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace, Strategy, TrialStatus
from hvd_autosync.study.budget import FEWEST_TRIALS, Budget
from hvd_autosync.study.candidate_selection import (
    CandidateSelection,
    judged_part,
    pruned,
    quality_constraint,
)
from hvd_autosync.study.confirm import Confirmation, Measurement
from hvd_autosync.study.damaged import named_if_damaged
from hvd_autosync.study.fallbacks import is_excluded
from hvd_autosync.study.noninferiority import MOST_JUDGED, Outcome
from hvd_autosync.study.quality import QualityCheck
from hvd_autosync.study.quality_trial import QualityTrial, enough_steps
from hvd_autosync.study.related_studies import RELATED, is_unknown, observations_of
from hvd_autosync.study.resumed import at_one_speed
from hvd_autosync.study.stage_budget import explored, turn_to_explore
from hvd_autosync.study.trial_steps import comparable_steps
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import TrialRecord, default_result
from hvd_autosync.util.amounts import amount

#: Exploring stops if the next trial is expected to save less than this share of a step.
SMALL_GAIN = 0.01
#: Kinds of trials that no learner asks for.
_OWN_KINDS = ("default", "quality", "confirm")


@dataclass(frozen=True)
class TrialRequest:
    """The next trial to run.

    Attributes:
        strategy: The strategy of the trial.
        kind: Its purpose (``TrialRecord.kind``).
        info: The learner's explanation, plain JSON.
        steps: Steps to measure; ``None``: those of the settings.
        seed: Seed of all its random numbers; 0: the script's own.
    """

    strategy: Strategy
    kind: str
    info: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    seed: int = 0


class Decision:
    """The decision after some trials.

    Args:
        problem: The input of the learner.
        settings: The settings of the study.
        learner: The learner that proposes strategies.
        trials: The finished trials, and those that still run.
    """

    def __init__(
        self,
        problem: Problem,
        settings: StudySettings,
        learner: Learner,
        trials: Sequence[TrialRecord],
    ) -> None:
        # Of the trials that are decided on: those of a resumed study may know another default.
        steps = sum(settings.steps_after(default_result(trials)))
        self._problem, self._space = replace(problem, steps=steps), problem.space
        self._settings = settings
        self._learner = learner
        self._trials = at_one_speed(trials)
        self._budget = Budget(settings, trials)

    def next(self) -> TrialRequest | Conclusion:
        """Return the next trial, or the conclusion of the study.

        Raises:
            TraceFormatError: Trials are damaged, so that nothing can be decided.
        """
        with named_if_damaged(self._trials):
            return self._next()

    def _next(self) -> TrialRequest | Conclusion:
        default = self._space.default
        if not self._space.holds_job and all(t.strategy != default for t in self._trials):
            return TrialRequest(default, "default")
        confirming = [t for t in self._trials if t.kind == "confirm"]
        if confirming:
            stopped, candidates, unjudged = _confirmation_plan(confirming[0])
            verdicts = self._check(unjudged).verdicts()
        else:
            wanted, stopped, top_candidates = self._before_confirming()
            if wanted is not None:
                return wanted
            verdicts = self._check(top_candidates).verdicts()
            candidates = self._selection.candidates(top_candidates, verdicts)
            if self._why_not_begin(candidates):
                candidates = candidates[:1]
        measured = self._measurements(confirming)
        confirmation = Confirmation(default, candidates, measured)
        next_one, steps = confirmation.next(), self._confirming_steps(candidates)
        if confirming:
            too_long = self._budget.why_not_go_on(*confirmation.next_round(), steps)
        else:
            too_long = self._why_not_begin(candidates)
        if next_one is None or too_long:
            why = too_long if next_one is not None else ""
            return self._concluded(confirmation, stopped, verdicts, why)
        plan: dict[str, Any] = {"stopped": stopped, "candidates": [dict(c) for c in candidates]}
        if without := [dict(verdict.strategy) for verdict in verdicts if not verdict.pairs]:
            plan["unjudged"] = without  # so that the conclusion says why
        return TrialRequest(next_one, "confirm", plan, steps)

    def _confirming_steps(self, candidates: Sequence[Strategy]) -> int | None:
        """Return how many steps of each contender are measured; ``None``: as of other trials."""
        _, usual = self._settings.steps_after(default_result(self._trials))
        return comparable_steps((self._space.default, *candidates), usual)

    def proven(self) -> Strategy | None:
        """Return the best strategy that was confirmed so far, if any.

        Raises:
            TraceFormatError: As of :meth:`next`.
        """
        confirming = [t for t in self._trials if t.kind == "confirm"]
        if not confirming:
            return None
        _, candidates, _ = _confirmation_plan(confirming[0])
        measured = self._measurements(confirming)
        with named_if_damaged(self._trials):
            found = Confirmation(self._space.default, candidates, measured).comparisons()
        sure = (c.strategy for c in found if c.proven)
        return next(sure, None)

    def verdicts(self) -> list[Verdict]:
        """Return the verdicts on the strategies that were judged so far.

        Raises:
            TraceFormatError: As of :meth:`next`.
        """
        with named_if_damaged(self._trials):
            return self._check(()).verdicts()

    def _why_not_begin(self, candidates: Sequence[Strategy]) -> str:
        """Return why the confirmation does not start; empty if it does."""
        if not candidates:
            return ""
        saving = self._selection.saving(candidates[0])
        steps = self._confirming_steps(candidates)
        return self._budget.why_not_confirm(len(candidates) + 1, saving, steps)

    def _before_confirming(self) -> tuple[TrialRequest | None, str, list[Strategy]]:
        """Return the next exploring or quality trial, why exploring stopped, and top candidates.

        The trial is ``None`` if there is none; the other two are valid only then.
        """
        stopped = ""
        check = self._check(())
        wanted = check.next() if check.under_way is not None else None
        if wanted is not None:  # finish the pairs of one candidate before anything else
            return self._judging(*wanted, check.steps), "", []
        first = turn_to_explore(self._space, self._trials, self._settings.trials)
        for exploring in (first, not first):
            if exploring:
                suggestion, stopped = self._explore()
                if suggestion is not None:
                    info = suggestion.info
                    return TrialRequest(suggestion.strategy, suggestion.kind, info), "", []
                continue
            check = self._check(self._selection.top_candidates())
            wanted = check.next()
            if wanted is not None:
                return self._judging(*wanted, check.steps), "", []
        return None, stopped, self._selection.top_candidates()

    def _judging(self, strategy: Strategy, seed: int, steps: int) -> TrialRequest:
        """Return a quality trial with so many steps of the default."""
        info = {"seed": seed}
        if steps != self._settings.quality_steps:
            info["steps"] = steps
        if self._settings.goal == "time-to-loss" and strategy != self._space.default:
            steps = self._selection.steps_in_time(strategy, steps)
        return TrialRequest(strategy, "quality", info, steps, seed)

    def _measurements(self, confirming: Sequence[TrialRecord]) -> list[Measurement]:
        """Return what was measured; a trial that ran out of time too early has not failed."""
        found = []
        for trial in confirming:
            time_s = trial.step_time
            if time_s is not None or not self._ran_out(trial):
                strategy = self._space.complete(trial.strategy)
                found.append(Measurement(strategy, time_s, running=trial.result is None))
        return found

    def _ran_out(self, trial: TrialRecord) -> bool:
        """Return whether a quality or confirming trial was ended with the minutes of its kind."""
        cut = trial.result is not None and trial.result.status is TrialStatus.CUT_SHORT
        return cut and self._budget.left_for(trial.kind) < self._budget.trial_s

    def _explore(self) -> tuple[Suggestion | None, str]:
        """Return the next suggestion, or ``None`` with the reason to stop exploring."""
        exhausted = self._exhausted()
        if exhausted:
            return None, exhausted
        problem = self._problem
        if self._space.has_lossy:
            check = self._check(())
            verdicts = check.verdicts()
            constraint = quality_constraint(
                self._space,
                verdicts,
                excluded=self._settings.excluded,
                closed=check.closed or len(verdicts) >= MOST_JUDGED,
                goal=self._settings.goal,
            )
            problem = replace(problem, feasible=constraint.at)
        unknown = [trial.strategy for trial in self._trials if is_unknown(trial)]
        suggestion = self._learner.suggest(
            problem, observations_of(self._space, self._trials), unknown, seed=self._settings.seed
        )
        if suggestion is None:
            return None, "every strategy of the space was tried"
        _check_suggestion(suggestion, self._space)
        info = {**suggestion.info, RELATED: [[s.study_id, s.similarity] for s in problem.sources]}
        if suggestion.kind != "model":
            return replace(suggestion, info=info), ""
        enough = self._enough(float(info.get("expected_gain", math.inf)))
        return (None, enough) if enough else (replace(suggestion, info=info), "")

    def _enough(self, gain: float) -> str:
        """Return why a trial with this expected gain is not worth its cost; empty if it is."""
        if len(explored(self._trials)) < FEWEST_TRIALS:
            return ""
        if gain < SMALL_GAIN:
            return f"another trial is expected to gain {gain:.1%}, less than {SMALL_GAIN:.0%}"
        cost_s, saved_s = self._budget.cost_s, gain * self._budget.training_s
        if saved_s < cost_s:
            return (
                f"another trial costs {cost_s:.0f} s and is expected to save {saved_s:.0f} s of "
                f"{amount(self._settings.expected_hours, 'hour')} of training"
            )
        return ""

    def _exhausted(self) -> str:
        """Return why exploring cannot continue; empty if it can."""
        settings = self._settings
        if self._space.dimension == 0:
            return "no knob can matter for this job"
        if len(explored(self._trials)) >= settings.trials:
            alone = settings.trials == 1
            return "the only trial was used" if alone else f"all {settings.trials} trials were used"
        return self._budget.why_not_explore()

    @cached_property
    def _selection(self) -> CandidateSelection:
        observations = observations_of(self._space, self._trials)
        excluded = {
            seen.strategy
            for seen in observations
            if is_excluded(seen.strategy, self._settings.excluded, self._space)
        }
        excluded |= pruned(self._space, self._trials)
        return CandidateSelection(self._problem, observations, excluded, self._settings.goal)

    def _check(self, top_candidates: Sequence[Strategy]) -> QualityCheck:
        """Return the quality check, with one strategy of those that share a verdict."""
        first: dict[Strategy, Strategy] = {}
        goal = self._settings.goal

        def judged_as(strategy: Strategy) -> Strategy:
            if self._space.is_exact(strategy):
                return strategy
            return first.setdefault(judged_part(self._space, strategy, goal), strategy)

        tried = [
            QualityTrial.of(
                judged_as(self._space.complete(trial.strategy)),
                int(trial.info["seed"]),
                int(trial.info.get("steps", self._settings.quality_steps)),
                trial.result,
            )
            for trial in self._trials
            if trial.kind == "quality" and not self._ran_out(trial)
        ]
        base = self._settings.quality_steps
        steps = enough_steps(self._space.default, tried, base, spent=False)
        for strategy in top_candidates:
            judged_as(strategy)
        check = partial(
            QualityCheck,
            self._space.default,
            list(first.values()),
            tried,
            steps=self._settings.quality_steps,
            tolerance=self._settings.loss_tolerance,
            goal=goal,
        )
        trials = check(choose=lambda untried, verdicts: None).trials_to_look
        least = self._budget.least_saving(steps, trials)
        return check(
            choose=lambda untried, verdicts: self._selection.to_judge(
                top_candidates, untried, verdicts, least
            ),
            spent=self._budget.why_not_judge(steps, trials),
        )

    def _concluded(
        self, confirmation: Confirmation, stopped: str, verdicts: Sequence[Verdict], why: str
    ) -> Conclusion:
        """Return the conclusion of the study.

        Args:
            confirmation: The confirmation, with or without trials.
            stopped: Why exploring ended.
            verdicts: Verdicts on lossy strategies.
            why: Why the confirmation ended before it was complete; else empty.
        """
        comparisons = confirmation.comparisons()
        best = comparisons[0] if comparisons else None
        winner = self._space.default
        if best is not None and best.proven:
            winner, reason = best.strategy, "it was faster than the default when measured again"
        elif why:
            reason = why
        elif best is not None:
            reason = "no candidate was faster with confidence when measured again"
        elif any(t.kind == "confirm" for t in self._trials):
            reason = "the default or every candidate failed when measured again"
        elif refused := [each for each in verdicts if not each.admissible]:
            found = [each for each in refused if each.pairs or each.outcome is Outcome.WORSE]
            what = "refused for their losses" if found else f"not judged ({refused[0].reason})"
            reason = f"lossy strategies were {what}, and no other is fast enough"
        else:
            reason = "no strategy that may be used promises to beat the default by much"
        default_s = confirmation.default_s()
        if best is None:  # there is only its first trial
            default = default_result(self._trials)
            first = default.step_time if default else None
            default_s = first.mean_s if first else math.nan
        return Conclusion(winner, reason, stopped, default_s, tuple(comparisons), tuple(verdicts))


def _check_suggestion(suggestion: Suggestion, space: SearchSpace) -> None:
    """Check what a learner suggests before it is stored, where it would stay.

    Raises:
        SpaceError: The strategy does not lie in the space.
        ConfigurationError: The kind is one of the study's own.
    """
    space.complete(suggestion.strategy)
    if suggestion.kind in _OWN_KINDS:
        raise ConfigurationError(
            f"the learner has suggested a trial of kind {suggestion.kind!r}, which is the study's",
            hint="Give its suggestions another kind.",
        )


def _confirmation_plan(trial: TrialRecord) -> tuple[str, list[Strategy], list[Strategy]]:
    """Return why exploring stopped, the candidates, and what was not judged."""
    candidates, unjudged = (
        [Strategy(each) for each in trial.info.get(name, ())] for name in ("candidates", "unjudged")
    )
    return str(trial.info["stopped"]), candidates, unjudged
