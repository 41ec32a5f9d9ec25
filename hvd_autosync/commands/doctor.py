"""``hvd-autosync doctor``: run the checks and print the findings."""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from hvd_autosync.commands.common import (
    StoreOption,
    console,
    load_extensions,
    refuse_without_effect,
)
from hvd_autosync.errors import AutosyncError, ConfigurationError

if TYPE_CHECKING:
    from hvd_autosync.doctor.finding import Finding

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def add_command(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command()(doctor)


def doctor(
    context: typer.Context,
    hosts: Annotated[
        str,
        typer.Option(
            "--hosts",
            "-H",
            metavar="HOST[:SLOTS],...",
            show_default=False,
            help="Also check these hosts: name resolution, ssh, and the package on each.",
        ),
    ] = "",
    ssh_port: Annotated[
        int | None, typer.Option("--ssh-port", "-p", show_default=False, help="Port for ssh.")
    ] = None,
    ssh_identity_file: Annotated[
        str | None,
        typer.Option("--ssh-identity-file", "-i", show_default=False, help="Private key for ssh."),
    ] = None,
    store: StoreOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this installation, and print a remedy for each problem.

    The table below the checks lists what a tuned job replaces in other packages, which module does
    it, and the versions with which that was tested.

    Exit status: 1 if a check fails, else 0, also with warnings.
    """
    from hvd_autosync.doctor.checks import examine, patch_table
    from hvd_autosync.doctor.finding import Severity
    from hvd_autosync.launch.job import is_host_name

    if not hosts:
        refuse_without_effect(context, "without --hosts", "ssh_port", "ssh_identity_file")
    names = [host.strip().partition(":")[0] for host in hosts.split(",") if host.strip()]
    for name in names:
        if not is_host_name(name):
            raise ConfigurationError(
                f"--hosts {hosts}: {name!r} is no host name",
                hint="Write, for example, --hosts node1,node2.",
            )
    checks: list[Finding] = []
    findings = examine(names, ssh=(ssh_port, ssh_identity_file), store=store)
    for check in itertools.chain(findings, [check_variables()]):
        checks.append(check)
        if not as_json:
            print_check(check)
    failed = any(check.severity is Severity.FAIL for check in checks)
    patches = patch_table()
    if as_json:
        document = {"ok": not failed, "checks": [c.to_json() for c in checks], "patches": patches}
        print(json.dumps(document, indent=2))
    else:
        print_patches(patches)
    raise typer.Exit(int(failed))


def check_variables() -> Finding:
    """Check the variables from which jobs read their options, and the files that they name."""
    from hvd_autosync.doctor.finding import Finding, Severity
    from hvd_autosync.engine.option_values import PREFIX
    from hvd_autosync.engine.options import resolve_options
    from hvd_autosync.engine.study_options import load_restrictions
    from hvd_autosync.util.log import log_level

    try:
        log_level()
        load_extensions()
        options = resolve_options(argparse.Namespace())
        load_restrictions(options.space)
    except ValueError as error:
        return Finding("variables", Severity.FAIL, str(error), "Choose one, or unset it.")
    except AutosyncError as error:
        return Finding("variables", Severity.FAIL, error.message, error.hint)
    try:
        load_restrictions(options.space, options.allow)
    except AutosyncError as error:  # unless the command line allows it
        return Finding("variables", Severity.WARN, error.message, error.hint)
    names = ", ".join(sorted(name for name in os.environ if name.startswith(PREFIX)))
    return Finding("variables", Severity.OK, f"valid: {names}" if names else "none is set")


def print_check(check: Finding) -> None:
    """Print one finding, and its remedy below it."""
    from rich.text import Text

    severity = check.severity.value
    line = Text.assemble((f"{severity:<4}", _STYLES[severity]), f"  {check.subject}: {check.text}")
    console().print(line, soft_wrap=True)
    if check.remedy:
        console().print(f"      {check.remedy}", soft_wrap=True)


def print_patches(rows: Sequence[Mapping[str, str]]) -> None:
    """Print the table of patches."""
    console().print("patches of other packages (tested versions; those here):")
    for row in rows:
        line = f"      {row['name']} ({row['tested']}; {row['here']}): {row['why']}"
        console().print(line, soft_wrap=True, markup=False)
        targets = f"          by {row['used_in']}: {row['targets']}"
        console().print(targets, soft_wrap=True, markup=False)
