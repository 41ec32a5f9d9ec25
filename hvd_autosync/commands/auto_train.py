"""``horovodrun --autosync``, as it is by default: live trials if possible, else launched ones.

Lossy groups are judged by launched trials, and the training that follows is tuned live.
What keeps a job from that is known before the training begins, or its ranks find it at their first
steps. They end then, and launched trials and the training follow. ``--autosync-mode live`` is here,
too: a job that was tuned before is only trained.
"""

from __future__ import annotations

from dataclasses import replace

from hvd_autosync.commands.live_stage import train_on
from hvd_autosync.commands.live_train import train_live
from hvd_autosync.commands.tune_and_train import tune_and_train
from hvd_autosync.engine.options import Options
from hvd_autosync.launch.job import Job
from hvd_autosync.util.print_line import print_line


def train_auto(job: Job, options: Options) -> int:
    """Tune ``job`` where that is possible, and train; return the exit status.

    Raises:
        AutosyncError: As of :func:`train_live` and :func:`tune_and_train`.
        KeyboardInterrupt: Ctrl-C, as of :func:`tune_and_train`.
    """
    from hvd_autosync.engine.live_stage import UNLESS_KEPT, has_live_stage
    from hvd_autosync.engine.mode import why_launched

    reason, launched = why_launched(job, options), replace(options, mode="launched")
    if reason is None:
        ended = train_live(job, replace(options, mode="live"), may_refuse=True)
        if not ended.refusal or ended.stopped:
            return ended.status
        print_line(
            f"the training cannot be tuned in its own steps, because {ended.refusal}; it has ended "
            "at its first steps and starts again after launched trials"
        )
        return tune_and_train(job, launched)
    staged = has_live_stage(job, options)
    if reason:
        then = "; then the training is tuned in its own steps, under what they find"
        print_line(f"trials are launched: {reason}" + f"{then}, {UNLESS_KEPT}" * staged)
    return tune_and_train(job, launched, train_on) if staged else tune_and_train(job, launched)


def train_live_or_tuned(job: Job, options: Options) -> int:
    """Train ``job`` tuned live, or under the winner of an earlier study; return the exit status.

    Raises:
        AutosyncError: As of :func:`train_live` and :func:`tune_and_train`.
        KeyboardInterrupt: Ctrl-C, as of :func:`tune_and_train`.
    """
    from hvd_autosync.engine.mode import only_trains

    if only_trains(job, options):
        return tune_and_train(job, replace(options, mode="launched"))
    return train_live(job, options).status
