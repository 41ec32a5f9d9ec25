"""``hvd-autosync recurring``."""

from __future__ import annotations

import statistics
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_autosync.commands.common import StoreOption, console, open_store, print_table
from hvd_autosync.errors import ConfigurationError, StoreError
from hvd_autosync.util.printable import shell_line

if TYPE_CHECKING:
    from hvd_autosync.recurring import Game, Settings
    from hvd_autosync.traces import TraceStore


def add_command(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(recurring)


def recurring(
    job: Annotated[
        str | None,
        typer.Argument(metavar="JOB", help="A recurring job's key; all jobs by default."),
    ] = None,
    simulate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Let both searches play on recorded runs: a row each, with the columns share "
            "(f, 0 to 1), metric (larger is better; empty: it failed) and seconds.",
        ),
    ] = None,
    target: Annotated[
        float | None, typer.Option(help="In games: what a run must come to (default: as f = 1).")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="In games: by how much it may be below that.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="In games: runs of each f.")] = 1,
    games: Annotated[int, typer.Option(min=1, help="Of each search, with other draws.")] = 50,
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Write the job's runs as such a file.")
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Forget the job's runs: its search begins anew.")
    ] = False,
    store: StoreOption = None,
) -> None:
    """Show the runs of recurring jobs, or how many runs each search would take to find f.

    Runs under `horovodrun --autosync --autosync-recurring` are kept in the store:

    \b
      hvd-autosync recurring                     # all jobs, and what each run came to
      hvd-autosync recurring JOB --export runs.csv
      hvd-autosync recurring --simulate runs.csv --tolerance 0.01
    """
    if simulate is not None:
        from hvd_autosync.recurring import Settings

        _simulate(simulate, Settings(target, tolerance, repeats), games)
        return
    traces = open_store(store)
    if job is None and (forget or export is not None):
        raise ConfigurationError(
            "which job is meant?", hint="Name its key; hvd-autosync recurring lists them."
        )
    if job is not None and not traces.runs(job):
        raise StoreError(
            f"this store has no run of a recurring job {job!r}",
            hint="List them with: hvd-autosync recurring",
        )
    if forget:
        assert job is not None
        print(f"{traces.forget_runs(job)} runs of job {job} are forgotten")
    elif export is not None:
        assert job is not None
        _export(traces, job, export)
    else:
        _list(traces, job)


def _list(traces: TraceStore, job: str | None) -> None:
    from rich.table import Table

    runs = traces.runs(job)
    if not runs:
        print("no recurring job has run yet: horovodrun -np 2 --autosync --autosync-recurring ...")
    for key, own in groupby(runs, key=lambda each: each.job_key):
        of_job = list(own)
        table = Table("run", "f", "metric", "seconds", "samples", "status", "said by")
        for run in of_job:
            table.add_row(
                str(run.number + 1),
                f"{run.share:.4g}",
                f"{run.metric:.6g}",
                f"{run.seconds:.4g}",
                str(run.samples or "?"),
                run.status,
                run.source,
            )
        console().print(f"{key}  {shell_line(of_job[-1].command)}", soft_wrap=True)
        print_table(table)


def _export(traces: TraceStore, job: str, path: Path) -> None:
    import csv

    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["share", "metric", "seconds"])
            for run in traces.runs(job):
                writer.writerow([run.share, run.metric, run.seconds])
    except OSError as error:
        raise ConfigurationError(
            f"{str(path)!r} cannot be written: {error}", hint="Name another file."
        ) from None


def _simulate(path: Path, wanted: Settings, games: int) -> None:
    from rich.table import Table

    from hvd_autosync.recurring import SEARCHES, Recorded, play

    recorded = Recorded.read(path)
    table = Table(
        "search",
        "runs to the final f",
        "f",
        "slower than the best f",
        "misses the target",
        "runs that missed",
        "time of the runs",
    )
    for name, search in SEARCHES.items():
        played = [play(recorded, search(wanted), wanted, seed) for seed in range(games)]
        table.add_row(name, *_cells(played))
    print_table(table)
    console().print(
        "runs, f: median (range) of the games; slower: a run at the final f beside one at the "
        "fastest f that keeps the target, where it is kept; misses: share of the games whose final "
        "f does not keep it; time: beside as many runs under BSP alone",
        soft_wrap=True,
    )


def _cells(played: list[Game]) -> list[str]:
    runs, shares = [each.runs for each in played], [each.share for each in played]
    kept = [each.excess for each in played if not each.violates]
    return [
        f"{statistics.median(runs):g} ({min(runs)} .. {max(runs)})",
        f"{statistics.median(shares):.4g} ({min(shares):.4g} .. {max(shares):.4g})",
        f"{statistics.fmean(kept):.1%}" if kept else "-",
        f"{statistics.fmean(each.violates for each in played):.0%}",
        f"{statistics.fmean(each.missed for each in played):.1f}",
        f"{statistics.fmean(each.seconds for each in played):.0%}",
    ]
