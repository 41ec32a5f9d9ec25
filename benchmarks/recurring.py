"""How many runs of a recurring job does each search need to find its share of BSP?

Two ranks on each of two hosts, which this machine imitates (``hvd_autosync.testing.Testbed``; needs
root), run a short training on handwritten digits again and again, as a user would: by ``horovodrun
--autosync --autosync-recurring``, each run with another seed. Every search begins with an empty
store. The CSV file is what ``recurring_recorded.py`` reads.

    python benchmarks/recurring.py --runs 10
    python benchmarks/recurring.py --searches bayesian --output recurring.csv
    python benchmarks/recurring.py --show recurring.csv

Leave the machine alone meanwhile: about 45 seconds per run.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import tempfile
from pathlib import Path

from command_line import add_table, check_names, need_hosts, new_parser, open_table, parse
from rich.console import Console
from rich.table import Table

from hvd_autosync.recurring import SEARCHES
from hvd_autosync.recurring.outcomes import SearchSettings
from hvd_autosync.recurring.runs import outcomes_of
from hvd_autosync.testing import Testbed
from hvd_autosync.traces import TraceStore

_HOSTS, _SLOTS = 2, 2
_COLUMNS = ("search", "run", "share", "metric", "seconds", "samples", "next_share", "final")
_JOB = Path(__file__).resolve().parent / "scheduled" / "recurring_job.py"


def repeat(search: str, args: argparse.Namespace, output: str) -> None:
    """Run the job again and again under one search, and write down every run."""
    with tempfile.TemporaryDirectory() as folder, Testbed(_HOSTS, args.rate) as bed:
        store = os.path.join(folder, "store.db")
        for number in range(1, args.runs + 1):
            command = [
                "horovodrun",
                *bed.horovodrun_options(_SLOTS),
                "--gloo",
                "--autosync",
                "--autosync-recurring",
                "--autosync-search",
                search,
                "--autosync-tolerance",
                str(args.tolerance),
                "--autosync-store",
                store,
                sys.executable,
                str(_JOB),
            ]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "RECURRING_SEED": str(number)}
            done = bed.run(command, env=environment)
            if done.returncode:
                sys.exit(f"run {number} ended with status {done.returncode}")
            runs = TraceStore(store).runs()
            if len(runs) != number:
                sys.exit(f"run {number} was not counted")
            settings = SearchSettings(None, args.tolerance, 1)
            then = SEARCHES[search](settings).next_share(outcomes_of(runs))
            last = runs[-1]
            with open(output, "a", newline="") as file:
                csv.writer(file).writerow(
                    (
                        search,
                        number,
                        last.share,
                        last.metric,
                        last.seconds,
                        last.samples,
                        then.share,
                        int(then.final),
                    )
                )


def show(output: str) -> None:
    """Print the tables of a file of measurements."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    console = Console(width=None if sys.stdout.isatty() else 120)
    for search in dict.fromkeys(row["search"] for row in rows):
        own = [row for row in rows if row["search"] == search]
        final = next((row for row in own if int(row["final"])), None)
        title = f"{search}: " + (
            "no final share yet"
            if final is None
            else f"f = {float(final['next_share']):.3g} after {final['run']} runs"
        )
        table = Table(title=title, title_justify="left")
        for column in ("run", "share", "accuracy", "seconds", "of the first run's"):
            table.add_column(column, justify="right")
        for row in own:
            part = float(row["seconds"]) / float(own[0]["seconds"])
            table.add_row(
                row["run"],
                f"{float(row['share']):.3g}",
                f"{float(row['metric']):.4f}",
                f"{float(row['seconds']):.1f}",
                f"{part:.2f}",
            )
        console.print(table)
        if final is not None:
            after = [float(r["seconds"]) for r in own if int(r["run"]) > int(final["run"])]
            if after:
                ratio = float(own[0]["seconds"]) / statistics.median(after)
                console.print(f"runs after that are {ratio:.2f} times as fast as the first\n")


def main() -> None:
    """Runs the benchmark."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--searches", default=",".join(SEARCHES), metavar="S,...", help="(default: %(default)s)")
    add("--runs", type=int, default=10, help="of each search (default: %(default)s)")
    add(
        "--tolerance",
        type=float,
        default=0.01,
        help="of accuracy below that of the first run (default: %(default)s)",
    )
    add("--rate", type=float, default=100.0, metavar="MBIT", help="(default: %(default)s)")
    add_table(parser, "recurring.csv", "every run")
    args = parse(parser, show)
    need_hosts()
    searches = check_names(parser, "searches", args.searches, list(SEARCHES))
    output = open_table(parser, args, _COLUMNS)
    for search in searches:
        repeat(search, args, output)
    show(output)


if __name__ == "__main__":
    main()
