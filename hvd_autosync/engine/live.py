"""Live tuning, as the helper process of a training sees it: from its first step to its winner."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from hvd_autosync.engine.compatibility import why_not_admitted, why_not_in_place
from hvd_autosync.engine.failed_choices import failed_choices, has_lost_training
from hvd_autosync.engine.forwarding import ForwardingListener
from hvd_autosync.engine.live_stage import keep_drift
from hvd_autosync.engine.mode import choices_not_live, last_study
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import load_restrictions, tuning_key, tuning_keys
from hvd_autosync.engine.training_context import training_context
from hvd_autosync.engine.tuning import Listener, TuningInterrupted, tune
from hvd_autosync.errors import AutosyncError, LiveTuningError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.live_runner import LiveRunner, Training, go_on_under, train_under
from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.exchange_plan import Classes, parameter_classes
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.study.resumed import has_rested
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.traces import StudyRecord, TraceStore, TrialRecord
from hvd_autosync.util.variables import RESTARTED_VARIABLE

#: How often one training is tuned again after drift.
_MOST_RETUNES = 3


@dataclass(frozen=True)
class Cost:
    """What the tuning has cost a training so far.

    Attributes:
        step: The step since which the training goes on under the winner.
        steps: Steps of the training that were made while it was tuned, without those with an
            evaluation, a checkpoint or a new epoch.
        spent_s: Seconds that these took, and what was done between steps.
    """

    step: int
    steps: int
    spent_s: float

    def lost_s(self, default_s: float) -> float:
        """Seconds more than under the default.

        Args:
            default_s: Step time of the default, seconds.
        """
        return self.spent_s - self.steps * default_s


class LiveStudy:
    """The tuning of one training, and of it again each time its steps have drifted.

    Args:
        training: The training.
        job: Its job.
        options: The options of the tuning.
        listener: Receives the events.
        fixed: Knobs that cannot change in this training.
        on_switch: Called when the training goes on under the winner.
        ends: Whether the tuning is to end, without its training; asked between trials.
        on_end: Called when the training goes on after such an end, with the study and, if it has
            proven no strategy, the earlier one whose result stays.
        judged: The study of launched trials under whose winner the training has begun, if any.
        adds_levels: Whether Horovod can have process sets of two levels in this training.
    """

    def __init__(
        self,
        training: Training,
        job: Job,
        options: Options,
        listener: Listener,
        fixed: Collection[str],
        on_switch: Callable[[StudyRecord, Cost], None],
        ends: Callable[[], bool] = lambda: False,
        on_end: Callable[[AskTellStudy, StudyRecord | None], None] = lambda study, earlier: None,
        judged: StudyRecord | None = None,
        *,
        adds_levels: bool = False,
    ) -> None:
        self._judged = judged
        self._on_switch, self._on_end = on_switch, on_end
        self._fixed, self._adds_levels = fixed, adds_levels
        self._told = False
        self._kept: StudyRecord | None = None
        self._training = training
        self._job = job
        self._options = options
        self._listener, self._ends = listener, ends

    def run(self) -> NoReturn:
        """Tune until the training ends.

        Raises:
            TrainingEnded: The training has ended.
            AutosyncError: As of :func:`hvd_autosync.engine.tuning.tune`, or the training cannot be
                tuned.
        """
        retunes = 0
        while True:
            try:
                study = self._tune()
            except TuningInterrupted as end:
                self._keep_best(end.study)
                self._training.wait()
            except LiveTuningError:
                raise
            except AutosyncError:
                if self._kept is not None:
                    with suppress(LiveTuningError):
                        go_on_under(self._training, *_winner(self._kept))
                raise
            drift = self._training.wait("drift")["text"]
            only = self._options.reuse == "only"
            if only or self._ends():
                keep_drift(study, self._options, drift, in_place=True)
                why = (
                    "--autosync-reuse is 'only'; to tune it, run the job with auto"
                    if only
                    else "its tuning was ended; the next run of this job is"
                )
                self._listener.on_notice(f"the training is not tuned again, because {why}")
                self._training.wait()
            retunes += 1
            if retunes > _MOST_RETUNES:
                self._listener.on_notice(
                    f"the training was tuned {retunes} times, and is not again"
                )
                self._training.wait()
            # Only now: the next run of the job would tune again, too.
            keep_drift(study, self._options, drift, in_place=True)

    def _keep_best(self, study: AskTellStudy) -> None:
        """Let the training go on under the best that is known, after the end of its tuning."""
        proven = study.proven
        earlier = self._kept if proven is None else None
        self._train(earlier or replace(study.record, winner=proven))
        self._on_end(study, earlier)

    def _tune(self) -> StudyRecord:
        """Tune the training, and let it go on under the winner."""
        with closing(TraceStore(self._options.store)) as store:
            failed = failed_choices(store, self._own_keys())
        unwanted = choices_not_live(elastic=self._training.elastic, adds_levels=self._adds_levels)
        for name, choices in failed.items():
            unwanted[name] = unwanted.get(name, set()) | choices
        if failed and not self._told:
            self._told = True
            named = sorted(f"{name}={value}" for name in failed for value in failed[name])
            self._listener.on_notice(
                "not tried live, because a training of this job, or of two others, failed in such "
                f"a trial: {', '.join(named)}; to try them: --autosync-mode launched "
                "--autosync-reuse never"
            )
        begun = None if self._judged is None else self._judged.winner
        self._kept = self._kept or self._drifted(begun, unwanted)
        confirmed = None if self._kept is None else _winner(self._kept)
        with closing(LiveRunner(self._training, begun, confirmed)) as runner:

            def ends() -> bool:
                runner.check()  # the next choice may take long
                return self._ends()

            self._kept = study = tune(
                self._job,
                self._options,
                _Resuming(self._listener, runner),
                runner=runner,
                trains=True,
                fixed=self._fixed,
                unwanted=unwanted,
                ends=ends,
                judged=self._judged,
            )
        self._on_switch(study, self._train(study))
        return study

    def _drifted(
        self, begun: Strategy | None, unwanted: Mapping[str, Collection[Value]]
    ) -> StudyRecord | None:
        """Return the study of the job whose steps have drifted, if its winner can be kept here.

        The training was started again, because it failed in a trial of the next study. A winner
        that was the strategy of that trial is not kept.

        Args:
            begun: The strategy of the launched stage, if any.
            unwanted: Choices of knobs that shall not be made.
        """
        restarted = os.environ.get(RESTARTED_VARIABLE)
        if not restarted or self._options.reuse == "never":
            return None
        with closing(TraceStore(self._options.store)) as store:
            known, _ = last_study(store, self._job, self._options, begun)
            trials = store.trials(restarted) if restarted in store.ids() else []
        if known is None or not known.drift or why_not_admitted(known, self._options):
            return None
        if any(has_lost_training(trial) and trial.strategy == known.winner for trial in trials):
            return None
        return None if why_not_in_place(known, self._fixed, unwanted) else known

    def _own_keys(self) -> set[str]:
        """Keys of the studies of this job, also of one without lossy groups or a launched stage."""
        options = self._options
        restrictions = load_restrictions(options.space, options.allow)
        begun = [None] if self._judged is None else [None, self._judged.winner]
        return {tuning_key(self._job, options, restrictions, each) for each in begun} | tuning_keys(
            self._job
        )

    def _train(self, study: StudyRecord) -> Cost:
        """Let the training go on under a study's winner; return what its tuning has cost."""
        context = training_context(study, self._options.store)
        strategy = study.winner or Strategy()
        train_under(self._training, strategy, context.classes, context.expected_step_s)
        switched = self._training.wait("switched")
        return Cost(switched["step"], switched["steps"], switched["spent_s"])


