"""Search spaces as tables: one knob per row, with its effect and when it applies."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from hvd_autosync.search_space import CategoricalKnob, Knob, SearchSpace, catalogue_knob, every_knob
from hvd_autosync.search_space.catalogue import REGISTRY
from hvd_autosync.search_space.restrictions import condition_text
from hvd_autosync.util.printable import printable

RESTRICTIONS_HELP = """\
Restrict or fix knobs with a TOML file, given as --autosync-space FILE:

  [knobs.cycle_time_ms]
  low = 0.5
  high = 10

  [knobs.fusion_threshold_bytes]
  fixed = 67108864

  [knobs.controller]
  choices = ["gloo"]

Exact knobs change only the speed. Lossy knobs can change the trained model; they are tuned only
with --autosync-allow GROUP.
"""


def space_table(space: SearchSpace, title: str) -> Table:
    """Return the knobs of one space, including those that are fixed.

    Args:
        space: The space.
        title: Printed above.
    """
    table = _table(title)
    for knob in space.knobs:
        when = f"only while {condition_text(knob.condition)}" if knob.condition else ""
        table.add_row(*_cells(knob, domain_text(knob), when))
    for name, value in space.fixed:
        knob = catalogue_knob(name)
        fixed = f"fixed at {knob.format(value)}"
        table.add_row(*_cells(knob, fixed, "set by your options or environment"))
    return table


def applies_when(name: str) -> str:
    """When the knob is in a job's space, as text."""
    return REGISTRY[name].when


def catalogue_table(knobs: Iterable[Knob] | None = None, title: str = "All knobs") -> Table:
    """Return a table of knobs and when each of them is tuned.

    Args:
        knobs: The knobs; all known knobs by default.
        title: Printed above.
    """
    table = _table(title)
    for knob in every_knob() if knobs is None else knobs:
        table.add_row(*_cells(knob, domain_text(knob), f"applies: {applies_when(knob.name)}"))
    return table


def domain_text(knob: Knob) -> str:
    """Return the domain with its unit, as text."""
    if isinstance(knob, CategoricalKnob):
        return ", ".join(knob.format(choice) for choice in knob.choices)
    if knob.low == knob.high:
        return f"only {knob.format(knob.low)}"
    return f"{knob.format(knob.low)} to {knob.format(knob.high)}"


def _table(title: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="dim",
        pad_edge=False,
        padding=(0, 1, 1, 0),
    )
    table.add_column("knob", no_wrap=True)
    for column in ("values", "description"):
        table.add_column(column)
    return table


def _cells(knob: Knob, values: str, when: str) -> tuple[Text, Text, Text]:
    sort = "exact" if knob.exact else f"lossy, group {knob.group}"
    return (
        _two_lines(knob.name, sort, "dim" if knob.exact else "yellow"),
        _two_lines(values, f"default {knob.format(knob.default)}"),
        _two_lines(knob.help, when),
    )


def _two_lines(first: str, second: str, style: str = "dim") -> Text:
    below = [("\n" + printable(second), style)] if second else []
    return Text.assemble(printable(first), *below)
