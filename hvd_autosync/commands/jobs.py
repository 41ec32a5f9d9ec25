"""``hvd-autosync tune`` and ``hvd-autosync space``: they take the line of ``horovodrun``."""

from __future__ import annotations

from typing import Annotated

import typer

from hvd_autosync.commands.common import console

#: What follows is horovodrun's: nothing is parsed here, and what follows the command is its own.
_LINE = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LINE",
        help="What follows the word horovodrun: its options, then the job's command.",
        show_default=False,
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command(context_settings=_LINE, no_args_is_help=True)(tune)
    app.command(context_settings=_LINE, no_args_is_help=True)(run)
    app.command(context_settings=_LINE)(space)


def tune(words: _WordsArgument = None) -> None:
    """Tune a job without running it afterwards.

    The line is that of horovodrun, with the same options:

    \b
      hvd-autosync tune -np 4 -H a:2,b:2 python train.py

    It is the same as horovodrun --autosync --autosync-tune-only: the next horovodrun --autosync
    with the same line takes the winner at once. All options of the tuning are listed by
    horovodrun --help; the most useful are

    \b
      --autosync-trials N     most trials before the winner is confirmed
      --autosync-minutes M    most minutes, confirming the winner included
      --autosync-space FILE   restrict or fix knobs (see hvd-autosync space)
      --autosync-allow codec  also tune knobs that can change the trained model

    Exit status: 0 when the tuning ended, also without a gain; that of the job when it fails as
    it is; 2 when the line cannot be used; 130 after Ctrl-C (the same line goes on later).
    """
    from hvd_autosync.commands.flag import tune_command

    raise typer.Exit(tune_command(list(words or [])))


def run(
    strategy: Annotated[
        str, typer.Option(metavar="FILE", help="The strategy, as hvd-autosync show writes it.")
    ],
    words: _WordsArgument = None,
) -> None:
    """Run a job under the strategy of a file, without tuning.

    The rest of the line is that of horovodrun, with the same options:

    \b
      hvd-autosync run --strategy fast.toml -np 4 -H a:2,b:2 -- python train.py

    It is the same as horovodrun --autosync --autosync-strategy FILE. The file says which value
    each knob has and, for knobs of single classes of parameters, who belongs to the class:

    \b
      [knobs]
      buckets = 4
      embedding_exchange = "rows"
      [classes]
      embedding = ["*_table.weight"]

    hvd-autosync show prints the file of a study's winner; hvd-autosync space lists the knobs.

    Exit status: that of the job; 2 when the file or the line cannot be used.
    """
    from hvd_autosync.commands.flag import run_command

    raise typer.Exit(run_command(strategy, list(words or [])))


def space(words: _WordsArgument = None) -> None:
    """Print the knobs that would be tuned in a job, or all that exist.

    With a horovodrun line, what is known of that job's search space:

    \b
      hvd-autosync space -np 4 -H a:2,b:2 python train.py

    Without one, every knob, when it applies, and how to restrict or fix knobs.
    """
    if words:
        from hvd_autosync.commands.flag import space_command

        raise typer.Exit(space_command(list(words)))
    from rich.text import Text

    from hvd_autosync.reporting.space import RESTRICTIONS_HELP, catalogue_table

    out = console()
    out.print(catalogue_table())
    out.print(Text(f"\n{RESTRICTIONS_HELP}"), end="", soft_wrap=True)
