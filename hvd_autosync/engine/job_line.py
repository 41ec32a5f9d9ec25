"""Parsing of a ``horovodrun`` line into a job and its options, as Horovod parses it."""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NoReturn

from hvd_autosync import extensions
from hvd_autosync.engine.option_conflicts import check_elastic
from hvd_autosync.engine.option_values import option_name
from hvd_autosync.engine.options import (
    IMPLY,
    Options,
    add_options,
    after_command,
    given_options,
    resolve_options,
    without_our_options,
)
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.job import Job, assign_hosts, is_host_name
from hvd_autosync.runtime.driver.environment import DISABLE_VARIABLE, TRIAL_VARIABLE
from hvd_autosync.search_space import Host
from hvd_autosync.search_space.horovod_settings import AUTOTUNE_VARIABLE, held_by_environment
from hvd_autosync.util import patches
from hvd_autosync.util.printable import printable_lines
from hvd_autosync.util.variables import JOB_VARIABLE, is_on


class _Parser(argparse.ArgumentParser):
    """Horovod's parser with our options and our checks before anything is launched."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        add_options(self)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        parsed: argparse.Namespace = super().parse_args(args, namespace)
        given = given_options(parsed)
        parsed.autosync |= not IMPLY.isdisjoint(given)
        if given and not parsed.autosync:
            name = option_name(given[0])
            self.error(f"{name} has no effect without --autosync; add --autosync or remove it")
        if parsed.autosync and not parsed.check_build:
            try:
                _refuse(parsed)
                options = resolve_options(parsed, section=_file_section(parsed.config_file))
                if _is_elastic(parsed):
                    check_elastic(options)
            except ConfigurationError as error:
                self.error(str(error))
        if os.environ.keys().isdisjoint((TRIAL_VARIABLE, JOB_VARIABLE)):  # else its driver has
            for name in after_command(parsed.command or ()):
                line = f"hvd-autosync: note: {name} follows the command, so the command gets it; an"
                print(f"{line} option of horovodrun precedes the command", file=sys.stderr)
        return parsed

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and exit; with one of our options, leave out Horovod's usage text."""
        ours = [word for word in sys.argv if word.startswith("--autosync")]
        if not ours:
            super().error(message)
        unknown = [word for word in ours if word in message.split()]
        for word in unknown if message.startswith("unrecognized arguments") else ():
            near = difflib.get_close_matches(word.partition("=")[0], self._option_string_actions, 1)
            message += f"\n  Did you mean {near[0]}?" if near else ""
        self.exit(2, printable_lines(f"{self.prog}: error: {message}\n"))


def _refuse(arguments: argparse.Namespace) -> None:
    """Reject jobs that cannot be tuned, before anything is launched.

    Raises:
        ConfigurationError: The job cannot be tuned; the message says why.
    """
    if arguments.command in ([], ["--"]):
        raise ConfigurationError(
            "there is no command to tune",
            hint="Append it: horovodrun -np 2 --autosync python train.py",
        )
    if arguments.num_proc is not None and arguments.num_proc < 1:
        raise ConfigurationError(
            f"invalid value {arguments.num_proc} for -np: a job has at least one rank",
            hint="Write, for example, -np 2.",
        )
    if arguments.autotune:
        raise ConfigurationError(
            "--autotune and --autosync cannot be combined: both change the same parameters",
            hint="Remove one of them.",
        )
    if arguments.use_jsrun:
        raise ConfigurationError(
            "jsrun jobs are not supported: it takes no variables of single trials",
            hint="Use --mpi.",
        )


