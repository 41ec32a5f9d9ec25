"""The command ``hvd-autosync``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_autosync import __version__
from hvd_autosync.commands import (
    doctor,
    jobs,
    recurring,
    replay,
    report,
    simulate,
    testbed,
    traces,
    watch,
)
from hvd_autosync.commands.common import (
    Commands,
    StoreOption,
    StudyArgument,
    console,
    load_extensions,
    mention_failed,
    open_store,
    refuse_without_effect,
)
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.util.printable import printable
from hvd_autosync.util.streams import open_standard_streams
from hvd_autosync.util.variables import LOG_VARIABLE

if TYPE_CHECKING:
    from hvd_autosync.traces import StudyRecord, TraceStore

app = typer.Typer(
    name="hvd-autosync",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain help: paragraphs stay paragraphs, and it starts faster
    pretty_exceptions_enable=False,
    help="Find the fastest synchronization strategy of a Horovod job.\n\n"
    "To tune a job and then run it, add --autosync to its horovodrun line. These commands check "
    "the installation, and show, compare and reuse the results.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hvd-autosync {__version__}")
        raise typer.Exit


#: They need neither extensions nor the log; the doctor says why one of them does not work.
_WITHOUT_EXTENSIONS = ("doctor", "testbed")


@app.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Options of the command itself."""
    needs_both = context.invoked_subcommand not in _WITHOUT_EXTENSIONS
    try:
        if needs_both:
            load_extensions()
        if LOG_VARIABLE in os.environ:
            from hvd_autosync.engine.preflight import start_driver_log

            start_driver_log()
    except ConfigurationError:
        if needs_both:
            raise


jobs.add_commands(app)


@app.command()
def show(
    context: typer.Context,
    study: StudyArgument = "last",
    take: Annotated[
        str | None,
        typer.Option(
            metavar="winner|ROW",
            help="Print only the strategy file of the winner, or of this row of the table of lossy "
            "strategies, for `hvd-autosync run --strategy FILE`.",
        ),
    ] = None,
    nccl_tuner: Annotated[
        str | None,
        typer.Option(
            "--nccl-tuner",
            metavar="FILE",
            help="Only write the winner as a configuration of NCCL's tuner plugin, in place of a "
            "file that exists; '-' prints it.",
        ),
    ] = None,
    store: StoreOption = None,
) -> None:
    """Explain a study: the winner, the reasons, and how to use it."""
    if nccl_tuner is not None:
        refuse_without_effect(context, "with --nccl-tuner", "take")
    traces = open_store(store)
    mention_failed(traces, study, store)
    if nccl_tuner is not None:
        from hvd_autosync.reporting.nccl_tuner import tuner_config

        record = traces.study(study)
        text = tuner_config(record)
        _mention_what_came_since(traces, record)
        if nccl_tuner == "-":
            print(text, end="")
        else:
            from hvd_autosync.traces.files import write_file

            write_file(Path(nccl_tuner), text.encode(), overwrite=True)
        return
    if take is not None:
        from hvd_autosync.reporting.strategy_export import WINNER, exported_strategy

        record = traces.study(study)
        print(exported_strategy(traces, record, take), end="")
        if take == WINNER:
            _mention_what_came_since(traces, record)
        return
    from hvd_autosync.reporting.explanation import explain
    from hvd_autosync.traces.location import store_option

    out = console()
    for section in explain(traces, study, store_option(store)):
        out.print(section, crop=False)


def _mention_what_came_since(store: TraceStore, study: StudyRecord) -> None:
    """Print notes about a winner that is taken without its explanation."""
    from hvd_autosync.study.fallbacks import known_fallback

    for line in filter(None, (*study.drift, known_fallback(store, study))):
        print(printable(f"note: since then: {line}"), file=sys.stderr)


app.add_typer(traces.app, name="traces")
app.add_typer(testbed.app, name="testbed")


replay.add_command(app)
report.add_command(app)
simulate.add_command(app)
recurring.add_command(app)
watch.add_command(app)
doctor.add_command(app)


def main() -> None:
    """Run the command line."""
    open_standard_streams()
    app()


if __name__ == "__main__":
    main()
