"""One run of a recurring job: choose its share, run it, record its outcome.

::

    store: runs so far -> search -> share -> training under it -> outcome -> store

The knobs other than the protocol are those of the job's first run: those of the winner that was
known then, or the defaults. So runs differ only in their share, unless the loss guard has ended
the lossy knobs since, or the options no longer admit them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from hvd_autosync.engine.compatibility import why_not_admitted
from hvd_autosync.engine.kept_fallbacks import KeptFallbacks
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import excluded_for, load_restrictions, tuning_key
from hvd_autosync.engine.training import RunOutcome, RunReport, TrainingContext, run_training
from hvd_autosync.engine.training_context import training_context
from hvd_autosync.errors import AutosyncError, SpaceError, StoreError
from hvd_autosync.launch.job import Job
from hvd_autosync.recurring import SEARCHES
from hvd_autosync.recurring.outcomes import NextShare, RecurringOutcome, SearchSettings
from hvd_autosync.search_space import CATALOGUE, Strategy
from hvd_autosync.search_space.catalogue import is_exact
from hvd_autosync.study.fallbacks import is_excluded, without_excluded
from hvd_autosync.traces import StudyRecord, TraceStore
from hvd_autosync.traces.location import check_creatable, store_option
from hvd_autosync.traces.records import timestamp
from hvd_autosync.traces.runs import RunRecord
from hvd_autosync.util.amounts import four_digits
from hvd_autosync.util.print_line import print_line

#: Exit statuses after SIGHUP, SIGINT, SIGKILL or SIGTERM; other nonzero ones are crashes.
_STOPPED = frozenset({129, 130, 137, 143})
#: A completed run with less than this share of the samples of the runs before was not a whole one.
_WHOLE = 0.95
#: Reason for a run with BSP only, although the search wants another share.
_UNCOUNTED = (
    "BSP only, because no run could count its samples. Use a torch.utils.data.DataLoader with a "
    "length, and with a batch_size or batches whose tensors all have the samples as their first "
    "dimension"
)


@dataclass(frozen=True)
class Plan:
    """The plan of the next run.

    Attributes:
        decision: Its share, and the reason.
        strategy: Its strategy.
        context: Its training context.
        number: Number of the run, from 1.
        total: Samples of all the work; 0: unknown.
        judged: The study that has admitted the lossy knobs other than the protocol, with them as
            its winner; ``None`` without such knobs.
        notice: Why the lossy knobs of the first run, or of the winner for it, are left out; empty
            if they are not.
    """

    decision: NextShare
    strategy: Strategy
    context: TrainingContext
    number: int
    total: int
    judged: StudyRecord | None = None
    notice: str = ""


def search_settings(options: Options) -> SearchSettings:
    """Return the settings of the search."""
    return SearchSettings(options.target, options.tolerance, options.repeats)


def outcomes_of(runs: Sequence[RunRecord]) -> list[RecurringOutcome]:
    """Return the outcomes for a search.

    Completed runs with another kind of metric than the last one are left out, and a failed run
    whose share has not failed before: it may have failed for another reason, so the share is tried
    once more. Times are those of as many samples as the last run had: the data may have grown.
    """
    sources = [each.source for each in runs if each.status == "completed"]
    total = _total(runs)
    found, failed = list[RecurringOutcome](), set[float]()
    for each in runs:
        counts = each.status != "completed" or each.source == sources[-1]
        if each.status == "failed" and each.share not in failed:
            failed.add(each.share)
            counts = each.share == 1  # the search has its own rule for those with BSP only
        if counts:
            seconds = each.seconds * (total / each.samples if each.samples else 1)
            planned = float(each.strategy.get("sync_share", 1.0))
            outcome = RecurringOutcome(each.share, each.metric, seconds, each.status, planned)
            found.append(outcome)
    return found


def _total(runs: Sequence[RunRecord]) -> int:
    """Return the samples of all the work, as the last run has counted them; 0: unknown."""
    return next((each.samples for each in reversed(runs) if each.samples), 0)


def plan_run(job: Job, options: Options, store: TraceStore) -> Plan:
    """Plan the next run of ``job`` from the runs in the store."""
    runs = store.runs(job.key)
    search = SEARCHES[options.search](search_settings(options))
    decision = search.next_share(outcomes_of(runs))
    restrictions = load_restrictions(options.space, options.allow)
    study = store.find_finished(tuning_key(job, options, restrictions))
    excluded: tuple[Strategy, ...] = ()
    if study is not None:
        excluded = excluded_for(store, job, options, restrictions)
        study = without_excluded(study, excluded)
    wanted = [each.strategy for each in runs[:1]]
    if study is not None and study.winner is not None:
        wanted.append(study.winner)
    wanted = [strategy_at(each, 1, 0) for each in (*wanted, Strategy())]
    reasons = [_why_left_out(each, study, excluded, options) for each in wanted]
    base = wanted[reasons.index("")]
    of = "first run" if runs else "winner"
    notice = reasons[0] and f"lossy knobs of the {of} are left out: {reasons[0]}"
    judged = None if study is None or is_exact(base) else replace(study, winner=base)
    # Losses are predicted for what it trains under; a newer study may have another winner.
    known = judged or study
    context = TrainingContext() if known is None else training_context(known, store)
    # The measured step time does not apply to steps without a barrier, so it is left out.
    context = TrainingContext(context.classes, context.loss_prediction)
    total = _total(runs)
    if 0 < decision.share < 1 and not total:
        decision = NextShare(1.0, False, _UNCOUNTED)
    strategy = strategy_at(base, decision.share, total)
    return Plan(decision, strategy, context, len(runs) + 1, total, judged, notice)


def _why_left_out(
    base: Strategy, study: StudyRecord | None, excluded: Collection[Strategy], options: Options
) -> str:
    """Return why no run may use the knobs ``base``; empty if one may."""
    if is_exact(base):
        return ""
    if study is None:
        return "no finished study of this job under these options has judged them"
    if is_excluded(base, excluded, study.space):
        return "the loss guard has ended them"
    try:
        return why_not_admitted(study, options, base)
    except SpaceError:
        return "the last study of this job has not judged them"


def strategy_at(base: Strategy, share: float, total: int) -> Strategy:
    """Return ``base`` with that share of the work under BSP, then ASP.

    Args:
        base: The other knobs.
        share: Share of the work.
        total: Samples of all the work; 0: unknown.
    """
    protocol = {knob.name for knob in CATALOGUE if knob.group == "protocol"}
    kept = Strategy({name: value for name, value in base.items() if name not in protocol})
    if share == 1:
        return kept
    kept = kept.replacing(protocol="asp", sync_share=float(share))
    return kept.replacing(total_samples=total) if total else kept


def run_recurring(job: Job, options: Options) -> int:
    """Run ``job`` once with the share that the search chose, and store its outcome.

    Returns:
        The exit status of the training.

    Raises:
        AutosyncError: The store cannot be used before the run, or the job cannot be launched.
    """
    plans = options.tune_only or options.dry_run
    store = TraceStore(options.store, create=not plans, or_empty=True)
    if options.dry_run:
        check_creatable(options.store)
    next_run = plan_run(job, options, store)
    print_line(_beginning(job, options, next_run))
    if next_run.notice:
        print_line(next_run.notice)
    if plans:
        return 0
    began = time.monotonic()
    # Under ASP it may be the protocol that failed; the lossy knobs are left out to be safe.
    kept = None if next_run.judged is None else KeptFallbacks(next_run.judged, options)
    ended = run_training(
        job,
        next_run.strategy,
        next_run.context,
        recurring=True,
        on_fallback=None if kept is None else kept.keep,
    )
    seconds = time.monotonic() - began
    for line in () if kept is None else kept.lines(job):
        print_line(line)
    run = record_of(job, next_run, ended, seconds)
    if run is None:
        print_line(
            f"run {next_run.number} is not counted: {_why_not(job, options, next_run, ended)}"
        )
        return ended.status
    print_line(_result(run, next_run.number))
    if run.samples and run.share != next_run.decision.share:
        print_line(
            f"it trained on {run.samples} samples instead of {next_run.total}, so f was "
            f"{run.share:.4g}; the next runs switch by as many samples"
        )
    print_line(_keep_run(run, job, options, store))
    return ended.status


def _keep_run(run: RunRecord, job: Job, options: Options, store: TraceStore) -> str:
    """Record a run in the store, and plan the next one; return the message."""
    try:
        store.keep_run(run)
    except StoreError as error:
        return f"this run could not be recorded in the store: {error.message}. {error.hint}"
    kept = f"recorded in {store.name}"
    try:
        after = plan_run(job, options, store).decision
    except AutosyncError as error:
        return f"{kept}; the next run could not be planned: {error.message}. {error.hint}"
    what = "found" if after.final else "the next run tries"
    return f"{kept}; {what} f = {after.share:.4g}: {after.reason}"


def record_of(job: Job, plan: Plan, ended: RunOutcome, seconds: float) -> RunRecord | None:
    """Return the record of a run; ``None`` if the run does not count for its share."""
    report = ended.report or RunReport()
    if _was_stopped(ended) or report.resumed:
        return None
    metric, source, status = math.nan, "script", "completed"
    if report.metric is not None:
        metric = report.metric
    elif report.loss is not None:
        metric, source = -report.loss, "loss"
    if ended.status:
        metric, status = math.nan, "failed"
    elif (report.metric is None and report.loss is None) or not _was_tried(plan, report):
        return None
    elif report.fell_back or not math.isfinite(metric):
        # After a fallback the final metric belongs to the exact strategy, not to this share.
        metric, status = math.nan, "diverged"
    elif _is_part(plan, report):
        return None
    return RunRecord(
        job.key,
        plan.number - 1,
        job.display(),
        timestamp(),
        plan.strategy,
        _share_of(plan, report),
        metric,
        source,
        seconds,
        report.samples if status == "completed" else 0,
        status,
    )


def _beginning(job: Job, options: Options, plan: Plan) -> str:
    decision, what = plan.decision, f"run {plan.number} of job {job.key} ({options.search} search)"
    if decision.final:
        what += ", which has ended"
    return f"{what}: f = {decision.share:.4g} of the work under BSP: {decision.reason}"


def _was_stopped(ended: RunOutcome) -> bool:
    return ended.stopped or ended.status in _STOPPED


def _was_tried(plan: Plan, report: RunReport) -> bool:
    # The loss guard may have ended it before the switch: another run would end so, too, unless what
    # it has ended, a lossy codec or schedule, is left out then.
    ended = report.fell_back and plan.judged is None
    return plan.decision.share == 1 or report.without_barrier or ended


def _is_part(plan: Plan, report: RunReport) -> bool:
    """Return whether a run has left out some of the work, as one from a checkpoint does."""
    return 0 < report.samples < _WHOLE * plan.total


def _share_of(plan: Plan, report: RunReport) -> float:
    """Return the share of its work that a run has done under BSP.

    It switches after a number of samples. Where a job has grown, they are a smaller share.
    """
    planned = plan.decision.share
    if 0 < planned < 1 and _WHOLE * report.samples > plan.total:
        return planned * plan.total / report.samples
    return planned


def _why_not(job: Job, options: Options, plan: Plan, ended: RunOutcome) -> str:
    if _was_stopped(ended):
        return "it was stopped"
    if ended.report is not None and ended.report.resumed:
        return (
            "it went on from a checkpoint: an optimizer has loaded its state before the first "
            "step, so it was no whole run. Only runs from the beginning count"
        )
    if ended.report is not None and not _was_tried(plan, ended.report):
        if ended.report.fell_back:
            return (
                "the loss guard has ended a lossy strategy in its synchronous part, which the next "
                "run is without"
            )
        return (
            "all of its steps were synchronous. A DistributedOptimizer with compression, groups or "
            "a process set always is, and other ones are until every rank has seen an epoch end"
        )
    if ended.report is not None and _is_part(plan, ended.report):
        return (
            f"it trained on {ended.report.samples} samples, and a whole run on {plan.total}. If "
            "the job has become shorter, let its search begin again: hvd-autosync recurring "
            f"{job.key} --forget{store_option(options.store)}"
        )
    return (
        "it reported no metric. Call hvd_autosync.outcome(metric) at the end of the script, and "
        "let rank 0 run on this host"
    )


def _result(run: RunRecord, number: int) -> str:
    line = f"run {number}: {four_digits(run.seconds)} s, "
    if run.status != "completed":
        line += run.status
    elif run.source == "script":
        line += f"metric {run.metric:.6g}"
    else:
        line += (
            f"metric {run.metric:.6g}: minus its last training losses on rank 0, because the "
            "script reports no metric: call hvd_autosync.outcome(metric) at its end"
        )
    return line
