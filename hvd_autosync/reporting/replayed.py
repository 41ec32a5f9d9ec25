"""Output of ``hvd-autosync replay``: verification, and reruns by other learners."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from hvd_autosync.reporting.listing import plain_table
from hvd_autosync.reporting.words import speedup_text
from hvd_autosync.study.knob_order import with_knob_order
from hvd_autosync.study.related_studies import named_sources
from hvd_autosync.study.stage_budget import explored
from hvd_autosync.traces import StudyRecord, TraceStore, TrialRecord
from hvd_autosync.util.amounts import amount, be, four_digits

if TYPE_CHECKING:
    from hvd_autosync.engine.replay import Check, Rerun

_AFTER = (5, 10, 20, 40)


def missing_sources(traces: TraceStore, trials: Sequence[TrialRecord]) -> Iterator[str]:
    """Yield a line if the study learned from studies that are not in the store."""
    here = set(traces.ids())
    if missing := [name for name in named_sources(trials) if name not in here]:
        count = len(missing)
        yield (
            f"the study learned from {amount(count, 'study')} that {be(count)} not in this store "
            f"({', '.join(missing)}); export them together: "
            "hvd-autosync traces export --related"
        )


def differences_table(study: StudyRecord, checks: Sequence[Check]) -> Table:
    """Return the decisions that differ from the recorded ones."""
    study = with_knob_order(study)
    assert study.space is not None, "verification has checked"
    table = plain_table("trial", "kind", "recorded", "now", "distance", "")
    for check in checks:
        now = "" if check.again is None else study.space.describe(check.again)
        apart = "" if check.again is None else f"{check.distance:.3g}"
        recorded = study.space.describe(check.recorded)
        table.add_row(str(check.number), check.kind, recorded, now, apart, check.note)
    table.caption = (
        "Distance: each categorical knob that differs counts 1, each numeric knob the difference "
        "as a share of its range."
    )
    table.caption_justify = "left"
    return table


def reruns_table(
    study: StudyRecord, trials: Sequence[TrialRecord], reruns: Sequence[Rerun]
) -> Iterator[Table | str]:
    """Yield what learners would have found on the recorded measurements: medians over the seeds."""
    from hvd_autosync.engine.replay import default_ms

    assert study.space is not None, "a rerun needs a space"
    base = default_ms(trials)
    count = max(len(each.best_ms) for each in reruns)
    after = [n for n in _AFTER if n < count] + [count]
    table = plain_table("learner", *(f"after {n}" for n in after), "step ms", "exact", "distance")
    for name in dict.fromkeys(each.learner for each in reruns):
        own = [each for each in reruns if each.learner == name]
        cells = []
        for n in after:
            at = [base / each.best_ms[min(n, len(each.best_ms)) - 1] for each in own]
            cells.append(speedup_text(statistics.median(at)))
        last = statistics.median(each.best_ms[-1] for each in own)
        answered = sum(len(each.best_ms) for each in own)
        exact = sum(each.exact for each in own) / answered
        apart = statistics.fmean(each.distance for each in own)
        table.add_row(name, *cells, four_digits(last), f"{exact:.0%}", f"{apart:.2f}")
    recorded = _recorded([t for t in trials if not study.space.excludes(t.strategy)], base, after)
    if recorded:
        table.add_row("as recorded", *recorded, "", "", "")
    yield table
    yield (
        "Median speed-up over the default of the fastest trial so far. The result of each trial is "
        "the nearest recorded measurement. 'exact': share of trials whose own strategy was "
        "recorded. 'distance': mean distance of the others from the recorded strategy (each "
        "categorical knob that differs counts 1, each numeric knob the difference as a share of "
        "its range). If the distances are large, differences between learners mean nothing."
    )


def _recorded(trials: Sequence[TrialRecord], base: float, after: Sequence[int]) -> list[str]:
    times = [
        1e3 * t.result.step_time.mean_s if t.result and t.result.step_time else math.inf
        for t in explored(trials)
        if t.kind != "survey"
    ]
    if len(times) < 2:
        return []
    return [speedup_text(base / min(times[:n])) for n in after]
