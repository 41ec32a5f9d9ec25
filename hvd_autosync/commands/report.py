"""``hvd-autosync report``: a study as one page."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from hvd_autosync.commands.common import StoreOption, mention_failed


class ReportFormat(str, enum.Enum):
    """Formats of a report."""

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
            metavar="STUDY", help="Id of a study, a prefix of it, 'last', or a trace file."
        ),
    ] = "last",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            show_default=False,
            help="Output file, which is replaced if it exists, or '-' for standard output. "
            "Default: report-STUDY.html, .md or .json in the current directory.",
        ),
    ] = None,
    format: Annotated[
        ReportFormat,
        typer.Option(
            help="html: page with figures; md: text for an issue; json: the study, its result "
            "and a row for each trial."
        ),
    ] = ReportFormat.HTML,
    store: StoreOption = None,
) -> None:
    """Write a study as one page: the result, figures, every trial, and how to reproduce it.

    The page is self-contained and needs no network:

    \b
      hvd-autosync report last -o report.html
    """
    from hvd_autosync.api.results import Study
    from hvd_autosync.traces.files import write_file
    from hvd_autosync.traces.location import store_option
    from hvd_autosync.traces.opening import is_file

    found = Study.load(study, store)
    option = None if is_file(study) else store_option(store)
    mention_failed(found.store, study, store)
    if format is ReportFormat.HTML:
        from hvd_autosync.commands.page import page

        if sys.stderr.isatty():
            print("drawing ...", file=sys.stderr)
        text = page(found, option)
    elif format is ReportFormat.MD:
        from hvd_autosync.reporting.explanation import explain
        from hvd_autosync.reporting.markdown import markdown

        text = markdown(explain(found.store, found.study_id, option))
    else:
        from hvd_autosync.commands.page import summary

        text = json.dumps(summary(found), indent=2) + "\n"
    if output is not None and str(output) == "-":
        print(text, end="")
        return
    path = output or Path(f"report-{found.study_id}.{format.value}")
    write_file(path, text.encode(), overwrite=True)
    print(path)
