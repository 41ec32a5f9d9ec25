"""``hvd_autosync.tune(..., mode="live")``: a training is started, and its tuning followed."""

from __future__ import annotations

from dataclasses import replace

from hvd_autosync.api.following import Follower
from hvd_autosync.api.training import Training
from hvd_autosync.engine.live_stage import live_study, why_kept
from hvd_autosync.engine.mode import check_what_is_read, known_study, why_not_live
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import load_restrictions
from hvd_autosync.engine.tuning import Listener
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.signals import signals_deferred
from hvd_autosync.reporting.words import again_live_text
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore


def tune_live(job: Job, options: Options, listener: Listener) -> tuple[StudyRecord, Training]:
    """Start a training, tuned in its own steps; return its study once its tuning has ended.

    A job that was tuned before is started under that result, and returned at once. A Stop of the
    listener, an interrupt and an exception of the listener end the tuning and not the training.

    Args:
        job: The job.
        options: The options of its tuning.
        listener: Receives the events.

    Raises:
        AutosyncError: The training cannot be tuned in its own steps, or has failed before.
        KeyboardInterrupt: An interrupt before the study began, which has ended the training.
    """
    options = replace(options, mode="live")
    known = judged = known_study(job, options)
    if judged is None:
        check_what_is_read(job, options)
        _check(job, options)
    elif options.allow and not why_kept(judged):
        known = live_study(job, options, judged) or judged
    store = TraceStore(options.store)
    follower = Follower(store, listener, options.again)
    training = Training(job, options, known.study_id if known else "")
    try:
        listener.on_notice(f"the training starts; what it prints goes to {training.output}")
        if known is not None:
            listener.on_notice(
                f"this job was tuned before: it trains under the result of study {known.study_id}"
            )
            return known, training
        return follower.until_ended(training), training
    except BaseException as error:
        study = follower.study
        if study is None:
            training.stop()
            raise
        with signals_deferred():  # a second interrupt
            _leave(study, training, listener, options.again)
        if isinstance(error, KeyboardInterrupt):
            return study.record, training
        raise


def _leave(study: AskTellStudy, training: Training, listener: Listener, again: str) -> None:
    """Let a training that is not followed any more go on, and its tuning end.

    Args:
        study: Its study.
        training: The training.
        listener: Receives a notice.
        again: What the same call does then.
    """
    if training.status is not None or study.record.status is StudyStatus.FINISHED:
        return
    training.end_tuning()
    listener.on_notice(
        "the tuning ends once its running trial has ended; the training goes on, as "
        f"hvd_autosync.Study.load({study.study_id!r}).training; {again_live_text(again)}"
    )


def _check(job: Job, options: Options) -> None:
    """Check, as far as this is known before the start, that a training can be tuned.

    Raises:
        ConfigurationError: It cannot.
    """
    if options.reuse == "only":
        raise ConfigurationError(
            "this store has no finished study of this job, and reuse is 'only'",
            hint="Tune once with reuse='auto', or check the store.",
        )
    if reason := why_not_live(job, options, load_restrictions(options.space, options.allow)):
        raise ConfigurationError(
            f"this training cannot be tuned in its own steps: {reason}",
            hint="Leave out mode='live': then trials are launched.",
        )
