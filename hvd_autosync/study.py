"""The loop: ask, run, tell, and in the end confirm.

A study owns no model and no process. It decides what to try next and when to stop, from its
settings and the trials in its store alone: a study that is read back after a crash goes on as if
nothing had happened. :func:`hvd_autosync.tuning.tune` drives it with real launches; with an own
launcher, drive it yourself::

    study = Study.create(space)
    while (trial := study.ask()) is not None:
        study.tell(trial, run_my_job(trial.strategy))
    print(study.conclusion)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hvd_autosync import learner as learning
from hvd_autosync.confirm import Comparison, Confirmation, Measurement
from hvd_autosync.errors import StudyError
from hvd_autosync.finalists import Finalists, admissibility
from hvd_autosync.learner.base import Learner, Suggestion
from hvd_autosync.learner.problem import Problem
from hvd_autosync.quality import QualityCheck, QualityTrial, Verdict, losses_of
from hvd_autosync.relatives import load_sources, observations_of, related_studies
from hvd_autosync.search_space import (
    RankReport,
    SearchSpace,
    Strategy,
    Task,
    TrialResult,
    TrialStatus,
)
from hvd_autosync.study_values import Conclusion, StudySettings, Trial
from hvd_autosync.traces import (
    StudyRecord,
    StudyStatus,
    TraceStore,
    TrialRecord,
    default_result,
)
from hvd_autosync.turns import explored, turn_to_explore
from hvd_autosync.versions import versions

#: Exploring stops when the next trial is expected to save a smaller share of a step, but not
#: before so many trials, the default's included.
SMALL_GAIN, FEWEST_TRIALS = 0.01, 4
#: Trials cut short are those clearly slower than the best by more than launches differ.
_HOPELESS_FACTOR = 1.1
#: Entry of a trial's information: the studies that were learned from, with their similarity.
_RELATED = "related"


class Study:
    """One optimization: a task, a space, a seed, its trials, its winner."""

    def __init__(
        self, store: TraceStore, record: StudyRecord, learner: Learner | None = None
    ) -> None:
        self._store = store
        self._learner = learner or learning.BayesianLearner()
        self._mine: dict[int, Strategy] = {}
        self._problem: Problem | None = None
        self.record = record
        self.settings = StudySettings.from_json(record.settings)

    @classmethod
    def create(
        cls,
        space: SearchSpace | None = None,
        *,
        store: TraceStore | str | None = None,
        settings: StudySettings | None = None,
        learner: Learner | None = None,
        task: Task | None = None,
        job_key: str = "",
        command: Sequence[str] = (),
    ) -> Study:
        """Start a study.

        Args:
            space: What to search. It may be described later (:meth:`describe`), when the default
                trial has shown what the model is; until then only that trial can be asked for.
            store: Where to keep the trace; a path, an SQLAlchemy URL, or the user's own store.
            settings: Budget and seed.
            learner: Who proposes strategies.
            task: What is tuned, where known; needed for later reuse.
            job_key: Identifies the job, for resuming and reuse.
            command: The command, for people.
        """
        traces = store if isinstance(store, TraceStore) else TraceStore(store)
        record = traces.create_study(
            job_key=job_key,
            command=tuple(command),
            settings=(settings or StudySettings()).to_json(),
            versions=versions(),
        )
        study = cls(traces, record, learner)
        if space is not None:
            study.describe(space, task)
        return study

    def describe(self, space: SearchSpace, task: Task | None = None) -> None:
        """Set the space (and the task), once."""
        self._store.describe_task(self.record.study_id, task, space)
        self.record = replace(self.record, space=space, task=task)

    @property
    def study_id(self) -> str:
        """The study's name in the store."""
        return self.record.study_id

    @property
    def space(self) -> SearchSpace:
        """The search space.

        Raises:
            StudyError: It was not described yet.
        """
        if self.record.space is None:
            raise StudyError(
                "the study has no search space yet",
                hint="Tell the default trial, then call describe(space).",
            )
        return self.record.space

    @property
    def problem(self) -> Problem:
        """What the learner works on.

        Raises:
            StudyError: The space was not described yet.
            StoreError: The store cannot be read.
        """
        if self._problem is None or self._problem.space is not self.space:
            self._problem = problem_of(self._store, self.record, self.history)
        return self._problem

    @property
    def history(self) -> list[TrialRecord]:
        """All trials so far, in order."""
        return self._store.trials(self.study_id)

    @property
    def conclusion(self) -> Conclusion | None:
        """How the study ended; ``None`` while it runs."""
        return Conclusion.of(self.record)

    def ask(self) -> Trial | None:
        """The next trial, committed to the store; ``None`` when the study has concluded.

        Raises:
            StudyError: The space is not described though the default was told.
            StoreError: The store cannot be written.
        """
        if self.record.status is not StudyStatus.RUNNING:
            return None
        began = time.monotonic()
        trials = [t for t in self.history if t.result is not None or t.number in self._mine]
        if not trials:
            return self._asked(Strategy(), "default", {}, began)
        if not self.space.holds_job and all(t.strategy != self.space.default for t in trials):
            return self._asked(self.space.default, "default", {}, began)
        confirming = [t for t in trials if t.kind == "confirm"]
        finalists = self._finalists(trials)
        if not confirming:
            wanted, stopped, leaders = self._before_confirming(trials, finalists, began)
            if wanted is not None:
                return wanted
        else:
            stopped, leaders = _agenda(confirming[0])
        verdicts = self._check(trials, leaders, finalists).verdicts()
        candidates = leaders if confirming else finalists.candidates(leaders, verdicts)
        confirmation = Confirmation(
            self.space.default, candidates, [self._measurement(t) for t in confirming]
        )
        next_one = confirmation.next()
        if next_one is None:
            self._conclude(trials, confirmation.comparisons(), stopped, verdicts)
            return None
        agenda = {"stopped": stopped, "candidates": [dict(c) for c in candidates]}
        return self._asked(next_one, "confirm", agenda, began)

    def _before_confirming(
        self, trials: Sequence[TrialRecord], finalists: Finalists, began: float
    ) -> tuple[Trial | None, str, list[Strategy]]:
        """The next trial that explores or judges; else why there is none, and who is best."""
        stopped = ""
        first = turn_to_explore(self.space, trials, self.settings.trials)
        for exploring in (first, not first):
            if exploring:
                suggestion, stopped = self._explore(trials)
                if suggestion is not None:
                    info = suggestion.info
                    asked = self._asked(suggestion.strategy, suggestion.kind, info, began)
                    return asked, "", []
                continue
            wanted = self._check(trials, finalists.leaders(), finalists).next()
            if wanted is not None:
                strategy, seed = wanted
                steps = finalists.steps_in_time(strategy, self.settings.quality_steps)
                return self._asked(strategy, "quality", {"seed": seed}, began, steps, seed), "", []
        return None, stopped, finalists.leaders()

    def _measurement(self, trial: TrialRecord) -> Measurement:
        time_s = trial.result.step_time if trial.result is not None else None
        strategy = self.space.complete(trial.strategy)
        return Measurement(strategy, time_s, running=trial.result is None)

    def _asked(
        self, strategy: Strategy, kind: str, info: dict[str, Any], began: float,
        steps: int | None = None, seed: int = 0,
    ) -> Trial:  # fmt: skip
        info = {**info, "ask_s": round(time.monotonic() - began, 3)}
        number = self._store.ask(self.study_id, strategy, kind, info)
        self._mine[number] = strategy
        return Trial(number, kind, strategy, steps, seed)

    def tell(self, trial: Trial, outcome: TrialResult | Sequence[float]) -> None:
        """Record what a trial gave: a result, or the durations of its measured steps in seconds.

        Raises:
            StudyError: The trial is not one of this study's open ones.
            StoreError: The store cannot be written.
        """
        if trial.number not in self._mine:
            raise StudyError(
                f"trial {trial.number} of study {self.study_id} is not open",
                hint="Tell each trial that ask() returned, once.",
            )
        if not isinstance(outcome, TrialResult):
            report = RankReport(0, "", tuple(float(s) for s in outcome))
            outcome = TrialResult(TrialStatus.COMPLETED, ranks=(report,))
        default = default_result(self.history)
        if outcome.diverged and default is not None and not default.diverged:
            outcome = replace(
                outcome, status=TrialStatus.DIVERGED,
                reason="its loss became infinite or not a number; the default's did not",
            )  # fmt: skip
        self._store.tell(self.study_id, trial.number, outcome)
        del self._mine[trial.number]

    def hopeless_above_s(self, trial: Trial) -> float:
        """Step time above which ``trial`` need not go on, seconds; infinite when it must."""
        if trial.kind not in ("sobol", "model"):
            return math.inf
        seen = observations_of(self.space, self.history)  # a job outside of the space is no rival
        verdicts = self._verdicts(self.history)
        usable = {verdict.strategy for verdict in verdicts if verdict.admissible}
        rivals = [o.step_s for o in seen if self.space.is_exact(o.strategy) or o.strategy in usable]
        return min((s for s in rivals if s is not None), default=math.inf) * _HOPELESS_FACTOR

    def _explore(self, trials: Sequence[TrialRecord]) -> tuple[Suggestion | None, str]:
        """What to try next, or ``None`` with the reason to stop exploring."""
        exhausted = self._exhausted(trials)
        if exhausted:
            return None, exhausted
        observations, problem = observations_of(self.space, trials), self.problem
        if self.space.has_lossy:
            verdicts = self._verdicts(trials)
            problem = replace(problem, usable=admissibility(self.space, verdicts).at)
        suggestion = self._learner.suggest(
            problem, observations, list(self._mine.values()), seed=self.settings.seed
        )
        if suggestion is None:
            return None, "every strategy of the space was tried"
        info = {**suggestion.info, _RELATED: [[s.study_id, s.similarity] for s in problem.sources]}
        if suggestion.kind != "model":
            return replace(suggestion, info=info), ""
        enough = self._enough(trials, float(info.get("expected_gain", math.inf)))
        return (None, enough) if enough else (replace(suggestion, info=info), "")

    def _enough(self, trials: Sequence[TrialRecord], gain: float) -> str:
        """Why the next trial, with its expected gain, is not worth its time; empty if it is."""
        if len(trials) < FEWEST_TRIALS:
            return ""
        if gain < SMALL_GAIN:
            return f"another trial promises a gain of {gain:.1%}, less than {SMALL_GAIN:.0%}"
        durations = [t.result.total_s for t in explored(trials) if t.result is not None]
        known = [seconds for seconds in durations if math.isfinite(seconds)]
        trial_s = sum(known) / len(known) if known else 0.0
        saved_s = gain * 3600 * self.settings.expected_hours
        if saved_s < trial_s:
            return (
                f"another trial takes {trial_s:.0f} s and is expected to save {saved_s:.0f} s of "
                f"{self.settings.expected_hours:g} hours of training"
            )
        return ""

    def _exhausted(self, trials: Sequence[TrialRecord]) -> str:
        """Why no further trial may be spent; empty while some may."""
        settings = self.settings
        if self.space.dimension == 0:
            return "no knob can matter for this job"
        if len(explored(trials)) >= settings.trials:
            return f"all {settings.trials} trials were used"
        if settings.minutes is not None and _used_s(trials) >= 60 * settings.minutes:
            return f"the {settings.minutes:g} minutes were used"
        return ""

    def _finalists(self, trials: Sequence[TrialRecord]) -> Finalists:
        return Finalists(self.problem, observations_of(self.space, trials))

    def _verdicts(self, trials: Sequence[TrialRecord]) -> list[Verdict]:
        """What is said of the strategies that were judged so far."""
        return self._check(trials, (), self._finalists(trials)).verdicts()

    def _check(
        self, trials: Sequence[TrialRecord], leaders: Sequence[Strategy], finalists: Finalists
    ) -> QualityCheck:
        tried = [
            QualityTrial(
                self.space.complete(trial.strategy), int(trial.info["seed"]),
                () if trial.result is None else losses_of(trial.result), trial.result is None,
                1 if trial.result is None else trial.result.round_steps,
            )
            for trial in trials
            if trial.kind == "quality"
        ]  # fmt: skip
        judged = [each.strategy for each in tried if not self.space.is_exact(each.strategy)]
        lossy = [strategy for strategy in leaders if not self.space.is_exact(strategy)]
        lossy = list(dict.fromkeys([*judged, *lossy]))
        return QualityCheck(
            self.space.default, lossy, tried,
            lambda untried, verdicts: finalists.to_judge(leaders, untried, verdicts),
        )  # fmt: skip

    def _conclude(
        self, trials: Sequence[TrialRecord], comparisons: list[Comparison], stopped: str,
        verdicts: Sequence[Verdict],
    ) -> None:  # fmt: skip
        best = comparisons[0] if comparisons else None
        default = default_result(trials)
        first = default.step_time if default else None
        winner = self.space.default
        if best is not None and best.proven:
            winner, reason = best.strategy, "it was faster than the default when measured again"
        elif best is not None:
            reason = "no candidate was faster with confidence when measured again"
        elif any(t.kind == "confirm" for t in trials):
            reason = "the default or every candidate failed when measured again"
        elif verdicts:
            reason = "lossy strategies were refused for their losses, and no other promises enough"
        else:
            reason = "no strategy that may be used promises to beat the default by much"
        default_s = first.mean_s if first else math.nan
        self.finish(
            Conclusion(winner, reason, stopped, default_s, tuple(comparisons), tuple(verdicts))
        )

    def finish(self, conclusion: Conclusion) -> None:
        """Close the study with ``conclusion``."""
        outcome = conclusion.to_json()
        self._store.finish(
            self.study_id, StudyStatus.FINISHED, outcome, conclusion.winner
        )
        self.record = replace(
            self.record, status=StudyStatus.FINISHED, outcome=outcome, winner=conclusion.winner
        )


