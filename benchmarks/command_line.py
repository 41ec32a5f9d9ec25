"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hvd_autosync.testing import testbed_missing


def new_parser(about: str | None) -> argparse.ArgumentParser:
    """A parser that describes itself by a module's docstring, whose end are examples."""
    text, _, usage = (about or "").partition("\n\n    python")
    return argparse.ArgumentParser(
        description=text,
        epilog=f"examples:\n    python{usage}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def rates_of(text: str) -> dict[str, float | None]:
    """The settings of an option, and their rates in Mbit/s; ``None`` for one host."""
    return {word: _rate_of(word) for word in text.split(",")}


def _rate_of(word: str) -> float | None:
    match = re.fullmatch(r"loopback|(\d+(?:\.\d+)?)mbit", word)
    if match is None or (match[1] and float(match[1]) <= 0):
        raise argparse.ArgumentTypeError(f"{word!r} is neither loopback nor, for example, 100mbit")
    return float(match[1]) if match[1] else None


def add_table(parser: argparse.ArgumentParser, default: str, rows: str) -> None:
    """Add ``--output`` and ``--show`` of a CSV file.

    Args:
        parser: Of the benchmark.
        default: The file's name.
        rows: What a row of it is.
    """
    parser.add_argument("--output", default=default, metavar="FILE", help=f"{rows}, as CSV")
    parser.add_argument(
        "--show", metavar="FILE", help="print the tables of such a file again and end"
    )


def parse(
    parser: argparse.ArgumentParser,
    show: Callable[[str], None],
    work: Callable[..., None] | None = None,
) -> argparse.Namespace:
    """The arguments of a run that is to measure; any other ends here, having done its part.

    Args:
        parser: With :func:`add_table`.
        show: Prints the tables of a file.
        work: A rank's part, which gets what :func:`own_part` was given.
    """
    if work is not None:
        parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if work is not None and arguments.inside:
        work(**json.loads(arguments.inside))
        sys.exit()
    if arguments.show:
        show(arguments.show)
        sys.exit()
    return arguments


def own_part(script: str, **part: Any) -> list[str]:
    """The command that runs a part of a benchmark, as :func:`parse` knows it."""
    return [sys.executable, str(Path(script).resolve()), "--inside", json.dumps(part)]


def need_hosts() -> None:
    """End here, unless several hosts can be had on this machine."""
    if missing := testbed_missing():
        sys.exit(f"this benchmark needs several hosts: {missing}")


def check_names(
    parser: argparse.ArgumentParser, what: str, given: str, known: Sequence[str]
) -> list[str]:
    """The names in a list with commas, or end here if one of them is unknown."""
    names = given.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"unknown {what}: {', '.join(unknown)}; known are {', '.join(known)}")
    return names


def read_table(path: str, column: str) -> list[dict[str, str]]:
    """The rows of a CSV file, or end here if it is not one with this column."""
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if column not in (reader.fieldnames or ()):
            sys.exit(
                f"{path} has no column {column}: this program has not written it, as it is now"
            )
        return list(reader)


def open_table(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    columns: Sequence[str],
    *,
    goes_on: bool = False,
) -> str:
    """The full path of the CSV file, which has its head; nothing that was measured is lost.

    Args:
        parser: Says so where the file exists already.
        arguments: With ``output``.
        columns: The head.
        goes_on: Whether the benchmark leaves out what is in a file that exists.
    """
    output: str = os.path.abspath(arguments.output)
    empty = not os.path.exists(output) or len(Path(output).read_text().splitlines()) < 2
    if empty:
        with open(output, "w", newline="") as file:
            csv.writer(file).writerow(columns)
    elif not goes_on:
        parser.error(f"{arguments.output} exists already; name another, or --show it")
    elif Path(output).read_text().splitlines()[0] != ",".join(columns):
        parser.error(f"{arguments.output} has other columns; name another, or --show it")
    return output


def commit_now() -> str:
    """What is measured, as git names it."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()
