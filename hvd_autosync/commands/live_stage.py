"""The training after trials that have judged lossy knobs; its exact knobs are tuned live."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hvd_autosync.commands.live_train import train_live
from hvd_autosync.commands.tune_and_train import tell_drift, train_fixed
from hvd_autosync.engine.kept_fallbacks import KeptFallbacks
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.training import Beginning
from hvd_autosync.errors import AutosyncError
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Strategy
from hvd_autosync.util.print_line import print_line

if TYPE_CHECKING:
    from hvd_autosync.traces import StudyRecord


def train_on(job: Job, options: Options, record: StudyRecord, answer: str) -> int:
    """Run the training under the winner of launched trials, and tune it live; return its status.

    A training that was tuned so before starts under the result of that. Where the store cannot be
    used any more, the training keeps the winner.

    Args:
        job: The job.
        options: The options of its tuning.
        record: The finished study of the launched trials.
        answer: Its result, which is printed again after a training that keeps it.

    Raises:
        AutosyncError: As of :func:`train_live`.
    """
    from hvd_autosync.engine.live_stage import live_study, why_kept
    from hvd_autosync.engine.mode import check_what_is_read
    from hvd_autosync.engine.training_context import training_context
    from hvd_autosync.reporting import closing_lines
    from hvd_autosync.util.versions import other_versions

    why, known = why_kept(record), None
    try:
        if not why:
            check_what_is_read(job, options)
            known = live_study(job, options, record)
    except AutosyncError as error:
        why = error.message
    if why:
        print_line(f"the training keeps this strategy and is not tuned in its own steps: {why}")
        return train_fixed(job, options, record, answer)
    if known is not None:
        # Another one with this winner, older or deleted, may have been judged first.
        known = replace(known, settings={**known.settings, "judged_by": record.study_id})
        answer, trace = closing_lines(known, options.store)
        print_line(
            f"its training was tuned in its own steps before (study {known.study_id}): {answer}"
        )
        for line in other_versions(known.versions):
            print_line(line)
        status = train_fixed(job, options, known, answer)
        print_line(trace)
        return status
    if options.reuse == "only":
        return train_fixed(job, options, record, answer)
    fallbacks = KeptFallbacks(record, options)
    beginning = Beginning(
        record.winner or Strategy(),
        record.study_id,
        training_context(record, options.store),
        fallbacks.keep,
    )
    ended = train_live(job, replace(options, mode="live"), beginning=beginning)
    for line in fallbacks.lines(job):
        print_line(line)
    if ended.drift:
        print_line(tell_drift(record, options, ended.drift))
    return ended.status
