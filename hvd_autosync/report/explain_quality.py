"""What the losses said of lossy strategies: time against quality."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from hvd_autosync.report.listing import plain_table
from hvd_autosync.report.words import speedup_text
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.study_values import Conclusion
from hvd_autosync.traces import TrialRecord


def quality_table(
    space: SearchSpace, trials: Sequence[TrialRecord], conclusion: Conclusion
) -> Table:
    """One row for each lossy strategy that was judged, fastest first."""
    table = plain_table("speed-up", "loss", "default's", "may be above by", "verdict", "strategy")
    seconds = _step_s(space, trials)
    default_s = seconds.get(space.default, math.nan)
    rows = [(default_s / seconds.get(v.strategy, math.nan), v) for v in conclusion.verdicts]
    for speedup, verdict in sorted(rows, key=lambda row: -row[0] if row[0] > 0 else math.inf):
        word = "may be used" if verdict.admissible else "refused"
        table.add_row(
            speedup_text(speedup) if math.isfinite(speedup) else "-",
            *map(_number, (verdict.loss, verdict.default_loss, verdict.allowed)),
            f"{word}: {verdict.reason}", space.describe(verdict.strategy),
        )  # fmt: skip
    return table


def _step_s(space: SearchSpace, trials: Sequence[TrialRecord]) -> dict[Strategy, float]:
    """Seconds of a step in the last trial that judged a strategy."""
    return {
        space.complete(trial.strategy): trial.result.step_time.mean_s
        for trial in trials
        if trial.kind == "quality" and trial.result is not None and trial.result.step_time
    }


def _number(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "-"