def _agenda(trial: TrialRecord) -> tuple[str, list[Strategy]]:
    """Why exploring stopped and who was chosen then, as a later trial has it written down."""
    return str(trial.info["stopped"]), [Strategy(each) for each in trial.info["candidates"]]


def _used_s(trials: Sequence[TrialRecord]) -> float:
    """Seconds that the trials and the thinking before them took."""
    ran = [t.result.total_s for t in trials if t.result is not None]
    thought = [float(t.info.get("ask_s", 0.0)) for t in trials]
    return sum(s for s in ran if not math.isnan(s)) + sum(thought)


def problem_of(store: TraceStore, study: StudyRecord, trials: Sequence[TrialRecord]) -> Problem:
    """What is known of a study's task beyond what its trials measured.

    Which related studies are learned from is decided once, and written with the trials that are
    asked for then.

    Args:
        store: Where the study is, and those that are related.
        study: The study, whose space is known.
        trials: All of its trials.
    """
    assert study.space is not None, "nothing is asked of a learner before"
    settings = StudySettings.from_json(study.settings)
    written = [t.info[_RELATED] for t in trials if isinstance(t.info.get(_RELATED), list)]
    related = written[0] if written else None
    running = study.status is StudyStatus.RUNNING
    if related is None and running and settings.transfer and study.task is not None:
        related = related_studies(store, study.task)
    sources = load_sources(store, related or ())
    return Problem(study.space, study.task, sources, settings.warmup + settings.steps)
