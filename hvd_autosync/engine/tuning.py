"""Tuning of one job, from its default trial to the confirmed winner.

The flag, the command and the notebook call :func:`tune` with a runner that launches each trial; the
helper process of a live training, with one that runs trials in the training's own steps. All
receive its events through a :class:`Listener`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol

from hvd_autosync.engine.cluster import links_of
from hvd_autosync.engine.compatibility import (
    RETUNE_TRIALS,
    nothing_to_reuse,
    why_again,
    why_not_in_place,
)
from hvd_autosync.engine.interrupted import claim_interrupted, last_finished, let_go
from hvd_autosync.engine.live_stage import task_and_space_under
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.reuse import of_same_task
from hvd_autosync.engine.study_options import (
    excluded_for,
    load_restrictions,
    settings_of,
    tuning_key,
)
from hvd_autosync.launch.auto import AutoRunner
from hvd_autosync.launch.facts import default_controller, horovod_build
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.runner import TrialProgress, TrialRunner
from hvd_autosync.launch.signals import stop_if_asked
from hvd_autosync.learner import Learner
from hvd_autosync.search_space import (
    Links,
    ModelProfile,
    Resources,
    SearchSpace,
    Strategy,
    Task,
    TrialResult,
    TrialSpec,
    TrialStatus,
    build_space,
    restrict_space,
)
from hvd_autosync.search_space.catalogue import is_exact
from hvd_autosync.search_space.exchange_plan import Classes, parameter_classes
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.search_space.restrictions import left_empty, without_choices
from hvd_autosync.search_space.schedule import SEE_EPOCHS
from hvd_autosync.search_space.sync_plan import beyond_horovod
from hvd_autosync.study.fallbacks import fallback_line, without_excluded
from hvd_autosync.study.forecast import Forecast, forecast
from hvd_autosync.study.resumed import has_rested
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.trial_steps import whole_rounds
from hvd_autosync.study.unfit import why_unfit
from hvd_autosync.study.values import Conclusion, Trial
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore, default_result
from hvd_autosync.traces.owner import HEARTBEAT_S
from hvd_autosync.util.versions import other_versions

_AGAIN = "to tune again: --autosync-reuse never"
_ENDED_ELSEWHERE = "the loss guard has ended its lossy knobs in another training of this job"


class TuningInterrupted(KeyboardInterrupt):
    """Ctrl-C has ended a tuning; all measurements are in the store.

    Args:
        study: The study; it can be resumed.
    """

    def __init__(self, study: AskTellStudy) -> None:
        super().__init__(f"study {study.study_id} was interrupted")
        self.study = study


class _Ended(KeyboardInterrupt):
    """``ends`` of :func:`tune` has ended a tuning: nobody waits for the store."""


class Listener(Protocol):
    """Receives the events of a tuning, in the thread that tunes. Every call must return soon."""

    def on_wait(self, elapsed_s: float) -> None:
        """A training was started so long ago, and its study has not begun; called repeatedly."""

    def on_study_start(self, study: AskTellStudy, *, resumed: bool) -> None:
        """A study was created or resumed."""

    def on_links_progress(self, study: AskTellStudy, progress: TrialProgress) -> None:
        """The links between ranks are being measured; called several times a second."""

    def on_ask_start(self, study: AskTellStudy) -> None:
        """The choice of the next trial begins."""

    def on_trial_start(self, study: AskTellStudy, trial: Trial) -> None:
        """A trial begins."""

    def on_trial_progress(self, study: AskTellStudy, trial: Trial, progress: TrialProgress) -> None:
        """A trial is running; called several times a second."""

    def on_trial_end(self, study: AskTellStudy, trial: Trial, result: TrialResult) -> None:
        """The result of a trial was stored."""

    def on_study_end(self, study: AskTellStudy, conclusion: Conclusion) -> None:
        """The study concluded."""

    def on_forecast(self, study: AskTellStudy, forecast: Forecast) -> None:
        """The default was measured, so that the duration of the tuning can be forecast."""

    def on_notice(self, text: str) -> None:
        """A message for the user."""


def tune(
    job: Job,
    options: Options,
    listener: Listener,
    *,
    runner: TrialRunner | None = None,
    learner: Learner | None = None,
    trains: bool = False,
    fixed: Collection[str] = (),
    unwanted: Mapping[str, Collection[Value]] = MappingProxyType({}),
    ends: Callable[[], bool] = lambda: False,
    judged: StudyRecord | None = None,
) -> StudyRecord:
    """Tune ``job`` and return its finished study, which may be a reused one.

    An interrupted study of the same job is resumed, unless ``reuse`` is ``never``. A winner that
    the loss guard abandoned in a training is not returned again
    (:mod:`hvd_autosync.study.fallbacks`).

    Args:
        job: The job.
        options: The options of the tuning.
        listener: Receives the events.
        runner: Runs the trials; ``None``: launches them, warm if possible, else cold.
        learner: Proposes strategies; ``None``: our learner.
        trains: Whether the training follows, so that tuning must pay off within it.
        fixed: Knobs that the runner cannot change.
        unwanted: Choices of knobs that the runner shall not try.
        ends: Whether to end as by Ctrl-C; asked before each trial.
        judged: The study under whose winner the training has begun that is tuned live. What
            determines the trained model stays as it is there.

    Raises:
        ConfigurationError: An option or file is invalid, or ``reuse`` is ``only`` and there is
            nothing to reuse.
        DefaultTrialError: The job fails or cannot be measured under the default strategy.
        ShortJobError: The job is too short to be tuned.
        StoreError: The store cannot be used.
        TuningInterrupted: Ctrl-C was pressed, or ``ends`` said so.
    """
    restrictions = load_restrictions(options.space, options.allow)
    store = TraceStore(options.store)
    key = tuning_key(job, options, restrictions, None if judged is None else judged.winner)
    from_scratch = options.reuse == "never"
    known = last_finished(store, key, from_scratch=from_scratch)
    excluded = excluded_for(store, job, options, restrictions)
    again = unfit = ""
    if known is not None:
        feasible = without_excluded(known, excluded)
        if feasible is not known:
            why = fallback_line(known) or _ENDED_ELSEWHERE
            listener.on_notice(f"study {known.study_id}: {why}; this strategy is not used again")
        unfit = why_not_in_place(feasible, fixed, unwanted)
        again = unfit or why_again(known, feasible, options)
        if not again:
            found = f"this job was tuned before: using the result of study {known.study_id}"
            listener.on_notice("; ".join([found, *other_versions(known.versions), _AGAIN]))
            return feasible
    if options.reuse == "only":
        raise nothing_to_reuse(again)
    judged_by = "" if judged is None else judged.study_id
    settings = replace(settings_of(options), excluded=excluded, judged_by=judged_by)
    if known is not None:
        if not unfit and not from_scratch:
            # Few trials suffice: by default it learns from related studies, such as the earlier.
            settings = replace(settings, trials=min(settings.trials, RETUNE_TRIALS), retune=True)
        listener.on_notice(f"tuning again after study {known.study_id}: {again}")
    claimed = claim_interrupted(
        store, key, settings, listener.on_notice, fixed, unwanted, from_scratch=from_scratch
    )
    study = (
        AskTellStudy(store, claimed, learner)
        if claimed is not None
        else AskTellStudy.create(
            store=store, settings=settings, job_key=key, command=job.display(), learner=learner
        )
    )
    resumed = claimed is not None
    try:
        listener.on_study_start(study, resumed=resumed)
        if runner is None:
            runner = AutoRunner(
                job,
                listener.on_notice,
                cold=options.runner == "cold",
                keep_files=options.keep_trial_files or "",
                own_files=store.files,
            )
        with closing(runner):
            tuning = _Tuning(
                job,
                options,
                restrictions,
                store,
                listener,
                runner,
                trains,
                fixed,
                unwanted,
                ends,
                judged,
            )
            return without_excluded(tuning.run(study), excluded)
    except BaseException as end:
        if not isinstance(end, _Ended):
            store.stop_waiting()  # whoever has ended it waits for what follows
        let_go(store, study.study_id)
        if type(end) in (KeyboardInterrupt, _Ended):  # not StopRequested of the widget
            if study.conclusion is not None:  # it came when all was done
                return without_excluded(study.record, excluded)
            raise TuningInterrupted(study) from None
        raise


class _Tuning:
    """One call of :func:`tune`."""

    def __init__(
        self,
        job: Job,
        options: Options,
        restrictions: dict[str, Any],
        store: TraceStore,
        listener: Listener,
        runner: TrialRunner,
        trains: bool,
        fixed: Collection[str],
        unwanted: Mapping[str, Collection[Value]],
        ends: Callable[[], bool],
        judged: StudyRecord | None,
    ) -> None:
        self._fixed, self._unwanted, self._ends, self._judged = fixed, unwanted, ends, judged
        self._trains = trains
        self._store = store
        self._last_heartbeat = 0.0
        self._job = job
        self._options = options
        self._restrictions = restrictions
        self._listener = listener
        self._runner = runner
        self._limits = Limits()
        self._links = Links()

    def run(self, study: AskTellStudy) -> StudyRecord:
        default = default_result(study.history)
        if study.record.space is None and self._judged is None:

            def report(progress: TrialProgress) -> None:
                self._beat(study)
                self._listener.on_links_progress(study, progress)

            self._links = links_of(
                self._job,
                self._store,
                self._runner,
                self._listener.on_notice,
                report,
                remeasure=self._options.reuse == "never" or study.settings.retune,
            )
        if default is not None:
            if has_rested(study.history):
                self._limits = Limits.from_default(default)
                default = self._default_again(study) or default
            self._after_default(study, Strategy(), default, new=self._describe(study, default))
        while study.conclusion is None:
            stop_if_asked()
            if self._ends():
                raise _Ended
            self._listener.on_ask_start(study)
            trial = study.ask()
            if trial is None:
                break
            result = self._run_trial(study, trial)
            study.tell(trial, result)
            # The space must be known before the listener reads the study.
            new = trial.kind == "default" and self._describe(study, result)
            self._listener.on_trial_end(study, trial, result)
            if trial.kind == "default":
                self._after_default(study, trial.strategy, result, new=new)
        conclusion = study.conclusion
        assert conclusion is not None, "a study without further requests has a conclusion"
        self._listener.on_study_end(study, conclusion)
        return study.record

    def _default_again(self, study: AskTellStudy) -> TrialResult | None:
        """Measure the default of a study that has rested; ``None`` if no minutes are left for it.

        Raises:
            DefaultTrialError: The job fails now. The study can be resumed.
        """
        trial = study.ask_default()
        result = self._run_trial(study, trial)
        study.tell(trial, result)
        self._listener.on_trial_end(study, trial, result)
        if result.status is TrialStatus.CUT_SHORT and result.step_time is None:
            return None
        error = why_unfit(trial.strategy, result, study.settings, study.record.space, pays=True)
        if error is not None:
            raise error
        return result

    def _run_trial(self, study: AskTellStudy, trial: Trial) -> TrialResult:
        self._listener.on_trial_start(study, trial)
        warmup, steps = study.settings.steps_after(default_result(study.history))
        spec = TrialSpec(
            trial_id=f"{study.study_id}-{trial.number}-{uuid.uuid4().hex[:6]}",
            strategy=trial.strategy,
            warmup_steps=warmup,
            measured_steps=whole_rounds(trial.strategy, trial.steps or steps),
            seed=trial.seed,
            adaptive_steps=trial.kind == "default" and study.settings.adaptive_steps,
            profile=trial.kind == "default",
            prune_above_s=study.prune_above_s(trial),
            classes=_classes(study.record.task, trial.strategy),
        )

        def report(progress: TrialProgress) -> None:
            self._beat(study)
            self._listener.on_trial_progress(study, trial, progress)

        limits = replace(self._limits, total_s=study.left_for(trial.kind))
        return self._runner.run(spec, limits, report)

    def _beat(self, study: AskTellStudy) -> None:
        """Send a heartbeat if the last one is old enough."""
        if time.monotonic() - self._last_heartbeat > HEARTBEAT_S:
            self._last_heartbeat = time.monotonic()
            self._store.heartbeat(study.study_id)

    def _describe(self, study: AskTellStudy, result: TrialResult) -> bool:
        """Set task and space from the default trial; return whether they were unknown before."""
        if result.step_time is None or study.record.space is not None:
            return False
        task, space = self.describe(result)
        study.describe(space, task)
        return True

    def _after_default(
        self, study: AskTellStudy, strategy: Strategy, result: TrialResult, *, new: bool
    ) -> None:
        """Set the limits of trials from the default trial, and reuse a winner of the same task.

        Args:
            study: The study.
            strategy: The strategy of the trial.
            result: The result of the trial.
            new: Whether this trial has just set the task of the study.

        Raises:
            AutosyncError: The job cannot be tuned, as the trial failed or is too short.
        """
        pays = not (self._trains and new and self._options.expected_hours is None)
        error = why_unfit(strategy, result, study.settings, study.record.space, pays=pays)
        if error is not None:
            reason = {"reason": result.reason or result.status.value}
            self._store.finish(study.study_id, StudyStatus.FAILED, reason, None)
            raise error
        assert result.step_time is not None, "why_unfit has checked"
        self._limits = Limits.from_default(result)
        # Other studies know the default of the space, which need not be the unchanged job.
        first = new if study.space.holds_job else strategy == study.space.default
        if first and self._options.reuse == "auto" and not study.settings.retune:
            self._reuse(study, result.step_time.mean_s)
        if study.conclusion is None:
            expected = forecast(
                study.settings,
                study.history,
                lossy=study.space.has_lossy,
                # Ctrl-C starts the training only where it follows.
                trains=self._trains and self._options.mode != "live",
            )
            if expected is not None:
                self._listener.on_forecast(study, expected)

    def describe(self, result: TrialResult) -> tuple[Task, SearchSpace]:
        """Task and space, from the result of the default trial, or from the study before it."""
        if self._judged is not None:
            return task_and_space_under(self._judged, self._fixed, self._unwanted)
        device = result.device or "cpu"
        build = horovod_build()
        resources = Resources(self._job.hosts, device, build, self._links, result.cores)
        model = result.profile or ModelProfile(wrapped=False)
        space = build_space(
            model,
            resources,
            held=self._job.chosen,
            owned={*result.owned, *self._fixed},
            allow=self._options.allow,
            default_controller=default_controller(resources.build),
        )
        if empty := left_empty(space, self._restrictions):
            self._listener.on_notice(
                f"the space file leaves no value of {', '.join(empty)} that is possible for this "
                "job: it stays as it is"
            )
        space = without_choices(restrict_space(space, self._restrictions), self._unwanted)
        if not is_exact(space.default):
            self._listener.on_notice(
                "the space file makes a lossy strategy the default: nothing judges that, and other "
                "strategies are compared with its losses"
            )
        if "schedule" in self._options.allow and model.wrapped and not model.has_epochs:
            why = "no epoch was seen in the default trial's warm-up"
            self._listener.on_notice(f"local steps are not tuned: {why}; {SEE_EPOCHS}")
        return Task(model, resources), space

    def _reuse(self, study: AskTellStudy, default_s: float) -> None:
        """End a study with the winner of a finished one of the same task, if there is one."""
        found = of_same_task(self._store, study.record, default_s, self._listener.on_notice)
        if found is not None:
            self._listener.on_notice(
                f"using the result of study {found.source}, which tuned the same model on the same "
                f"cluster; {_AGAIN}"
            )
            study.finish(found)


def _classes(task: Task | None, strategy: Strategy) -> Classes:
    """Return a trial's parameter classes; empty if not needed: they can be thousands of names."""
    if task is None or not beyond_horovod(strategy):
        return {}
    return parameter_classes(task.model)
