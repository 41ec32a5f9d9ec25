"""One run of a recurring job: what earlier runs say it should try, the run, what it came to.

::

    store: runs so far -> search -> share -> training under it -> outcome -> store

The knobs beside the protocol are those of the job's first run: a winner that was known then, or
none. So runs differ by their share alone.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_autosync.engine.options import Options
from hvd_autosync.engine.training import RunOutcome, RunReport, TrainingContext, run_training
from hvd_autosync.engine.training_context import training_context
from hvd_autosync.engine.tuning import load_restrictions, tuning_key
from hvd_autosync.launch.job import Job
from hvd_autosync.recurring import SEARCHES
from hvd_autosync.recurring.outcomes import Decision, Outcome, Settings
from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.catalogue import PROTOCOL_KNOBS
from hvd_autosync.study.fallbacks import left_strategies, without_left
from hvd_autosync.traces import TraceStore
from hvd_autosync.traces.records import timestamp
from hvd_autosync.traces.runs import RunRecord
from hvd_autosync.util.printable import printable

#: Exit statuses of who was ended by SIGHUP, SIGINT, SIGKILL or SIGTERM; others are of crashes.
_STOPPED = frozenset({129, 130, 137, 143})
#: Why a run is under BSP alone that should not be.
_UNCOUNTED = (
    "no run could count its samples, so a part of them cannot be told; feed the training by a "
    "torch.utils.data.DataLoader with a batch_size, or whose batches are tensors"
)


@dataclass(frozen=True)
class Plan:
    """What the next run does.

    Attributes:
        decision: Its share, and why.
        strategy: What it runs under.
        known: What is known of it.
        number: Counts the runs of the job from 1.
    """

    decision: Decision
    strategy: Strategy
    known: TrainingContext
    number: int


def settings_of(options: Options) -> Settings:
    """What is searched for."""
    return Settings(options.target, options.tolerance, options.repeats)


def outcomes_of(runs: Sequence[RunRecord]) -> list[Outcome]:
    """The runs as a search sees them: only those whose metric is of the kind of the last one's."""
    sources = [each.source for each in runs if each.status == "completed"]
    return [
        Outcome(each.share, each.metric, each.seconds, each.status)
        for each in runs
        if each.status != "completed" or each.source == sources[-1]
    ]


def plan(job: Job, options: Options, store: TraceStore) -> Plan:
    """What the next run of ``job`` does, from those that are in the store."""
    runs = store.runs(job.key)
    search = SEARCHES[options.search](settings_of(options))
    decision = search.next_share(outcomes_of(runs))
    study = store.find_finished(tuning_key(job, options, load_restrictions(options.space)))
    if study is not None:
        study = without_left(study, left_strategies(store, study.job_key))
    base = Strategy() if study is None or study.winner is None else study.winner
    if runs:
        base = runs[0].strategy
    known = TrainingContext() if study is None else training_context(study, store)
    # Steps without a barrier take as long as they take: nothing is slower than it was measured.
    known = TrainingContext(known.classes, known.loss_prediction)
    total = next((each.samples for each in reversed(runs) if each.samples), 0)
    if 0 < decision.share < 1 and not total:
        decision = Decision(1.0, False, _UNCOUNTED)
    strategy = strategy_at(base, decision.share, total)
    return Plan(decision, strategy, known, len(runs) + 1)


def strategy_at(base: Strategy, share: float, total: int) -> Strategy:
    """``base`` with that share of the work under BSP, and ASP after it.

    Args:
        base: The other knobs.
        share: Of the work.
        total: Samples of all of it; 0: unknown.
    """
    protocol = {knob.name for knob in PROTOCOL_KNOBS}
    kept = Strategy({name: value for name, value in base.items() if name not in protocol})
    if share == 1:
        return kept
    kept = kept.replacing(protocol="asp", sync_share=float(share))
    return kept.replacing(total_samples=total) if total else kept


def run_recurring(job: Job, options: Options) -> int:
    """Run ``job`` once, as its earlier runs say, and write down what it came to.

    Returns:
        The exit status of the training.

    Raises:
        AutosyncError: The store cannot be used, or the job cannot be launched.
    """
    store = TraceStore(options.store)
    next_run = plan(job, options, store)
    _say(_beginning(job, options, next_run))
    if options.tune_only or options.dry_run:
        return 0
    began = time.monotonic()
    ended = run_training(job, next_run.strategy, next_run.known, tallied=True)
    seconds = time.monotonic() - began
    run = record_of(job, next_run, ended, seconds)
    if run is None:
        _say(f"run {next_run.number} is not counted: {_why_not(next_run, ended)}")
        return ended.status
    store.keep_run(run)
    _say(_came_to(run, next_run.number, store))
    after = plan(job, options, store).decision
    what = "found" if after.final else "the next run tries"
    _say(f"{what} f = {after.share:.4g}: {after.reason}")
    return ended.status


def record_of(job: Job, plan: Plan, ended: RunOutcome, seconds: float) -> RunRecord | None:
    """What is written down of a run; ``None`` where it says nothing of its share."""
    said = ended.outcome or RunReport()
    metric, source, status = math.nan, "script", "completed"
    if said.metric is not None:
        metric = said.metric
    elif said.loss is not None:
        metric, source = -said.loss, "loss"
    if ended.status:
        if _was_stopped(ended):
            return None
        metric, status = math.nan, "failed"
    elif (said.metric is None and said.loss is None) or not _was_tried(plan, said):
        return None
    elif said.fell_back or not math.isfinite(metric):
        # What it came to in the end it came to exactly.
        metric, status = math.nan, "diverged"
    return RunRecord(
        job.key,
        plan.number - 1,
        job.display(),
        timestamp(),
        plan.strategy,
        plan.decision.share,
        metric,
        source,
        seconds,
        said.samples if status == "completed" else 0,
        status,
    )


def _beginning(job: Job, options: Options, plan: Plan) -> str:
    decision, what = plan.decision, f"run {plan.number} of job {job.key} ({options.search} search)"
    if decision.final:
        what += ", which is over"
    return f"{what}: f = {decision.share:.4g} of the work under BSP: {decision.reason}"


def _was_stopped(ended: RunOutcome) -> bool:
    return ended.stopped or ended.status in _STOPPED


def _was_tried(plan: Plan, said: RunReport) -> bool:
    return plan.decision.share == 1 or said.without_barrier


def _why_not(plan: Plan, ended: RunOutcome) -> str:
    if _was_stopped(ended):
        return "it was stopped"
    if ended.outcome is not None and not _was_tried(plan, ended.outcome):
        return (
            "ranks have waited for each other in all of its steps. A DistributedOptimizer with "
            "compression, groups or a process set keeps its own ways, and ranks go on to wait "
            "until all of them see the ends of their passes"
        )
    return (
        "nothing is known of what it came to. Call hvd_autosync.outcome(metric) at the end of the "
        "script, and let rank 0 run on this host"
    )


def _came_to(run: RunRecord, number: int, store: TraceStore) -> str:
    came = f"run {number} took {run.seconds:.4g} s and "
    if run.status != "completed":
        came += run.status
    elif run.source == "script":
        came += f"came to {run.metric:.6g}"
    else:
        came += (
            f"came to {run.metric:.6g}, minus its last training losses on rank 0, for the script "
            "says nothing else: call hvd_autosync.outcome(metric) at its end"
        )
    return f"{came} (in {store.name})"


def _say(text: str) -> None:
    print(f"hvd-autosync: {printable(text)}", file=sys.stderr, flush=True)
