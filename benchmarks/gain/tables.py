"""From the measurements to tables: median step times, and paired ratios to the default."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from gain.match import matches
from hvd_autosync.search_space import StepTime, Strategy, catalogue_knob
from hvd_autosync.study.confirm import Comparison, compare

Row = dict[str, str]
_PIPED_WIDTH = 150


@dataclass(frozen=True)
class Standing:
    """How one contender did in one match.

    Attributes:
        name: The contender.
        medians_s: Median step time of each round that was measured, seconds.
        failed: Rounds that were not.
        versus: Against the default, over the rounds in which both were measured; ``None`` for
            the default and where there is no such round.
        share: Of the default's bytes, what it sends in a step; NaN where there is one host.
        bound: Its speedup if only that share of the default's waiting were left; likewise.
        row: One of its rows, for its strategy and what finding it cost.
    """

    name: str
    medians_s: tuple[float, ...]
    failed: int
    versus: Comparison | None
    share: float
    bound: float
    row: Row


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Of one match, in the order of the contenders' first rows."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    of_default = [row for row in rows if row["contender"] == "default"]
    default = _measured(of_default)
    found = []
    for name in names:
        own_rows = [row for row in rows if row["contender"] == name]
        own = _measured(own_rows)
        both = [number for number in own if number in default]
        versus = None
        if name != "default" and both:
            strategy = Strategy.from_json(own_rows[0]["strategy"])
            versus = compare(strategy, [default[n] for n in both], [own[n] for n in both])
        medians = tuple(float(row["median_s"]) for row in own_rows if row["median_s"])
        share = _sent(own_rows) / _sent(of_default)
        bound = _bound(of_default, share)
        failed = len(own_rows) - len(medians)
        found.append(Standing(name, medians, failed, versus, share, bound, own_rows[0]))
    return found


def _sent(rows: Sequence[Row]) -> float:
    """Bytes that a step puts on the link, the launch's own among them; NaN without a link."""
    runs = [(int(row["sent_bytes"]), int(row["sent_steps"])) for row in rows if row["mean_s"]]
    return statistics.median([sent / steps for sent, steps in runs if sent] or [math.nan])


def _bound(default: Sequence[Row], share: float) -> float:
    """The speedup if of the default's waiting only this share were left."""
    measured = [row for row in default if row["mean_s"]]
    if not measured:
        return math.nan
    step_s, blocked_s = (
        statistics.median(float(row[name]) for row in measured) for name in ("mean_s", "blocked_s")
    )
    return step_s / (step_s - blocked_s + blocked_s * share)


def _measured(rows: Sequence[Row]) -> dict[str, StepTime]:
    """Round -> step time."""
    return {
        row["round"]: StepTime(
            float(row["mean_s"]), float(row["standard_error_s"]), len(row["step_ms"].split())
        )
        for row in rows
        if row["mean_s"]
    }


def describe(strategy: str) -> str:
    """One line for a strategy in JSON: what differs from Horovod's defaults."""
    knobs = [(catalogue_knob(name), value) for name, value in json.loads(strategy).items()]
    parts = [f"{k.name}={k.format(value)}" for k, value in knobs if value != k.default]
    return ", ".join(parts) or "nothing"


def _bounds(low: float, high: float, form: str) -> str:
    return f"{low:{form}} .. {high:{form}}"


def match_table(setting: str, workload: str, found: Sequence[Standing]) -> Table:
    """The table of one match."""
    table = Table(title=f"{workload}, {setting}", title_justify="left")
    table.add_column("strategy of", no_wrap=True)
    measured = ("step ms", "of rounds", "speedup", "90 % interval", "bytes", "bound")
    for column in (*measured, "trials", "steps", "min"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("sets")
    for one in found:
        cells = ["failed", "", "", ""]
        if one.medians_s:
            median, low, high = (1e3 * f(one.medians_s) for f in (statistics.median, min, max))
            cells = [f"{median:.1f}", _bounds(low, high, ".1f"), "1", ""]
        if one.versus is not None:
            versus = one.versus
            cells[2:] = [f"{versus.speedup:.3f}", _bounds(versus.low, versus.high, ".2f")]
        if one.failed and one.medians_s:
            cells[1] += f" ({one.failed} failed)"
        known = one.versus is not None and not math.isnan(one.bound)
        cells += [f"{one.share:.2f}", f"{one.bound:.2f}"] if known else ["", ""]
        cost = ["", "", ""]
        if int(one.row["tuning_steps"]):
            minutes = float(one.row["tuning_minutes"])
            cost = [one.row["tuning_trials"], one.row["tuning_steps"], f"{minutes:.1f}"]
        table.add_row(one.name, *cells, *cost, describe(one.row["strategy"]))
    return table


def summary_table(all_standings: Sequence[Sequence[Standing]]) -> Table:
    """Each contender over all matches."""
    table = Table(title="All matches", title_justify="left")
    table.add_column("strategy of", no_wrap=True)
    columns = (
        "matches",
        "geometric mean of speedups",
        "least",
        "most",
        "proven faster",
        "proven slower",
        "minutes of tuning",
    )
    for column in columns:
        table.add_column(column, justify="right")
    by_name: dict[str, list[Standing]] = {}
    for found in all_standings:
        for one in found:
            if one.versus is not None:
                by_name.setdefault(one.name, []).append(one)
    for name, ones in by_name.items():
        versus = [one.versus for one in ones if one.versus is not None]
        speedups = [v.speedup for v in versus]
        minutes = sum(float(one.row["tuning_minutes"]) for one in ones)
        table.add_row(
            name,
            str(len(ones)),
            f"{statistics.geometric_mean(speedups):.3f}",
            f"{min(speedups):.3f}",
            f"{max(speedups):.3f}",
            str(sum(v.low > 1 for v in versus)),
            str(sum(v.high < 1 for v in versus)),
            f"{minutes:.1f}",
        )
    return table


def show(rows: Sequence[Row]) -> None:
    """Print the tables of all matches, and the summary of several."""
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    found = {match: standings(own) for match, own in matches(rows).items()}
    for (setting, workload), own in found.items():
        console.print(match_table(setting, workload, own))
    if len(found) > 1:
        console.print(summary_table(list(found.values())))
