"""Search spaces as tables: one knob per row, with its effect and when it applies."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from hvd_autosync.search_space import CategoricalKnob, Knob, SearchSpace, catalogue_knob, every_knob
from hvd_autosync.search_space.catalogue import PROTOCOL_KNOBS
from hvd_autosync.search_space.restrictions import condition_text
from hvd_autosync.util.printable import printable

_CODEC = "--autosync-allow codec; hvd.DistributedOptimizer; float32 or float64"
_REPEATING = "hvd.DistributedOptimizer; bits that repeat (docs/exchanges.md)"
#: When each knob of the catalogue is in a job's space, as text. The rules themselves are in
#: :func:`hvd_autosync.search_space.build_space`.
APPLIES_WHEN = {
    "controller": "Horovod has Gloo and MPI; neither --gloo nor --mpi is given",
    "fusion_threshold_bytes": "always",
    "cycle_time_ms": "always",
    "cache_capacity": "always; 4096 only for models with more than 1024 tensors",
    "hierarchical_allreduce": "NCCL; several hosts with several ranks each",
    "torus_allreduce": "NCCL; several hosts with several ranks each",
    "hierarchical_allgather": "sparse gradients; MPI; CPUs; several hosts with several ranks each",
    "num_nccl_streams": "NCCL; GPUs",
    "batch_d2d_memcopies": "NCCL; GPUs",
    "buckets": "hvd.DistributedOptimizer; several dense gradients",
    "bucket_rule": "as buckets, if buckets is not 0",
    "order": "hvd.DistributedOptimizer; several dense gradients",
    "embedding_exchange": "hvd.DistributedOptimizer; tables of which batches touch few rows",
    "large_exchange": "hvd.DistributedOptimizer; gradients of 256 KiB or more",
    "rest_exchange": "hvd.DistributedOptimizer; several hosts with several ranks each",
    "large_slices": "hvd.DistributedOptimizer; gradients of 256 KiB or more",
    "embedding_lossless": f"{_REPEATING}; tables of which batches touch few rows",
    "large_lossless": f"{_REPEATING}; gradients of 256 KiB or more",
    "rest_lossless": f"{_REPEATING}; 256 KiB of other gradients or more",
    "embedding_codec": f"{_CODEC}; tables of which batches touch few rows",
    "embedding_ratio": "as embedding_codec, if it is topk",
    "large_codec": f"{_CODEC}; gradients of 256 KiB or more",
    "large_ratio": "as large_codec, if it is topk",
    "large_rank": "as large_codec, if it is powersgd",
    "rest_codec": _CODEC,
    "local_steps": "--autosync-allow schedule; hvd.DistributedOptimizer; several ranks; more than "
    "16 only in a strategy file",
    **dict.fromkeys(
        ("local_power", "local_alpha", "local_start", "local_cap"),
        "only in a strategy file (docs/local-steps.md)",
    ),
    **dict.fromkeys(
        (knob.name for knob in PROTOCOL_KNOBS),
        "only in a strategy file or by --autosync-recurring (docs/protocols.md)",
    ),
}
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
    """The knobs of one space, including those that are fixed.

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
    return APPLIES_WHEN.get(name, "as its extension decides")


def catalogue_table(knobs: Iterable[Knob] | None = None, title: str = "All knobs") -> Table:
    """A table of knobs and when each of them is tuned.

    Args:
        knobs: The knobs; all known knobs by default.
        title: Printed above.
    """
    table = _table(title)
    for knob in every_knob() if knobs is None else knobs:
        table.add_row(*_cells(knob, domain_text(knob), f"applies: {applies_when(knob.name)}"))
    return table


def domain_text(knob: Knob) -> str:
    """The domain with its unit, as text."""
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
