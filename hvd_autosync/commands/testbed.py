"""``hvd-autosync testbed``: several hosts on one machine, to try things on."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from hvd_autosync.commands.common import Commands
from hvd_autosync.errors import ConfigurationError

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Several hosts on this one machine: network namespaces joined by links of a chosen rate, "
    "each with a name, an sshd and processes of its own. Needs root.",
)


@app.command()
def up(
    hosts: Annotated[int, typer.Option(min=1, max=250, help="Number of hosts.")] = 2,
    slots: Annotated[int, typer.Option(min=1, help="Ranks on each host.")] = 1,
    rate: Annotated[
        str,
        typer.Option(
            metavar="RATE[,...]",
            show_default=False,
            help="Rate of the links, such as 200mbit or 1gbit; one for all, or one for "
            "each host. Default: unlimited.",
        ),
    ] = "",
) -> None:
    """Make the hosts; they stay until `down`."""
    from hvd_autosync.testing import daemon as keeper

    rates = [_mbit(word) for word in rate.split(",")] if rate else [None]
    if len(rates) not in (1, hosts):
        raise ConfigurationError(
            f"--rate {rate!r} names {len(rates)} rates for {hosts} hosts",
            hint="Give one rate for all, or one for each host.",
        )
    kept = keeper.up(hosts, slots, rates * hosts if len(rates) == 1 else rates)
    print(f"up: {', '.join(kept.hosts)}")
    print("try: hvd-autosync testbed run horovodrun --gloo --autosync python train.py")


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.")],
    host: Annotated[int, typer.Option(min=0, help="On which host, counted from 0.")] = 0,
) -> None:
    """Run a command on a host; a horovodrun without -H is given all hosts.

    Exit status: that of the command.
    """
    from hvd_autosync.testing import daemon as keeper

    kept = keeper.find()
    if kept is None:
        raise ConfigurationError(
            "no test bed is up", hint="Make one: hvd-autosync testbed up --hosts 2."
        )
    words = kept.command(command, host)
    os.execvp(words[0], words)


@app.command()
def down() -> None:
    """End the hosts with everything that runs on them."""
    from hvd_autosync.testing import daemon as keeper

    print("down" if keeper.down() else "no test bed was up")


def _mbit(text: str) -> float:
    """``200mbit`` and ``1gbit`` in Mbit/s.

    Raises:
        ConfigurationError: It is no rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mg])bit", text.strip().lower())
    if match is None or not float(match[1]) > 0:
        raise ConfigurationError(
            f"{text!r} is not a rate", hint="Write, for example, 200mbit or 1gbit."
        )
    return float(match[1]) * (1000 if match[2] == "g" else 1)
