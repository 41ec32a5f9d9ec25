"""The tuning loop: ask, run, tell, and in the end confirm.

A study owns no model and no process. It decides what to try next and when to stop from its settings
and the trials in its store only, so a study that is loaded after a crash continues where it was.
:func:`hvd_autosync.engine.tuning.tune` drives it with trials that are launched, or run in the steps
of a training. With trials of your own, drive it yourself::

    study = AskTellStudy.create(space)
    while (trial := study.ask()) is not None:
        study.tell(trial, run_my_job(trial.strategy))
    print(study.conclusion)
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

from hvd_autosync import learner as learning
from hvd_autosync.errors import ConfigurationError, NotOwnerError, StoreError, StudyError
from hvd_autosync.learner.base import Learner, check_learner
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import (
    RankReport,
    SearchSpace,
    StepTime,
    Strategy,
    Task,
    TrialResult,
    TrialStatus,
)
from hvd_autosync.search_space.trial import MIN_MEASURED_STEPS
from hvd_autosync.study.budget import Budget
from hvd_autosync.study.candidate_selection import may_be_used
from hvd_autosync.study.confirm import LAUNCHES_DIFFER
from hvd_autosync.study.decision import Decision, TrialRequest
from hvd_autosync.study.knob_order import KNOB_ORDER, knobs_by_effect
from hvd_autosync.study.related_studies import (
    RELATED,
    load_sources,
    observations_of,
    related_studies,
)
from hvd_autosync.study.resumed import repeated_defaults
from hvd_autosync.study.source_fits import keep_fits, with_known_fits
from hvd_autosync.study.values import Conclusion, StudySettings, Trial
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore, TrialRecord, default_result
from hvd_autosync.traces.loaded import LoadedTrials
from hvd_autosync.traces.unsaved import keep_unsaved
from hvd_autosync.util.versions import deciding_versions

_LOG = logging.getLogger(__name__)
#: So often in a row a trial is lost with its driver before its strategy counts as crashed: Ctrl-C
#: may come in the same trial twice.
_LOST_IN_A_ROW = 3


class AskTellStudy:
    """One optimization: a task, a space, a seed, its trials, its winner.

    :class:`hvd_autosync.Study` adds results and figures for users.
    """

    def __init__(
        self, store: TraceStore, record: StudyRecord, learner: Learner | None = None
    ) -> None:
        self._store = store
        self._trials = LoadedTrials(store, record.study_id)
        self._learner = learner or learning.BayesianLearner()
        #: Number of each open trial -> when it was asked for, in seconds of the monotonic clock.
        self._mine: dict[int, float] = {}
        self._problem: Problem | None = None
        self._fits_kept = False
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
    ) -> AskTellStudy:
        """Start a study.

        Args:
            space: The search space. It may be set later with :meth:`describe`, after the default
                trial has profiled the model; until then :meth:`ask` gives only that trial.
            store: The store of the trace: a path, an SQLAlchemy URL, or ``None`` for that of
                ``HVD_AUTOSYNC_STORE``, else the user's default store.
            settings: Budget and seed.
            learner: The learner that proposes strategies.
            task: The task, if known; needed for later reuse.
            job_key: Key of the job, for resuming and reuse.
            command: The command, for people.

        Raises:
            ConfigurationError: An argument or a setting has a wrong type or value; nothing was
                written.
            StoreError: The store cannot be used.
        """
        settings = StudySettings() if settings is None else settings
        _check_type("space", space, SearchSpace)
        _check_type("settings", settings, StudySettings)
        _check_type("task", task, Task)
        settings.check()
        check_learner(learner)
        if isinstance(command, str):
            raise ConfigurationError(
                f"invalid value {command!r:.200} for command", hint="Give a list of its words."
            )
        traces = store if isinstance(store, TraceStore) else TraceStore(store)
        record = traces.create_study(
            job_key=job_key,
            command=tuple(command),
            settings=settings.to_json(),
            versions=deciding_versions(),
        )
        study = cls(traces, record, learner)
        if space is not None:
            study.describe(space, task)
        return study

    def describe(self, space: SearchSpace, task: Task | None = None) -> None:
        """Set the space (and the task), once.

        Raises:
            ConfigurationError: One of them has a wrong type.
            StoreError: The store cannot be written.
        """
        _check_type("space", space, SearchSpace)
        _check_type("task", task, Task)
        self._store.describe_task(self.record.study_id, task, space)
        self.record = replace(self.record, space=space, task=task)

    @property
    def store(self) -> TraceStore:
        """The store of its trace."""
        return self._store

    @property
    def study_id(self) -> str:
        """Id of the study in the store."""
        return self.record.study_id

    @property
    def space(self) -> SearchSpace:
        """The search space.

        Raises:
            StudyError: The space is not set yet.
        """
        if self.record.space is None:
            raise StudyError(
                "the study has no search space yet",
                hint="Tell the default trial, then call describe(space).",
            )
        return self.record.space

    @property
    def problem(self) -> Problem:
        """The input of the learner.

        Raises:
            StudyError: The space is not set yet.
            StoreError: The store cannot be read.
        """
        space = self.space
        if self._problem is None or self._problem.space is not space:
            problem = problem_of(self._store, self.record, self.history)
            self._problem = with_known_fits(self._store, problem)
        return self._problem

    @property
    def history(self) -> list[TrialRecord]:
        """All trials so far, in order."""
        return self._trials.read()

    @property
    def conclusion(self) -> Conclusion | None:
        """The conclusion of the study; ``None`` while it runs."""
        return Conclusion.of(self.record)

    @property
    def proven(self) -> Strategy | None:
        """The best strategy that the confirmation has proven faster so far, if any."""
        if self.record.space is None:
            return None
        return self._decision(self._counted()).proven()

    def left_for(self, kind: str) -> float:
        """Return the seconds that are left for a trial of this kind; infinite without a limit."""
        return Budget(self.settings, self.history).left_for(kind)

    def decide(self) -> TrialRequest | Conclusion:
        """Return what :meth:`ask` would do now, without writing to the store.

        Raises:
            StudyError: The default trial has ended, but the space is not set.
            StoreError: The store cannot be read.
        """
        trials = self._counted()
        known = any(trial.kind == "default" for trial in trials)  # it may be lost beside others
        return self._decision(trials).next() if known else TrialRequest(Strategy(), "default")

    def ask(self) -> Trial | None:
        """Return the next trial and commit it to the store; ``None`` if the study has ended.

        Raises:
            StudyError: The default trial has ended, but the space is not set; or the study ends, or
                exploring does, and the results of open trials count for that.
            NotOwnerError: Another driver has taken the study over.
            StoreError: The store cannot be written.
        """
        if self.record.status is not StudyStatus.RUNNING:
            return None
        with suppress(StoreError):  # the study may be another process's
            self._store.heartbeat(self.study_id)  # deciding may take long
        began = time.monotonic()
        wanted = self.decide()
        self._check_open(wanted)
        if isinstance(wanted, Conclusion):
            self.finish(wanted)
            return None
        info = {**wanted.info, "ask_s": round(time.monotonic() - began, 3)}
        # Another learner may have fitted no model of a source.
        bayesian = isinstance(self._learner, learning.BayesianLearner)
        if bayesian and wanted.kind == "model" and not self._fits_kept:
            keep_fits(self._store, self.problem)
            self._fits_kept = True
        return self._asked(replace(wanted, info=info))

    def ask_default(self) -> Trial:
        """Return one more trial of the default, and commit it to the store.

        A study that has rested goes on with it (:mod:`hvd_autosync.study.resumed`).

        Raises:
            StudyError: There is no default trial with a result to repeat.
            NotOwnerError: Another driver has taken the study over.
            StoreError: The store cannot be written.
        """
        told = [t for t in self.history if t.kind == "default" and t.result is not None]
        if not told:
            raise StudyError(
                f"study {self.study_id} has not measured its default yet", hint="Call ask() first."
            )
        return self._asked(TrialRequest(told[-1].strategy, "default"))

    def _asked(self, wanted: TrialRequest) -> Trial:
        """Commit a trial to the store."""
        number = self._store.ask(self.study_id, wanted.strategy, wanted.kind, wanted.info)
        self._mine[number] = time.monotonic()
        _LOG.debug("trial %d (%s): %s", number, wanted.kind, dict(wanted.strategy))
        return Trial(number, wanted.kind, wanted.strategy, wanted.steps, wanted.seed)

    def _counted(self) -> list[TrialRecord]:
        live = self.settings.mode == "live"
        return counted(self.record.space, self.history, running=self._mine, live=live)

    def _check_open(self, wanted: TrialRequest | Conclusion) -> None:
        """Check that nothing final is decided without the results of open trials."""
        kinds = {t.kind for t in self.history if t.number in self._mine}
        if isinstance(wanted, Conclusion):
            what = "the study ends"
        elif wanted.kind == "confirm" and "confirm" not in kinds:
            what = "the confirmation begins"
        else:
            return
        if kinds:
            numbers = ", ".join(map(str, sorted(self._mine)))
            raise StudyError(
                f"{what} once the open trials ({numbers}) have results",
                hint="Tell them, then ask again.",
            )

    def _decision(self, trials: Sequence[TrialRecord]) -> Decision:
        return Decision(self.problem, self.settings, self._learner, trials)

    def tell(self, trial: Trial, outcome: TrialResult | Sequence[float]) -> None:
        """Record the outcome of a trial: a result, or the seconds of its measured steps.

        A trial of which only its steps are told has taken the time since it was asked for.

        Raises:
            StudyError: The trial is not open in this study; or the outcome is neither a result nor
                seconds, which are finite, not negative and not almost all 0. Nothing is recorded.
            NotOwnerError: Another driver has taken the study over, and measures the trial again.
            StoreError: The store cannot be written. The result is in a file, and
                :func:`hvd_autosync.tune` takes it from there when it resumes the study.
        """
        if not isinstance(trial, Trial) or trial.number not in self._mine:
            number = getattr(trial, "number", trial)
            raise StudyError(
                f"trial {number!r:.200} of study {self.study_id} is not open",
                hint="Tell each trial that ask() returned, once.",
            )
        if not isinstance(outcome, TrialResult):
            step_s = _step_times(trial, outcome)
            ran_s = time.monotonic() - self._mine[trial.number]
            report = RankReport(0, "", step_s)
            outcome = TrialResult(TrialStatus.COMPLETED, ranks=(report,), total_s=ran_s)
        default = default_result(self.history)
        if outcome.diverged and default is not None and not default.diverged:
            outcome = replace(
                outcome,
                status=TrialStatus.DIVERGED,
                reason="its loss became infinite or not a number; the default's did not",
            )
        try:
            self._store.tell(self.study_id, trial.number, outcome)
        except NotOwnerError:
            raise
        except StoreError as error:
            raise self._unsaved(trial.number, outcome, error) from error
        del self._mine[trial.number]

    def _unsaved(self, number: int, result: TrialResult, error: StoreError) -> StoreError:
        """Keep a result that the store does not take; ``error``, with what has become of it."""
        try:
            path = keep_unsaved(self.study_id, number, result)
        except StoreError as second:
            return StoreError(
                f"{error.message}; the result of trial {number} is lost: {second.message}",
                hint=error.hint,
            )
        return StoreError(
            f"{error.message}; the result of trial {number} is kept in {path}", hint=error.hint
        )

    def prune_above_s(self, trial: Trial) -> float:
        """Return the step time above which to prune ``trial``, seconds; infinite: never."""
        if trial.kind not in ("sobol", "model"):
            return math.inf
        # Only strategies of the space that may be used are incumbents.
        seen = observations_of(self.space, self.history)
        known = self._decision(self._counted()).verdicts(), self.settings.goal
        incumbents = [o.step_s for o in seen if may_be_used(self.space, o.strategy, *known)]
        return min((s for s in incumbents if s is not None), default=math.inf) * LAUNCHES_DIFFER

    def finish(self, conclusion: Conclusion) -> None:
        """Close the study with ``conclusion``."""
        observed = observations_of(self.space, self.history)
        order = knobs_by_effect(self.space, observed)
        outcome = {**conclusion.to_json(), KNOB_ORDER: list(order)}
        self._store.finish(self.study_id, StudyStatus.FINISHED, outcome, conclusion.winner)
        self.record = replace(
            self.record, status=StudyStatus.FINISHED, outcome=outcome, winner=conclusion.winner
        )


def _check_type(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise ConfigurationError(
            f"invalid value {value!r:.200} for {name}", hint=f"Give a {kind.__name__}."
        )


def _step_times(trial: Trial, outcome: Sequence[float]) -> tuple[float, ...]:
    """Return the seconds of measured steps.

    Raises:
        StudyError: ``outcome`` is something else, has too few steps, or a trimmed mean of 0.
    """
    hint = "Tell the seconds of each measured step, or a TrialResult, as of a trial that failed."
    try:
        step_s = () if isinstance(outcome, (str, bytes, dict)) else tuple(map(float, outcome))
    except (TypeError, ValueError):
        step_s = ()
    if not step_s:
        raise StudyError(f"trial {trial.number}: {outcome!r:.200} has no step times", hint=hint)
    wrong = next((s for s in step_s if not 0 <= s < math.inf), None)
    if wrong is not None:
        raise StudyError(f"trial {trial.number}: a step cannot take {wrong} s", hint=hint)
    if (count := len(step_s)) < MIN_MEASURED_STEPS:
        few = f"it has {count} of the {MIN_MEASURED_STEPS} steps that a step time needs"
        raise StudyError(f"trial {trial.number}: {few}", hint=hint)
    if StepTime.from_steps(step_s).mean_s == 0:
        raise StudyError(f"trial {trial.number}: its steps take 0 s on average", hint=hint)
    return step_s


def counted(
    space: SearchSpace | None,
    trials: Sequence[TrialRecord],
    running: Collection[int] = (),
    *,
    live: bool = False,
) -> list[TrialRecord]:
    """Return the trials of a study that decisions depend on.

    Those that were lost with their driver are left out, and so asked for again. Where this has
    happened three times in a row, repetitions of the default aside, the strategy may be what ends
    the driver, as for want of memory: the trial counts as crashed. Trials of the default do not.
    Live trials end with their training, and a strategy that fails it has a result: they count as
    cut short, or when confirming are asked for again.

    Args:
        space: The space of the study, once it is known.
        trials: All trials, in order.
        running: Numbers of trials that still run.
        live: Whether they are live trials.
    """
    found: list[TrialRecord] = []
    lost, times, repeated = None, 0, repeated_defaults(trials)
    for trial in trials:
        known = trial.result is not None or trial.number in running
        if known:
            found.append(trial)
        if trial.number in repeated:
            continue  # it stands between losses of a study that has rested
        this = None if known else (trial.kind, trial.strategy, trial.info.get("seed"))
        lost, times = this, times + 1 if this == lost else 1
        is_default = trial.kind == "default" or (space and trial.strategy == space.default)
        excused = known or is_default or (live and trial.kind == "confirm")
        if times >= _LOST_IN_A_ROW and not excused:
            status = TrialStatus.CUT_SHORT if live else TrialStatus.CRASHED
            reason = f"its driver was lost in this trial {times} times in a row"
            found.append(replace(trial, result=TrialResult(status, reason)))
    return found


def problem_of(store: TraceStore, study: StudyRecord, trials: Sequence[TrialRecord]) -> Problem:
    """Return the problem of a study: its space and task, and related studies.

    The related studies are selected once and stored in the info of the trials.

    Args:
        store: The store of the study and of related ones.
        study: The study; its space is set.
        trials: All of its trials.
    """
    assert study.space is not None, "the space is set before a learner is used"
    settings = StudySettings.from_json(study.settings)
    written = [t.info[RELATED] for t in trials if isinstance(t.info.get(RELATED), list)]
    related = written[0] if written else None
    running = study.status is StudyStatus.RUNNING
    if related is None and running and settings.transfer and study.task is not None:
        related = related_studies(store, study.task, settings.judged_by)
    sources = load_sources(store, related or ())
    return Problem(study.space, study.task, sources)
