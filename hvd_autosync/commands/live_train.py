"""``horovodrun --autosync --autosync-mode live``: the training is started once, and tuned in place.

Only if it fails in a trial of its first minutes it is started again, once, without that strategy.
"""

from __future__ import annotations

import sys
import time

from hvd_autosync.engine.options import Options, options_environment
from hvd_autosync.engine.training import RunOutcome, run_live_training
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.masking import redact
from hvd_autosync.util.printable import printable, shell_line

#: A training that fails in a trial earlier than this is started again, seconds.
_EARLY_S = 300.0
#: Longest wait for the helper to record how a trial has ended, seconds.
_RECORD_S = 2.0


def train_live(job: Job, options: Options, *, may_refuse: bool = False) -> RunOutcome:
    """Run the training of ``job``, tuned in its own steps; return how it ended.

    Args:
        job: The job.
        options: The options of its tuning.
        may_refuse: As for :func:`hvd_autosync.engine.training.run_live_training`.

    Raises:
        AutosyncError: The job cannot be launched.
    """
    _say(
        f"training {shell_line(redact(job.command))} on {job.world_size} ranks, tuned in its own "
        "steps: speeds that it prints meanwhile are those of trials"
    )
    variables = options_environment(options)
    began, since = time.monotonic(), _now()
    ended = run_live_training(job, variables, may_refuse=may_refuse)
    if not ended.status and not ended.begun:
        _say(
            "nothing was tuned: rank 0 did not import horovod.torch. Only jobs with PyTorch can be "
            "tuned"
        )
    if ended.status == 0 or ended.stopped or ended.refusal:
        return ended
    strategy = _failed_in_trial(job, options, since)
    if strategy is None:
        return ended
    what = f"the training failed in the trial of {strategy}, which is not tried again"
    if time.monotonic() - began > _EARLY_S:
        _say(f"{what}; run the same command again to resume")
        return ended
    _say(f"{what}; starting the training again")
    return run_live_training(job, variables, may_refuse=may_refuse)


def _failed_in_trial(job: Job, options: Options, since: str) -> str | None:
    """The strategy in whose trial the training has failed, for people."""
    from hvd_autosync.engine.live import failed_trial

    until = time.monotonic() + _RECORD_S
    while (strategy := failed_trial(job, options, since)) is None and time.monotonic() < until:
        time.sleep(0.2)
    return (
        None
        if strategy is None
        else ", ".join(f"{name}={value}" for name, value in strategy.items())
    )


def _now() -> str:
    from hvd_autosync.traces.records import timestamp

    return timestamp()


def _say(line: str) -> None:
    print(f"hvd-autosync: {printable(line)}", file=sys.stderr, flush=True)
