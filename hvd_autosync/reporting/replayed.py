"""What people see of studies that are asked again, or given to other learners."""

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
from hvd_autosync.traces import StudyRecord, TraceStore, TrialRecord

if TYPE_CHECKING:
    from hvd_autosync.engine.replay import Check, Rerun

_AFTER = (5, 10, 20, 40)


def missing_sources(traces: TraceStore, trials: Sequence[TrialRecord]) -> Iterator[str]:
    """A line if the study learned from studies that are not here."""
    here = {study.study_id for study in traces.studies()}
    if missing := [name for name in named_sources(trials) if name not in here]:
        yield (
            f"it learned from {len(missing)} studies that are not here ({', '.join(missing)}); "
            "export it with them: hvd-autosync traces export --related"
        )


def differences_table(study: StudyRecord, checks: Sequence[Check]) -> Table:
    """Questions that are not the same as they were."""
    study = with_knob_order(study)
    assert study.space is not None, "it was asked again"
    table = plain_table("trial", "kind", "recorded", "now", "apart", "")
    for check in checks:
        now = "" if check.again is None else study.space.describe(check.again)
        apart = "" if check.again is None else f"{check.distance:.3g}"
        recorded = study.space.describe(check.recorded)
        table.add_row(str(check.number), check.kind, recorded, now, apart, check.note)
    table.caption = "Apart: each choice that differs counts 1, each number its share of its range."
    table.caption_justify = "left"
    return table


def reruns_table(
    study: StudyRecord, trials: Sequence[TrialRecord], reruns: Sequence[Rerun]
) -> Iterator[Table | str]:
    """What learners would have found: medians of their games."""
    from hvd_autosync.engine.replay import default_ms

    assert study.space is not None, "it has answered"
    base = default_ms(trials)
    count = max(len(each.best_ms) for each in reruns)
    after = [n for n in _AFTER if n < count] + [count]
    table = plain_table("learner", *(f"after {n}" for n in after), "step ms", "exact", "apart")
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
        table.add_row(name, *cells, f"{last:.4g}", f"{exact:.0%}", f"{apart:.2f}")
    recorded = _recorded(trials, base, after)
    if recorded:
        table.add_row("as recorded", *recorded, "", "", "")
    yield table
    yield (
        "Speed-up over the default of the fastest trial so far, medians. Each trial is answered "
        "by the nearest recorded measurement: 'exact' says how many were of the very strategy, "
        "'apart' how far the others are from it (a choice counts 1, a number its share of its "
        "range). Where they are far apart, take the differences for nothing."
    )


def _recorded(trials: Sequence[TrialRecord], base: float, after: Sequence[int]) -> list[str]:
    times = [
        1e3 * t.result.step_time.mean_s if t.result and t.result.step_time else math.inf
        for t in trials
        if t.kind not in ("confirm", "quality", "survey")
    ]
    if len(times) < 2:
        return []
    return [speedup_text(base / min(times[:n])) for n in after]
