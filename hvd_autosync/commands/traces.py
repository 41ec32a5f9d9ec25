"""``hvd-autosync traces``: list, show, export, contribute, import and delete studies."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_autosync.commands.common import (
    StoreOption,
    StudyArgument,
    mention_failed,
    open_store,
    print_table,
    refuse_without_effect,
)
from hvd_autosync.errors import ConfigurationError, TraceFormatError
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.printable import printable_cell

if TYPE_CHECKING:
    import pandas as pd

    from hvd_autosync.traces import StudyRecord, TraceStore, TrialRecord

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Saved studies: list, show, export, contribute, import, delete.",
)


class TableFormat(str, enum.Enum):
    """Formats of printed trials."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


@app.command("list")
def list_(store: StoreOption = None) -> None:
    """List all studies, newest first, then those that cannot be read."""
    from hvd_autosync.reporting.listing import studies_table
    from hvd_autosync.traces import StudyStatus

    traces = open_store(store)
    studies = traces.studies(skip_damaged=True)
    ended = {each.study_id for each in studies if each.status is not StudyStatus.RUNNING}
    interrupted: set[str] = set()
    unreadable: dict[str, TraceFormatError] = {}
    for study_id in traces.ids():
        if study_id not in ended:
            try:
                interrupted |= traces.interrupted(study_id, imported=True)
                traces.study(study_id)
            except TraceFormatError as error:
                unreadable[study_id] = error
    studies = [each for each in studies if each.study_id not in unreadable]
    if not studies and not unreadable:
        print(f"no studies in {traces.name} yet", file=sys.stderr)
        return
    print_table(studies_table(studies, interrupted, unreadable))
    for problem in unreadable.values():
        print(problem, file=sys.stderr)


@app.command()
def show(
    study: StudyArgument = "last",
    store: StoreOption = None,
    format: Annotated[
        TableFormat, typer.Option(help="A readable table, or CSV or JSON with one row per trial.")
    ] = TableFormat.TABLE,
) -> None:
    """Print every trial of a study."""
    from hvd_autosync.traces.frames import frame_rows, trials_frame

    traces = open_store(store)
    mention_failed(traces, study, store)
    record = traces.study(study)
    if format is TableFormat.TABLE:
        from hvd_autosync.reporting.listing import trials_table

        print_table(trials_table(record, traces.trials(record.study_id)))
        return
    frame = trials_frame(traces, record.study_id)
    if format is TableFormat.CSV:
        print(_csv(frame), end="")
    else:
        print(json.dumps(frame_rows(frame), indent=2))


def _csv(frame: pd.DataFrame) -> str:
    """Return the table as CSV that is safe on a terminal and in a spreadsheet."""

    def cell(value: object) -> object:
        return printable_cell(value) if isinstance(value, str) else value

    shown = frame.apply(lambda column: column.map(cell))  # pandas 2.0 has no DataFrame.map
    text: str = shown.rename(columns=printable_cell).to_csv(index=False)
    return text


@app.command()
def export(
    context: typer.Context,
    study: StudyArgument = "last",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Output file.", show_default="STUDY.jsonl")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the file if it exists.")
    ] = False,
    related: Annotated[
        bool,
        typer.Option(
            "--related", help="Include the studies that it learned from, as replay --verify needs."
        ),
    ] = False,
    to: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--to",
            metavar="optuna URL",
            help="Write the study to an Optuna storage instead, for optuna-dashboard: "
            "--to optuna sqlite:///optuna.db",
        ),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Write a study to a trace file, which can be replayed, compared and imported elsewhere."""
    from hvd_autosync.study.related_studies import named_sources
    from hvd_autosync.traces import export_study

    if to is not None:
        refuse_without_effect(context, "with --to", "output", "overwrite", "related")
    traces = open_store(store)
    mention_failed(traces, study, store)
    record = traces.study(study)
    study_id = record.study_id
    if to is not None:
        print(_export_to(to, record, traces.trials(study_id)))
        return
    path = output or Path(f"{study_id}.jsonl")
    here = set(traces.ids())
    named = named_sources(traces.trials(study_id)) if related else ()
    others = [each for each in named if each in here]
    hint = "Name another file with --output, or give --overwrite."
    export_study(traces, study_id, path, overwrite=overwrite, others=others, if_exists=hint)
    print(path)
    if absent := [each for each in named if each not in here]:
        print(
            f"note: the study also learned from {', '.join(absent)}, which this store does not "
            "have: replay --verify cannot repeat what it learned from them",
            file=sys.stderr,
        )


def _export_to(to: tuple[str, str], study: StudyRecord, trials: list[TrialRecord]) -> str:
    from hvd_autosync.traces.optuna_export import export_to_optuna

    kind, url = to
    if kind != "optuna":
        raise ConfigurationError(
            f"invalid value {kind!r} for --to", hint="Write --to optuna sqlite:///optuna.db."
        )
    return export_to_optuna(study, trials, url)


@app.command()
def contribute(
    study: StudyArgument = "last",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Output file.", show_default="trace-ID.jsonl.gz"),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Write a study to an anonymous trace file that can be published.

    Removed: the command, names of hosts and parameters, output of the job, losses, times of day,
    and the ids of this and other studies. Kept: the shapes and times of the model, the layout and
    links of the cluster, versions, strategies and step times.
    """
    from hvd_autosync.traces import export_study
    from hvd_autosync.traces.anonymous import anonymous_id

    traces = open_store(store)
    mention_failed(traces, study, store)
    study_id = traces.study(study).study_id
    path = output or Path(f"trace-{anonymous_id(study_id)}.jsonl.gz")
    hint = "Name another file with --output."
    export_study(traces, study_id, path, anonymously=True, if_exists=hint)
    print(path)
    print(
        "Check the file, then offer it for benchmarks/traces: other tasks can learn from it.",
        file=sys.stderr,
    )


@app.command("import")
def import_(
    file: Annotated[
        Path | None, typer.Argument(help="File written by 'traces export'.", show_default=False)
    ] = None,
    horovod_autotune: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Import a log of Horovod's own tuner (--autotune-log-file) instead.",
        ),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Read studies from a file into the store, and print the ids of the new ones."""
    from hvd_autosync.traces import import_autotune_log, import_studies

    if (file is None) == (horovod_autotune is None):
        raise ConfigurationError(
            "give exactly one file: a trace, or a log of Horovod's own tuner",
            hint="Write hvd-autosync traces import FILE, or --horovod-autotune FILE.",
        )
    traces = open_store(store, create=True)
    if horovod_autotune is not None:
        print(import_autotune_log(traces, horovod_autotune))
        return
    assert file is not None
    for study_id in import_studies(traces, file):
        print(study_id)


@app.command()
def delete(
    study: Annotated[
        str, typer.Argument(metavar="STUDY", help="Id of a study, or a prefix of it.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    store: StoreOption = None,
) -> None:
    """Delete a study and its trials."""
    traces = open_store(store)
    study_id = traces.full_id(study, or_failed=True)
    if not yes:
        typer.confirm(f"Delete study {study_id}{_content(traces, study_id)}?", abort=True, err=True)
    traces.delete(study_id)


def _content(traces: TraceStore, study_id: str) -> str:
    """Describe the content of a study that would be deleted."""
    try:
        begun = traces.study(study_id).created_at[:16].replace("T", " ")
        return f" of {begun} UTC with {amount(len(traces.trials(study_id)), 'trial')}"
    except TraceFormatError:
        return ", which is damaged"
