"""The ``--autosync`` option of ``horovodrun``: parse it, then tune the job and train.

:func:`extend_launcher` is called once Horovod's launcher module has been loaded. It adds our
options to Horovod's own parser and replaces ``_run`` for jobs with ``--autosync``; all other jobs
run unchanged.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hvd_autosync.engine.job_line import extend_parser, parse_words, read_job
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.preflight import (
    check_command,
    check_controller,
    check_hosts,
    start_driver_log,
)
from hvd_autosync.errors import AutosyncError
from hvd_autosync.launch.facts import horovod_build
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.lost_trials import revert_lost_trials
from hvd_autosync.launch.masking import redact
from hvd_autosync.launch.signals import stop_on_signals
from hvd_autosync.util import patches
from hvd_autosync.util.print_line import print_error, print_line
from hvd_autosync.util.printable import printable_output
from hvd_autosync.util.streams import drop_unwritable, unwritable_output


class _Stopped(KeyboardInterrupt):
    """Ctrl-C; its text says what the same command does then."""


def extend_launcher() -> None:
    """Add ``--autosync`` to ``horovod.runner.launch``."""
    extend_parser()
    patches.install("launcher", _tuning)


def _tuning(run_unchanged: Callable[[argparse.Namespace], Any]) -> Callable[..., object]:
    def run(arguments: argparse.Namespace) -> object:
        if not getattr(arguments, "autosync", False):
            return run_unchanged(arguments)
        sys.exit(guarded(lambda: autosync(arguments, sys.argv[1:])))

    return run


def guarded(action: Callable[[], int]) -> int:
    """Run ``action``; report our errors and Ctrl-C as a message and an exit status."""
    stop_on_signals()
    try:
        with printable_output():
            status = action()
            sys.stdout.flush()  # otherwise a full disk is noticed when Python ends
            return status
    except AutosyncError as error:
        print_error(error)
        return error.exit_status
    except OSError as error:
        if not (said := unwritable_output(error)):
            raise
        print_error(said)
        return 1
    except KeyboardInterrupt as stop:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the cleanup is done
        again = f"; run the same command again to {stop}" if isinstance(stop, _Stopped) else ""
        print_line(f"stopped{again}")
        return 130
    finally:
        drop_unwritable(sys.stderr)


def autosync(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """Tune the job of a parsed ``horovodrun`` line, then run it.

    Args:
        arguments: ``words`` as parsed by Horovod.
        words: The command line after ``horovodrun``.

    Returns:
        The exit status of the training, or 0 after tuning only.
    """
    start_driver_log()
    job, options = read_job(arguments, words)
    try:
        return _tune_or_train(job, options)
    except KeyboardInterrupt as stop:
        tunes = not (options.dry_run or options.strategy or options.replay or options.recurring)
        if not tunes or options.reuse == "only":
            raise
        raise _Stopped(options.again) from stop


def _tune_or_train(job: Job, options: Options) -> int:
    check_command(job)
    if not options.dry_run:
        revert_lost_trials(print_line)
    if options.recurring:
        from hvd_autosync.recurring.runs import run_recurring

        if not options.dry_run:
            check_hosts(job)
        return run_recurring(job, options)
    if options.dry_run:
        horovod_build()  # raises if torch, which the tuner needs too, cannot be imported
        from hvd_autosync.reporting import print_plan

        print_plan(job, options)
        return 0
    if options.strategy is not None:
        return _run_file(job, options)
    if options.replay is not None:
        return _run_winner(job, options, options.replay)
    check_hosts(job)
    check_controller(job)
    if job.elastic:
        from hvd_autosync.commands.live_train import train_live

        return train_live(job, options).status
    if options.mode == "live":
        from hvd_autosync.commands.auto_train import train_live_or_tuned

        return train_live_or_tuned(job, options)
    if options.mode == "auto":
        from hvd_autosync.commands.auto_train import train_auto

        return train_auto(job, options)
    from hvd_autosync.commands.tune_and_train import tune_and_train

    return tune_and_train(job, options)


def _run_file(job: Job, options: Options) -> int:
    """Run ``job`` under the strategy of a file."""
    from hvd_autosync.engine.study_options import tuning_keys
    from hvd_autosync.engine.training import TrainingContext, run_training
    from hvd_autosync.engine.training_context import known_model, predicted_losses
    from hvd_autosync.search_space.documents import read_toml
    from hvd_autosync.search_space.strategy_file import check_fits, check_model, read_strategy
    from hvd_autosync.search_space.sync_plan import beyond_horovod
    from hvd_autosync.search_space.trial import LossPrediction

    assert options.strategy is not None
    strategy, classes = read_strategy(read_toml(options.strategy, "the strategy file"))
    check_fits(strategy, job.hosts, job.chosen)
    if "controller" in strategy:
        check_controller(job, strategy["controller"])
    prediction = LossPrediction()
    if beyond_horovod(strategy):  # then the workers need this package
        check_hosts(job)
        line = redact(job.command)
        model = known_model(options.store, line)
        if model is not None:
            check_model(strategy, classes, model)
        prediction = predicted_losses(options.store, tuning_keys(job), strategy)
    return run_training(job, strategy, TrainingContext(classes, prediction)).status


def _run_winner(job: Job, options: Options, trace: str) -> int:
    """Run ``job`` under the winner of a recorded study.

    If it is known to be the job of that study, the study learns of a fallback of the loss guard and
    of drift. An anonymous study does not say whose it is, and no later run of the job reads it.
    """
    from dataclasses import replace

    from hvd_autosync.commands.tune_and_train import train_under_winner
    from hvd_autosync.engine.compatibility import classes_for, differences, winner_for
    from hvd_autosync.engine.training import run_training
    from hvd_autosync.engine.training_context import training_context
    from hvd_autosync.reporting import answer_line
    from hvd_autosync.search_space.sync_plan import beyond_horovod
    from hvd_autosync.study.fallbacks import known_fallback
    from hvd_autosync.traces.anonymous import is_anonymous
    from hvd_autosync.traces.opening import open_trace
    from hvd_autosync.util.versions import other_versions

    store, study = open_trace(trace, options.store)
    strategy, classes = winner_for(study, job), classes_for(study, job, options.store)
    if beyond_horovod(strategy):  # then the workers need this package
        check_hosts(job)
    print_line(f"study {study.study_id}: {answer_line(study)}")
    if ended := known_fallback(store, study):
        print_line(ended)
    others_job = list(differences(study, job))
    apart = [*others_job, *other_versions(study.versions)]
    for line in apart:
        print_line(line)
    context = replace(training_context(study, store), classes=classes)
    if apart:  # the recorded step time may not apply here
        context = replace(context, expected_step_s=0.0)
    if not others_job and not is_anonymous(study):
        return train_under_winner(job, options, study, context)
    return run_training(job, strategy, context).status


def tune_command(words: Sequence[str]) -> int:
    """``hvd-autosync tune``: tune the job of a ``horovodrun`` line without the training."""
    return guarded(lambda: autosync(parse_words(["--autosync-tune-only", *words]), words))


def run_command(path: str, words: Sequence[str]) -> int:
    """``hvd-autosync run``: run the job of a ``horovodrun`` line under the strategy of a file."""
    chosen = ["--autosync-strategy", path]
    return guarded(lambda: autosync(parse_words([*chosen, *words]), words))


def space_command(words: Sequence[str]) -> int:
    """``hvd-autosync space``: print the space and the plan of a ``horovodrun`` line."""
    return guarded(lambda: autosync(parse_words(["--autosync-dry-run", *words]), words))