def extend_parser() -> None:
    """Add our options to the parser of ``horovod.runner.launch``."""
    shim = ModuleType("argparse")
    shim.__dict__.update(vars(argparse))
    shim.ArgumentParser = _Parser  # type: ignore[attr-defined]
    patches.install("launcher options", lambda _: shim)


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Parse a ``horovodrun`` line as Horovod does, with ``--autosync`` implied."""
    from horovod.runner import launch

    if not issubclass(launch.argparse.ArgumentParser, _Parser):
        extend_parser()
    before = sys.argv
    sys.argv = ["horovodrun", "--autosync", *words]
    try:
        parsed: argparse.Namespace = launch.parse_args()
    finally:
        sys.argv = before
    return parsed


def read_job(arguments: argparse.Namespace, words: Sequence[str]) -> tuple[Job, Options]:
    """Return the job and the options of a parsed ``horovodrun`` line.

    Raises:
        ConfigurationError: Something in them cannot be used; nothing was launched.
    """
    from horovod.runner.common.util import config_parser, hosts
    from horovod.runner.util.lsf import LSFUtils

    extensions.load()
    extensions.check_unchanged()
    section = _file_section(arguments.config_file)
    options = resolve_options(arguments, section=section)
    if is_on(os.environ.get(DISABLE_VARIABLE, "")) and not options.dry_run:
        raise ConfigurationError(
            f"{DISABLE_VARIABLE} is on: ranks would follow no strategy, and report no steps",
            hint=f"Unset {DISABLE_VARIABLE}.",
        )
    _refuse(arguments)  # again: the configuration file may have switched autotune on
    environment = config_parser.set_env_from_args(dict(os.environ), arguments)
    if environment.get(AUTOTUNE_VARIABLE, "0") not in ("", "0"):
        raise ConfigurationError(
            f"{AUTOTUNE_VARIABLE} is set: Horovod's own tuner would change the tuned parameters",
            hint=f"Unset {AUTOTUNE_VARIABLE}.",
        )
    elastic = _is_elastic(arguments)
    if elastic:
        check_elastic(options)  # again: the configuration file may have made it so
        options = replace(options, mode="live")
    given_hosts = arguments.hosts
    if given_hosts is None and arguments.hostfile:
        try:
            given_hosts = hosts.parse_host_files(arguments.hostfile)
        except (OSError, IndexError, ValueError) as error:
            raise ConfigurationError(
                f"the hostfile {arguments.hostfile!r} cannot be read: {error}",
                hint="Write one line such as `node1 slots=4` per host, and no other lines.",
            ) from None
    if given_hosts is not None and not given_hosts.strip():
        source = f"hostfile {arguments.hostfile!r}" if arguments.hostfile else "list of hosts"
        raise ConfigurationError(
            f"the {source} is empty",
            hint="Name hosts with their slots, or leave the option out: this host only.",
        )
    discovered = _discovered(arguments)
    if LSFUtils.using_lsf() and not discovered and (not given_hosts or not arguments.num_proc):
        raise ConfigurationError(
            "--autosync does not read hosts and slots from LSF",
            hint="Give -np and the hosts with -H, and choose --mpi: under LSF Horovod looks for no "
            "networks, which Gloo needs.",
        )
    if LSFUtils.using_lsf() and not (discovered or elastic or arguments.use_mpi):
        raise ConfigurationError(
            "under LSF Horovod may launch by jsrun, which takes no variables of single trials, and "
            "looks for no networks, which Gloo needs",
            hint="Choose --mpi.",
        )
    given_hosts = given_hosts or f"localhost:{arguments.num_proc}"
    command = tuple(arguments.command)
    before = words[: len(words) - len(command)]
    if command[0] == "--":  # between the options and the command
        command = command[1:]
    controller = "gloo" if arguments.use_gloo else "mpi" if arguments.use_mpi else None
    if elastic:
        controller = "gloo"  # whatever was asked for
    job = Job(
        options=without_our_options(before),
        command=command,
        hosts=discovered
        or assign_hosts(given_hosts, arguments.num_proc, exact=controller != "mpi" and not elastic),
        controller=controller,
        held=tuple(sorted(held_by_environment(environment).items())),
        ssh=(arguments.ssh_port, arguments.ssh_identity_file),
    )
    if elastic and not job.elastic:
        raise ConfigurationError(
            "the configuration file makes the job elastic",
            hint="Give --min-np or --host-discovery-script on the command line instead.",
        )
    return job, options


def _is_elastic(arguments: argparse.Namespace) -> bool:
    """Return whether Horovod's elastic launcher will run the job, as Horovod decides it."""
    return bool(arguments.host_discovery_script) or arguments.min_num_proc is not None


def _discovered(arguments: argparse.Namespace) -> tuple[Host, ...]:
    """Return the hosts that the discovery script names now; empty if none, or without a script.

    Raises:
        ConfigurationError: The script fails.
    """
    if not arguments.host_discovery_script:
        return ()
    script = arguments.host_discovery_script
    # As in HostDiscoveryScript of horovod/runner/elastic/discovery.py.
    done = subprocess.run(script, shell=True, capture_output=True, text=True, errors="replace")
    lines = sorted({line.strip() for line in done.stdout.splitlines()} - {""})
    try:
        if done.returncode:
            raise ValueError(done.stderr.strip() or f"status {done.returncode}")
        found = [(line.partition(":")[0], line.partition(":")[2]) for line in lines]
        if bad := [name for name, _ in found if not is_host_name(name)]:
            raise ValueError(f"{bad[0]!r} is no host name")
        return tuple(Host(name, int(slots or arguments.slots or 1)) for name, slots in found)
    except ValueError as error:
        raise ConfigurationError(
            f"the host discovery script {script!r} fails: {error}",
            hint="Let it print one line such as `node1:4` per host, and end with status 0.",
        ) from None


def _file_section(path: str | None) -> Mapping[str, Any]:
    """Return the section ``autosync`` of Horovod's configuration file.

    Raises:
        ConfigurationError: The file is missing, or nothing that Horovod or we can read.
    """
    if path is None:
        return {}
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            document = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError) as error:  # a date that does not exist
        raise ConfigurationError(
            f"the configuration file {path!r} cannot be read: {error}",
            hint="Write YAML as in `horovodrun --help`, under --config-file.",
        ) from None
    if not isinstance(document, Mapping):
        raise ConfigurationError(
            f"the configuration file {path!r} has no sections",
            hint="Write a section such as `autosync:` with entries such as `trials: 20` below it.",
        )
    section = document.get("autosync") or {}
    if not isinstance(section, Mapping):
        raise ConfigurationError(
            f"autosync in {path!r} is not a section", hint="Write entries such as trials: 20."
        )
    return section
