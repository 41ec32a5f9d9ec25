"""Studies and trials as tables, for ``hvd-autosync traces``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich.table import Table

from hvd_autosync.errors import TraceFormatError
from hvd_autosync.reporting.words import first_line, speedup_text, step_time_text
from hvd_autosync.search_space import Strategy
from hvd_autosync.study.knob_order import with_knob_order
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord, TrialRecord
from hvd_autosync.traces.speedups import speedups
from hvd_autosync.traces.validity import UnknownValueError
from hvd_autosync.util.printable import shell_line


def studies_table(
    studies: Iterable[StudyRecord],
    interrupted: Collection[str] = (),
    unreadable: Collection[str] = (),
) -> Table:
    """One row per study.

    Args:
        studies: The studies.
        interrupted: Ids of those that have not ended and that no driver is running.
        unreadable: Ids of further studies, which are damaged or of a newer version.
    """
    table = plain_table("study", "begun (UTC)", "status", "speed-up", "job")
    for study in studies:
        table.add_row(
            study.study_id,
            study.created_at[:16].replace("T", " "),
            "interrupted" if study.study_id in interrupted else study.status.value,
            _result(study),
            shell_line(study.command) or str(study.settings.get("origin", "-")),
        )
    for study_id in unreadable:
        table.add_row(study_id, "-", "unreadable", "-", "-")
    return table


def _result(study: StudyRecord) -> str:
    """Return the speed-up of the winner, or that there was no gain."""
    try:
        conclusion = Conclusion.of(study)
    except TraceFormatError as error:
        return "unknown values" if UnknownValueError.hint in error.hint else "damaged"
    if conclusion is None:
        return "-"
    best = conclusion.best
    return speedup_text(best.speedup) if best else "no gain"


def trials_table(study: StudyRecord, trials: Sequence[TrialRecord]) -> Table:
    """One row per trial, in order."""
    study = with_knob_order(study, trials)
    table = plain_table("trial", "kind", "step time", "speed-up", "status", "strategy")
    for trial, speedup in zip(trials, speedups(study, trials), strict=True):
        time = trial.step_time
        table.add_row(
            str(trial.number),
            trial.kind,
            step_time_text(time) if time else "-",
            speedup_text(speedup),
            _status(trial),
            strategy_text(study, trial.strategy),
        )
    return table


def _status(trial: TrialRecord) -> str:
    if trial.result is None:
        return "no result"
    reason = first_line(trial.result.reason)
    return f"{trial.result.status.value}: {reason}" if reason else trial.result.status.value


def strategy_text(study: StudyRecord, strategy: Strategy) -> str:
    """Return a strategy as text, also if the study has no space."""
    if study.space is not None:
        return study.space.describe(strategy)
    return ", ".join(f"{name}={value}" for name, value in strategy.items()) or "default"


def plain_table(*columns: str) -> Table:
    """Return a table without a frame."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
