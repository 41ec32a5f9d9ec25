"""Follows the study of a training that is tuned in its own steps, and tells a listener."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile

from hvd_autosync.api.training import Training
from hvd_autosync.engine.tuning import Listener
from hvd_autosync.errors import LiveTuningError
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.reporting.words import again_live_text
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Trial
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore, TrialRecord
from hvd_autosync.traces.records import timestamp
from hvd_autosync.traces.state import StudyState

#: Interval between two looks into the store, seconds.
_EVERY_S = 0.5


class FollowedStudy(AskTellStudy):
    """A study as far as a listener was told of it; its owner is another process.

    Attributes:
        told: The trials that were told, in order.
    """

    def __init__(self, store: TraceStore, record: StudyRecord) -> None:
        super().__init__(store, record)
        self.told: list[TrialRecord] = []

    @property
    def history(self) -> list[TrialRecord]:
        """See :class:`AskTellStudy`."""
        return self.told

    def stored(self) -> list[TrialRecord]:
        """Return all trials that are in the store, by number.

        Raises:
            StoreError: The store cannot be read.
        """
        return self._trials.read()


class Follower:
    """Follows the tuning of a training in the store, and tells a listener.

    Args:
        store: The store of its study.
        listener: Receives the events.
        again: What the same call does where its tuning has ended early.
        sleep: Waits for some seconds.

    Attributes:
        study: The study that the listener knows.
    """

    def __init__(
        self,
        store: TraceStore,
        listener: Listener,
        again: str,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.study: FollowedStudy | None = None
        #: What the study was like in the last look, and its trials then.
        self._state: StudyState | None = None
        self._stored: list[TrialRecord] = []
        self._store = store
        self._listener = listener
        self._again = again
        self._sleep = sleep
        self._since = timestamp()
        self._began_at = time.monotonic()

    def until_ended(self, training: Training) -> StudyRecord:
        """Return the study once its tuning has ended, with a result or without.

        A training that fails in a trial may be started again, with another study.

        Args:
            training: The training, which is started after this object was made.

        Raises:
            LiveTuningError: The training has failed, or has no study.
            KeyboardInterrupt: Of the listener, or of this process.
        """
        while True:
            # Before the look: nothing comes after them.
            status, ended = training.status, training.tuning_ended
            study = self._look(training.study_id, last=status is not None or bool(ended))
            if study is not None and study.record.status is StudyStatus.FINISHED:
                return study.record
            if status is not None or ended:
                if study is None:
                    raise _without_study(training, ended)
                if status and not ended:
                    raise _failed(training, f"in its tuning, study {study.study_id}")
                self._listener.on_notice(_unfinished(status, ended, self._again))
                return study.record
            if study is None:
                self._listener.on_wait(time.monotonic() - self._began_at)
            self._sleep(_EVERY_S)

    def _look(self, study_id: str, *, last: bool) -> FollowedStudy | None:
        """Tell the listener what is new; return the study, if there is one.

        Args:
            study_id: The study; empty: there is none, or none new.
            last: Whether nothing will change any more.
        """
        if study_id and (self.study is None or self.study.study_id != study_id):
            self._start(FollowedStudy(self._store, self._store.study(study_id)))
        study = self.study
        if study is None:
            return None
        # Looked at before what it tells of: what comes meanwhile is seen in the next look.
        state = self._store.state(study.study_id)
        if state != self._state:
            study.record, self._stored = self._store.study(study.study_id), study.stored()
            self._state = state
        # Its space is set after the result of its first trial.
        described = study.record.space is not None
        final = last or study.record.status is not StudyStatus.RUNNING
        self._tell(study, self._stored, results=described or final)
        if study.conclusion is not None:
            self._listener.on_study_end(study, study.conclusion)
        return study

    def _start(self, study: FollowedStudy) -> None:
        self.study, self._state = study, None
        trials = study.stored()
        study.told += takewhile(lambda each: each.asked_at < self._since, trials)
        resumed = any(each.result is not None for each in study.told)
        self._listener.on_study_start(study, resumed=resumed)
        self._listener.on_ask_start(study)

    def _tell(self, study: FollowedStudy, trials: Sequence[TrialRecord], *, results: bool) -> None:
        """Tell of trials that were begun or have ended since the last look.

        A trial without a result before the last one, or from before this training, was lost.

        Args:
            study: The study.
            trials: All of its trials.
            results: Whether the listener may read the study after a result.
        """
        for each in trials:
            trial = Trial(each.number, each.kind, each.strategy)
            running = each is trials[-1] and each.asked_at >= self._since
            if each.number == len(study.told):
                study.told.append(replace(each, result=None, told_at=None))
                if running or each.result is not None:
                    self._began_at = time.monotonic()
                    self._listener.on_trial_start(study, trial)
            if study.told[each.number].result is not None:
                continue
            if each.result is not None and results:
                study.told[each.number] = each
                self._listener.on_trial_end(study, trial, each.result)
                if study.conclusion is None:
                    self._listener.on_ask_start(study)
            elif running and study.conclusion is None:
                progress = TrialProgress("measuring", 0, 0, time.monotonic() - self._began_at)
                self._listener.on_trial_progress(study, trial, progress)


def _unfinished(status: int | None, ended: str, again: str) -> str:
    """Return what is said of a tuning that has ended without a result."""
    if status is None:
        return f"{ended}; the training goes on; {again_live_text(again)}"
    why = f" ({ended})" if ended else ""
    return f"the training has ended before its tuning{why}; run the same call again to {again}"


def _without_study(training: Training, ended: str) -> LiveTuningError:
    """Return the error that a training is not tuned, or has ended before."""
    launched = "Leave out mode='live': then trials are launched."
    if training.refusal:
        return LiveTuningError(
            f"the training cannot be tuned in its own steps, because {training.refusal}; it has "
            "ended at its first steps",
            hint=launched,
        )
    if ended:
        return LiveTuningError(f"{ended}; the training is ended, too", hint=launched)
    return _failed(training, "before its tuning")


def _failed(training: Training, when: str) -> LiveTuningError:
    return LiveTuningError(
        f"the training has ended with status {training.status} {when}:\n{training.last_lines()}",
        hint=f"All that it has printed is in {training.output}.",
    )
