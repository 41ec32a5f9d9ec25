"""``hvd-autosync tune``, ``run`` and ``space``, which take a ``horovodrun`` line."""

from __future__ import annotations

from typing import Annotated

import typer

from hvd_autosync.commands.common import console
from hvd_autosync.errors import ConfigurationError

#: The words are parsed by horovodrun's parser, not by Typer.
_LINE = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LINE",
        help="The horovodrun line without the word horovodrun: options, then the job's command.",
        show_default=False,
    ),
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    app.command(context_settings=_LINE, no_args_is_help=True)(tune)
    app.command(context_settings=_LINE, no_args_is_help=True)(run)
    app.command(context_settings=_LINE)(space)


def tune(words: _WordsArgument = None) -> None:
    """Tune a job without running the training afterwards.

    Give the same line as for horovodrun:

    \b
      hvd-autosync tune -np 4 -H a:2,b:2 python train.py

    This is equivalent to horovodrun --autosync --autosync-tune-only: the next horovodrun
    --autosync with the same line uses the winner without tuning. horovodrun --help lists all
    options; the most useful ones are

    \b
      --autosync-trials N     maximum number of trials before confirmation
      --autosync-minutes M    maximum duration in minutes, including confirmation
      --autosync-space FILE   restrict or fix knobs (see hvd-autosync space)
      --autosync-allow codec  also tune knobs that can change the trained model

    Exit status: 0 if the tuning ended, also without a gain; the job's own status if it fails
    under the default strategy; 1 if the store cannot be used; 2 if the line is invalid; 130 after
    Ctrl-C (run the same line again to resume, unless with --autosync-reuse never).
    """
    from hvd_autosync.commands.flag import tune_command

    raise typer.Exit(tune_command(list(words or [])))


def run(
    strategy: Annotated[
        str, typer.Option(metavar="FILE", help="Strategy file, as written by hvd-autosync show.")
    ],
    words: _WordsArgument = None,
) -> None:
    """Run a job under the strategy of a file, without tuning.

    The rest of the line is the same as for horovodrun:

    \b
      hvd-autosync run --strategy fast.toml -np 4 -H a:2,b:2 -- python train.py

    This is equivalent to horovodrun --autosync --autosync-strategy FILE. The file gives the values
    of the knobs and, for the knobs of a class of parameters, the names in the class:

    \b
      [knobs]
      buckets = 4
      embedding_exchange = "rows"
      [classes]
      embedding = ["*_table.weight"]

    hvd-autosync show --take winner prints the file of a study's winner; hvd-autosync space lists
    the knobs.

    Exit status: that of the job; 1 if the store cannot be used; 2 if the file or the line is
    invalid.
    """
    from hvd_autosync.commands.flag import run_command

    raise typer.Exit(run_command(strategy, list(words or [])))


def space(
    words: _WordsArgument = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of the space file.")
    ] = False,
) -> None:
    """Print the knobs that would be tuned in a job, or all knobs.

    With a horovodrun line: the known part of that job's search space, and the plan.

    \b
      hvd-autosync space -np 4 -H a:2,b:2 python train.py

    Without a line: every knob, when it applies, and how to restrict or fix knobs.
    """
    if schema and words:
        raise ConfigurationError(
            "--schema takes no line: the schema is that of the space file of every job",
            hint="Remove --schema or the line.",
        )
    if schema:
        import json

        from hvd_autosync.search_space import every_knob
        from hvd_autosync.search_space.space_schema import space_schema

        print(json.dumps(space_schema(every_knob()), indent=2))
        return
    if words:
        from hvd_autosync.commands.flag import space_command

        raise typer.Exit(space_command(list(words)))
    from rich.text import Text

    from hvd_autosync.reporting.space import RESTRICTIONS_HELP, catalogue_table

    out = console()
    out.print(catalogue_table())
    out.print(Text(f"\n{RESTRICTIONS_HELP}"), end="", soft_wrap=True)