def _winner(study: StudyRecord) -> tuple[Strategy, Classes]:
    """Return the winner of a study, with its parameter classes."""
    classes = {} if study.task is None else parameter_classes(study.task.model)
    return study.winner or Strategy(), classes


class _Resuming(ForwardingListener):
    """Lets the runner know, too, what a study that is resumed has measured."""

    def __init__(self, listener: Listener, runner: LiveRunner) -> None:
        super().__init__(listener)
        self._runner = runner

    def on_study_start(self, study: AskTellStudy, *, resumed: bool) -> None:
        """See :class:`hvd_autosync.engine.tuning.Listener`."""
        task = study.record.task
        classes = {} if task is None else parameter_classes(task.model)
        history = study.history
        for trial in () if has_rested(history) else history:  # else the default comes again first
            if trial.result is not None:
                self._runner.remember(trial.strategy, classes, trial.result)
        self._listener.on_study_start(study, resumed=resumed)


def failed_trials(
    job: Job, options: Options, begins: Strategy | None = None
) -> dict[tuple[str, int], TrialRecord]:
    """Return the live trials in which trainings of a job have failed, by study and number.

    Args:
        job: The job.
        options: The options of its tuning.
        begins: As of :func:`hvd_autosync.engine.study_options.tuning_key`.
    """
    key = tuning_key(job, options, load_restrictions(options.space, options.allow), begins)
    with closing(TraceStore(options.store)) as store:
        return {
            (trial.study_id, trial.number): trial
            for study in store.studies(job_key=key)
            for trial in store.trials(study.study_id)
            if has_lost_training(trial)
        }
