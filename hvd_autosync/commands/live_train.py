"""``horovodrun --autosync --autosync-mode live``: the training is started once, and tuned in place.

Only if it fails in a trial of its first minutes, or has gone on from a checkpoint, it is started
again, once, without that strategy. How long a trial has hung before it was ended does not count
among these minutes.
"""

from __future__ import annotations

import time
from collections.abc import Set
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from hvd_autosync.engine.options import Options, options_environment
from hvd_autosync.engine.training import Beginning, RunOutcome, run_live_training
from hvd_autosync.errors import AutosyncError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.masking import redact
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.print_line import print_line
from hvd_autosync.util.printable import shell_line
from hvd_autosync.util.variables import RESTARTED_VARIABLE

if TYPE_CHECKING:
    from hvd_autosync.search_space import Strategy
    from hvd_autosync.traces import TrialRecord

#: A training that fails in a trial which began earlier than this is started again, a script that
#: goes on from its checkpoints at any time.
_EARLY = timedelta(minutes=5)
#: Longest wait for the helper to record how a trial has ended, seconds.
_RECORD_S = 2.0


def train_live(
    job: Job,
    options: Options,
    *,
    may_refuse: bool = False,
    folder: Path | None = None,
    beginning: Beginning | None = None,
) -> RunOutcome:
    """Run the training of ``job``, tuned in its own steps; return how it ended.

    Args:
        job: The job.
        options: The options of its tuning.
        may_refuse: As for :func:`hvd_autosync.engine.training.run_live_training`.
        folder: As there.
        beginning: As there.

    Raises:
        AutosyncError: The space file or the store is unusable, or the job cannot be launched.
    """
    from hvd_autosync.engine.mode import check_what_is_read

    check_what_is_read(job, options)
    ranks = "changing ranks" if job.elastic else amount(job.world_size, "rank")
    print_line(
        f"training {shell_line(redact(job.command))} on {ranks}, tuned in its own steps: speeds "
        "that it prints meanwhile are those of trials"
    )
    variables = options_environment(options)
    begins = None if beginning is None else beginning.strategy
    restarted = False
    while True:
        began = datetime.now(timezone.utc)
        before = _known_failures(job, options, begins)
        ended = run_live_training(
            job, variables, may_refuse=may_refuse, folder=folder, beginning=beginning
        )
        if not ended.status and not ended.begun and not _has_study(job, options, begins):
            print_line(
                "nothing was tuned: rank 0 did not import horovod.torch. Only jobs with PyTorch "
                "can be tuned"
            )
        if ended.status == 0 or ended.stopped or ended.refusal or job.elastic:
            return ended
        failed = _failed_in_trial(job, options, before, begins, ended.study)
        if failed is None:
            return ended
        strategy = ", ".join(f"{name}={value}" for name, value in failed.strategy.items())
        what = f"the training failed in the trial of {strategy}"
        late = datetime.fromisoformat(failed.asked_at) - began > _EARLY
        if restarted or (late and not ended.resumed):
            print_line(f"{what}; {_again(job, options, begins, failed.strategy)}")
            return ended
        at = " from the checkpoint that it loads" if late else ""
        print_line(f"{what}, which is not tried again; starting the training again{at}")
        restarted = True
        variables[RESTARTED_VARIABLE] = failed.study_id


def _again(job: Job, options: Options, begins: Strategy | None, failed: Strategy) -> str:
    """Return how to run a job again, and what it does then.

    Args:
        job: The job.
        options: The options of its tuning.
        begins: As of :func:`hvd_autosync.engine.study_options.tuning_key`.
        failed: The strategy that has failed, which is not tried again.
    """
    if options.reuse != "never":
        return "run the same command again to tune without it"
    from hvd_autosync.engine.mode import usable_study
    from hvd_autosync.traces import TraceStore

    known = None
    with suppress(AutosyncError), closing(TraceStore(options.store)) as store:
        known = usable_study(store, job, replace(options, reuse="auto"), begins)
    if known is not None and known.winner == failed:
        return f"with --autosync-reuse auto it runs again, as the result of study {known.study_id}"
    does = "tune without it" if known is None else f"use the result of study {known.study_id}"
    return f"run the same command with --autosync-reuse auto to {does}"


def _has_study(job: Job, options: Options, begins: Strategy | None) -> bool:
    """Return whether the store has a study: rank 0 may have other files of notes than the flag."""
    from hvd_autosync.engine.study_options import load_restrictions, tuning_key
    from hvd_autosync.traces import TraceStore

    with suppress(AutosyncError), closing(TraceStore(options.store)) as store:
        restrictions = load_restrictions(options.space, options.allow)
        return bool(store.studies(job_key=tuning_key(job, options, restrictions, begins)))
    return False


def _known_failures(job: Job, options: Options, begins: Strategy | None) -> Set[tuple[str, int]]:
    """Return the trials in which earlier runs have failed, by study and number."""
    from hvd_autosync.engine.live import failed_trials

    with suppress(AutosyncError):  # whoever needs the store says so
        return failed_trials(job, options, begins).keys()
    return frozenset()


def _failed_in_trial(
    job: Job, options: Options, before: Set[tuple[str, int]], begins: Strategy | None, study: str
) -> TrialRecord | None:
    """Return the trial in which a training under ``begins`` has just failed.

    Not by its time: the clock of rank 0's host may be another.

    Args:
        job: The job.
        options: The options of its tuning.
        before: The trials in which earlier runs have failed.
        begins: As of :func:`hvd_autosync.engine.study_options.tuning_key`.
        study: Id of the training's study; another run of the same job may have failed meanwhile.
            Empty if it is not known: any.
    """
    from hvd_autosync.engine.live import failed_trials

    until = time.monotonic() + _RECORD_S
    try:
        while True:
            found = failed_trials(job, options, begins)
            for place in found.keys() - before:
                if study in ("", place[0]):
                    return found[place]
            if time.monotonic() > until:
                return None
            time.sleep(0.2)
    except AutosyncError as error:  # the training's own status says more
        print_line(f"whether it failed in a trial is not known: {error.message}")
        return None
