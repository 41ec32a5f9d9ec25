"""``hvd-autosync recurring``: the runs of recurring jobs."""

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
        str | None, typer.Argument(metavar="JOB", help="Key of a recurring job; default: all jobs.")
    ] = None,
    simulate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Simulate both searches on recorded runs, one per row, with the columns share "
            "(f, 0 to 1), metric (larger is better; empty: the run failed) and seconds.",
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="With --simulate: target metric. Default: the metric at f = 1."),
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(help="With --simulate: largest accepted shortfall below the target."),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="With --simulate: number of runs of each f.")
    ] = 1,
    games: Annotated[
        int,
        typer.Option(
            min=1, help="With --simulate: simulations of each search, with different seeds."
        ),
    ] = 50,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE.csv", help="Write the job's runs as a file for --simulate."),
    ] = None,
    forget: Annotated[
        bool, typer.Option("--forget", help="Delete the job's runs, so that its search restarts.")
    ] = False,
    store: StoreOption = None,
) -> None:
    """Show the runs of recurring jobs, or simulate how many runs each search needs to find f.

    Runs under `horovodrun --autosync --autosync-recurring` are kept in the store:

    \b
      hvd-autosync recurring                     # all jobs, with the metric of each run
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
            "--forget and --export need the key of a job",
            hint="Give the key; hvd-autosync recurring lists the keys.",
        )
    if job is not None and not traces.runs(job):
        raise StoreError(
            f"this store has no runs of a recurring job {job!r}",
            hint="List the jobs with: hvd-autosync recurring",
        )
    if forget:
        assert job is not None
        print(f"deleted {traces.forget_runs(job)} runs of job {job}")
    elif export is not None:
        assert job is not None
        _export(traces, job, export)
    else:
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
            f"cannot write {str(path)!r}: {error}", hint="Choose another file."
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
        "runs below target",
        "time of the runs",
    )
    for name, search in SEARCHES.items():
        played = [play(recorded, search(wanted), wanted, seed) for seed in range(games)]
        table.add_row(name, *_cells(played))
    print_table(table)
    console().print(
        "runs, f: median (range) over the simulations; slower: time of a run at the final f "
        "relative to the fastest f that meets the target, over simulations that meet it; misses: "
        "share of simulations whose final f misses the target; runs below target: mean number per "
        "simulation; time: relative to the same number of runs with BSP only",
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
