"""``hvd-autosync report``."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hvd_autosync.commands.common import StoreOption, mention_failed
from hvd_autosync.errors import StoreError


class Format(str, enum.Enum):
    """What a report is written as."""

    HTML = "html"
    MD = "md"
    JSON = "json"


def add_command(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(report)


def report(
    study: Annotated[
        str,
        typer.Argument(
            metavar="STUDY", help="A study's id, the beginning of one, 'last', or a trace file."
        ),
    ] = "last",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            show_default=False,
            help="File to write; '-' prints it. Default: report-STUDY.html, .md or .json here.",
        ),
    ] = None,
    format: Annotated[
        Format,
        typer.Option(help="A page with figures, text for an issue, or everything for a program."),
    ] = Format.HTML,
    store: StoreOption = None,
) -> None:
    """Write a study as one page: the answer, figures, every trial, and how to reproduce it.

    The page needs no network and can be mailed:

    \b
      hvd-autosync report last -o report.html
    """
    from hvd_autosync.api.results import Study

    found = Study.load(study, store)
    mention_failed(found.store, study)
    if format is Format.HTML:
        from hvd_autosync.commands.page import page

        if sys.stderr.isatty():
            print("drawing ...", file=sys.stderr)
        text = page(found)
    elif format is Format.MD:
        from hvd_autosync.reporting.explanation import explain
        from hvd_autosync.reporting.markdown import markdown

        text = markdown(explain(found.store, found.study_id))
    else:
        from hvd_autosync.commands.page import summary

        text = json.dumps(summary(found), indent=2) + "\n"
    if output is not None and str(output) == "-":
        print(text, end="")
        return
    path = output or Path(f"report-{found.study_id}.{format.value}")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}", hint="Name a file that you may write."
        ) from error
    print(path)
