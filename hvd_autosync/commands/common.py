"""Shared parts of the commands: error handling, the store option, output."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from hvd_autosync.errors import AutosyncError, ConfigurationError
from hvd_autosync.util.printable import printable_output
from hvd_autosync.util.streams import unwritable_output
from hvd_autosync.util.variables import STORE_VARIABLE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from hvd_autosync.traces import TraceStore

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        envvar=STORE_VARIABLE,
        show_default=False,
        metavar="URL-or-PATH",
        help="Trace store: path of an SQLite file, or an SQLAlchemy URL. "
        "Default: hvd-autosync/traces.db in the user's data folder.",
    ),
]
StudyArgument = Annotated[
    str, typer.Argument(metavar="STUDY", help="Id of a study, a prefix of it, or 'last'.")
]


#: Maximum width of a table that is not printed on a terminal.
_WIDEST = 10_000


class Commands(TyperGroup):
    """A group of commands that print our errors as a message and set the exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        with printable_output():
            try:
                try:
                    return super().invoke(ctx)
                finally:
                    sys.stdout.flush()  # otherwise a full disk is noticed when Python ends
            except AutosyncError as error:
                print(f"error: {error}", file=sys.stderr)
                raise typer.Exit(error.exit_status) from None
            except OSError as error:
                said = unwritable_output(error)
                if not said:  # such as a closed pipe, which typer sees to
                    raise
                print(f"error: {said}", file=sys.stderr)
                raise typer.Exit(1) from None


def load_extensions() -> None:
    """Load the user's extensions; what they print is not part of an output for programs.

    Raises:
        AutosyncError: One cannot be loaded.
    """
    from hvd_autosync import extensions

    with contextlib.redirect_stdout(sys.stderr):
        extensions.load()


def refuse_without_effect(context: typer.Context, why: str, *names: str) -> None:
    """Reject options of the command line that change nothing beside the others.

    Args:
        context: The running command.
        why: Beside or without which option they have no effect.
        names: Names of their parameters.

    Raises:
        ConfigurationError: One is given.
    """
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{option} has no effect {why}", hint=f"Remove {option}.")


def open_store(location: str | None, *, create: bool = False) -> TraceStore:
    """Return the store that ``--store`` names.

    Args:
        location: The store as named by the user.
        create: Whether to create it where there is none, as of :class:`TraceStore`.

    Raises:
        StoreError: It cannot be opened, or there is none that was named.
    """
    from hvd_autosync.traces import TraceStore

    return TraceStore(location, create=create)


def mention_failed(store: TraceStore, study: str, location: str | None) -> None:
    """Print a note if ``last`` skips a newer study that failed.

    Args:
        store: The store.
        study: The study as named by the user.
        location: The store as named by the user.
    """
    if study == "last" and (newest := store.full_id(study, or_failed=True)) != store.full_id(study):
        from hvd_autosync.traces.location import store_option

        shows = f"hvd-autosync show {newest}{store_option(location)}"
        print(f"note: the newer study {newest} failed; to show it: {shows}", file=sys.stderr)


def print_table(table: Table) -> None:
    """Print ``table``; in a file or a pipe each row is a single line, for ``grep``."""
    out = console()
    if not out.is_terminal:
        out.width = out.measure(table, options=out.options.update(max_width=_WIDEST)).maximum
    out.print(table)


def console() -> Console:
    """Return the console for standard output; brackets in texts are not markup."""
    from hvd_autosync.reporting.console import PrintableConsole

    return PrintableConsole()
