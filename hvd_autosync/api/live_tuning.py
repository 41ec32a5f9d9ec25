"""``hvd_autosync.tune(..., mode="live")``: a training is started, and its tuning followed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from hvd_autosync.api.training import Training
from hvd_autosync.engine.mode import check_what_is_read, why_launched
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import load_restrictions, tuning_key
from hvd_autosync.engine.tuning import Listener
from hvd_autosync.errors import ConfigurationError, LiveTuningError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Trial
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore
from hvd_autosync.traces.records import timestamp

#: Interval between two looks into the store, seconds.
_EVERY_S = 0.5
#: How long the driver of a training that has failed in a trial may take to start it again, seconds.
_RESTART_S = 5.0


def tune_live(job: Job, options: Options, listener: Listener) -> tuple[StudyRecord, Training]:
    """Start a training, tuned in its own steps; return its study once it is concluded.

    A Stop of the listener, or an interrupt, ends the tuning and not the training.

    Args:
        job: The job.
        options: The options of its tuning.
        listener: Receives the events.

    Raises:
        AutosyncError: The training cannot be tuned in its own steps, or has failed before.
        KeyboardInterrupt: An interrupt before the study began, which has ended the training.
    """
    options = replace(options, mode="live")
    if reason := why_launched(job, options):
        raise ConfigurationError(
            f"this training cannot be tuned in its own steps: {reason}",
            hint="Leave out mode='live': then trials are launched.",
        )
    check_what_is_read(job, options)
    follower = Follower(job, options, listener)
    training = Training(job, options)
    try:
        listener.on_notice(f"the training starts; what it prints goes to {training.output}")
        return follower.until_concluded(training), training
    except KeyboardInterrupt:
        if follower.study is None:
            training.stop()
            raise
        training.end_tuning()
        listener.on_notice("the tuning ends once its running trial has ended; the training goes on")
        return follower.study.record, training
    except BaseException:
        training.stop()
        raise


class Follower:
    """Follows the tuning of a training in the store, and tells a listener.

    Args:
        job: The job, which is not started yet.
        options: The options of its tuning.
        listener: Receives the events.
        sleep: Waits for some seconds.

    Attributes:
        study: The study that the listener knows.
    """

    def __init__(
        self,
        job: Job,
        options: Options,
        listener: Listener,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.study: AskTellStudy | None = None
        self._listener = listener
        self._sleep = sleep
        self._store = TraceStore(options.store)
        self._key = tuning_key(job, options, load_restrictions(options.space))
        self._since, self._before = timestamp(), self._living()
        self._begun: dict[int, float] = {}
        self._ended: set[int] = set()
        self._earlier: StudyRecord | None = None
        if why_launched(job, options) == "":  # no trial is needed
            self._earlier = self._store.find_finished(self._key)

    def until_concluded(self, training: Training) -> StudyRecord:
        """Return the study once it is concluded or has failed, or its training has ended.

        Args:
            training: The training.

        Raises:
            LiveTuningError: The training has ended without a study.
            KeyboardInterrupt: Of the listener, or of this process.
        """
        if self._earlier is not None:
            study = self._earlier.study_id
            self._listener.on_notice(
                f"this job was tuned before: it trains under the result of study {study}"
            )
            return self._earlier
        failed_s = 0.0
        while True:
            status = training.status  # before the look: nothing comes after it
            record = self._look()
            if record is not None:
                failed = record.status is StudyStatus.FAILED
                failed_s = failed_s + _EVERY_S if failed else 0.0
                concluded = record.status is StudyStatus.FINISHED
                if concluded or status is not None or failed_s > _RESTART_S:
                    return record
            elif status is not None:
                raise _without_study(training, status)
            self._sleep(_EVERY_S)

    def _living(self) -> set[str]:
        """Ids of the job's studies that some process runs."""
        running = self._store.studies(job_key=self._key, status=StudyStatus.RUNNING)
        return {each.study_id for each in running} - self._store.interrupted()

    def _find(self) -> StudyRecord | None:
        """Return the newest study of this training, which may have resumed an earlier one."""
        resumed = self._living() - self._before
        for record in self._store.studies(job_key=self._key):
            if record.created_at >= self._since or record.study_id in resumed:
                return record
        return None

    def _look(self) -> StudyRecord | None:
        """Tell the listener what is new; return the study, if there is one."""
        if self.study is None or self.study.record.status is StudyStatus.FAILED:
            record = self._find()
        else:
            record = self._store.study(self.study.study_id)
        if record is None:
            return None
        if self.study is None or self.study.study_id != record.study_id:
            self._start(AskTellStudy(self._store, record))
        study = self.study
        assert study is not None, "it was just started"
        study.record = record
        self._tell_news(study)
        return record

    def _start(self, study: AskTellStudy) -> None:
        self.study = study
        ended = [each.number for each in study.history if each.result is not None]
        self._ended = {*ended}
        self._begun = dict.fromkeys(ended, 0.0)
        self._listener.on_study_start(study, resumed=bool(ended))
        self._listener.on_ask_start(study)

    def _tell_news(self, study: AskTellStudy) -> None:
        now = time.monotonic()
        for each in study.history:
            trial = Trial(each.number, each.kind, each.strategy)
            if each.number not in self._begun:
                self._begun[each.number] = now
                self._listener.on_trial_start(study, trial)
            if each.number in self._ended:
                continue
            if each.result is not None:
                self._ended.add(each.number)
                self._listener.on_trial_end(study, trial, each.result)
                if study.conclusion is None:
                    self._listener.on_ask_start(study)
            elif study.conclusion is None:
                elapsed_s = now - self._begun[each.number]
                progress = TrialProgress("measuring", 0, 0, elapsed_s)
                self._listener.on_trial_progress(study, trial, progress)
        if study.conclusion is not None:
            self._listener.on_study_end(study, study.conclusion)


def _without_study(training: Training, status: int) -> LiveTuningError:
    """Return the error that a training has ended before its tuning began."""
    if training.refusal:
        return LiveTuningError(
            f"the training cannot be tuned in its own steps, because {training.refusal}; it has "
            "ended at its first steps",
            hint="Leave out mode='live': then trials are launched.",
        )
    return LiveTuningError(
        f"the training has ended with status {status} before its tuning:\n{training.last_lines()}",
        hint=f"All that it has printed is in {training.output}.",
    )
