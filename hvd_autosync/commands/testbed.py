"""``hvd-autosync testbed``: several test hosts on one machine."""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from hvd_autosync.commands.common import Commands
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.util.amounts import amount

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Simulate several hosts on this machine: network namespaces, connected by links of a "
    "chosen rate, each with its own name, sshd and processes. Needs root.",
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
            help="Rate of the links, such as 200mbit or 1gbit: one for all hosts, or one per "
            "host. Default: unlimited.",
        ),
    ] = "",
) -> None:
    """Create the hosts; they run until `down`."""
    from hvd_autosync.testing import daemon

    rates = [_mbit(word) for word in rate.split(",")] if rate else [None]
    if len(rates) not in (1, hosts):
        raise ConfigurationError(
            f"--rate {rate!r} names {amount(len(rates), 'rate')} for {amount(hosts, 'host')}",
            hint="Give one rate for all hosts, or one per host.",
        )
    testbed = daemon.up(hosts, slots, rates * hosts if len(rates) == 1 else rates)
    print(f"up: {', '.join(testbed.hosts)}")
    print("try: hvd-autosync testbed run horovodrun --gloo --autosync python train.py")


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="The command and its arguments.")],
    host: Annotated[int, typer.Option(min=0, help="Number of the host, from 0.")] = 0,
) -> None:
    """Run a command on a host; horovodrun without -H uses all hosts.

    Exit status: that of the command.
    """
    from hvd_autosync.testing import daemon

    testbed = daemon.find()
    if testbed is None:
        raise ConfigurationError(
            "no test bed is running", hint="Create one: hvd-autosync testbed up --hosts 2."
        )
    words = testbed.command(command, host)
    os.execvp(words[0], words)


@app.command()
def down() -> None:
    """Remove the hosts and end all processes on them."""
    from hvd_autosync.testing import daemon

    print("down" if daemon.down() else "no test bed was up")


def _mbit(text: str) -> float:
    """``200mbit`` and ``1gbit`` in Mbit/s.

    Raises:
        ConfigurationError: ``text`` is not a rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mg])bit", text.strip().lower())
    if match is None or not float(match[1]) > 0:
        raise ConfigurationError(
            f"invalid rate {text!r}", hint="Write for example 200mbit or 1gbit."
        )
    return float(match[1]) * (1000 if match[2] == "g" else 1)
