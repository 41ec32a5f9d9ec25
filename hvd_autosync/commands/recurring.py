"""``hvd-autosync recurring``: the runs of recurring jobs."""

from __future__ import annotations

import io
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_autosync.commands.common import (
    StoreOption,
    console,
    open_store,
    print_table,
    refuse_without_effect,
)
from hvd_autosync.errors import ConfigurationError, StoreError, TraceFormatError
from hvd_autosync.util.amounts import amount, four_digits
from hvd_autosync.util.printable import shell_line

if TYPE_CHECKING:
    from hvd_autosync.traces import TraceStore


def add_command(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(recurring)


def recurring(
    context: typer.Context,
    job: Annotated[
        str | None, typer.Argument(metavar="JOB", help="Key of a recurring job; default: all jobs.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Write the job's runs as share, metric and seconds."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With --export: replace the file if it exists.")
    ] = False,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete the job's runs, so that its search restarts.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="With --forget: do not ask for confirmation.")
    ] = False,
    store: StoreOption = None,
) -> None:
    """Show, export or delete the runs of recurring jobs.

    Runs under `horovodrun --autosync --autosync-recurring` are kept in the store:

    \b
      hvd-autosync recurring                     # all jobs, with the metric of each run
      hvd-autosync recurring JOB --export runs.csv
      hvd-autosync recurring JOB --forget        # the search restarts

    With both options the runs are deleted once the file is written.
    """
    if export is None:
        refuse_without_effect(context, "without --export", "overwrite")
    if not forget:
        refuse_without_effect(context, "without --forget", "yes")
    traces = open_store(store)
    if job is None and (forget or export is not None):
        raise ConfigurationError(
            "--forget and --export need the key of a job",
            hint="Give the key; hvd-autosync recurring lists the keys.",
        )
    if job is None:
        _list(traces, None)
        return
    count: int | None
    try:
        count = len(traces.runs(job))
    except TraceFormatError:
        if export is not None or not forget:
            raise
        count = None  # damaged runs cannot be read, but deleted
    if export is not None and count:
        _export(traces, job, export, overwrite)
    if forget and count != 0:
        if not yes:
            typer.confirm(f"Delete the runs of job {job}?", abort=True, err=True)
        count = traces.forget_runs(job)
    if count == 0:
        raise StoreError(
            f"{traces.name} has no runs of a recurring job {job!r}",
            hint="List the jobs with: hvd-autosync recurring",
        )
    if forget:
        print(f"deleted {amount(count or 0, 'run')} of job {job}")
    elif export is None:
        _list(traces, job)


def _list(traces: TraceStore, job: str | None) -> None:
    from rich.table import Table

    runs = traces.runs(job)
    if not runs:
        print(
            "no recurring job has run yet; start one with: "
            "horovodrun -np 2 --autosync --autosync-recurring ..."
        )
    for key, own in groupby(runs, key=lambda each: each.job_key):
        of_job = list(own)
        table = Table("run", "f", "metric", "seconds", "samples", "status", "metric from")
        for run in of_job:
            table.add_row(
                str(run.number + 1),
                f"{run.share:.4g}",
                f"{run.metric:.6g}",
                four_digits(run.seconds),
                str(run.samples or "?"),
                run.status,
                run.source,
            )
        console().print(f"{key}  {shell_line(of_job[-1].command)}", soft_wrap=True)
        print_table(table)


def _export(traces: TraceStore, job: str, path: Path, overwrite: bool) -> None:
    import csv

    from hvd_autosync.traces.files import write_file

    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["share", "metric", "seconds"])
    writer.writerows([run.share, run.metric, run.seconds] for run in traces.runs(job))
    hint = "Name another file, or give --overwrite."
    write_file(path, text.getvalue().encode(), overwrite=overwrite, if_exists=hint)
