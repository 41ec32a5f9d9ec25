"""What is looked at before a job is tried: its program, its script, its other hosts."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
from collections.abc import Sequence

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.job import Job
from hvd_autosync.util.log import start_log

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def start_driver_log() -> None:
    """Begin the driver's log, where ``HVD_AUTOSYNC_LOG`` asks for it.

    Raises:
        ConfigurationError: The variable names no level.
    """
    try:
        start_log("driver")
    except ValueError as error:
        raise ConfigurationError(str(error), hint="Set it to one of them, or unset it.") from None


def check_command(job: Job) -> None:
    """Refuse a program or Python script that is not here, if this host takes part.

    Raises:
        ConfigurationError: Names it.
    """
    from hvd_autosync.launch.command import search_path
    from hvd_autosync.launch.remote import remote_hosts
    from hvd_autosync.launch.user_script import script_word

    if len(remote_hosts(job)) == len(job.hosts):
        return
    # Horovod's ranks are started by ``env``, which takes assignments before a command.
    words = list(itertools.dropwhile(_ASSIGNMENT.match, job.command))
    if not words or any(word.startswith("PATH=") for word in job.command):
        return
    if shutil.which(words[0], path=search_path()) is None:
        raise ConfigurationError(
            f"the command's program {words[0]!r} is not found",
            hint="Mend its name, or make it executable and name it with its path.",
        )
    script = script_word(words)
    if script is not None and not os.path.isfile(script):
        raise ConfigurationError(
            f"the script {script!r} is no file in {os.getcwd()}", hint="Mend its path."
        )


def check_hosts(job: Job) -> None:
    """Refuse hosts that cannot take part, before the job is tried on them.

    Raises:
        ConfigurationError: Names them, and why.
    """
    from hvd_autosync.launch.remote import hosts_without_package, ssh_remedy, unreachable_hosts

    if unreachable := unreachable_hosts(job):
        raise ConfigurationError(
            f"hosts cannot be reached by ssh: {_listed(unreachable)}",
            hint=" ".join(ssh_remedy(*finding) for finding in unreachable),
        )
    if lacking := hosts_without_package(job):
        raise ConfigurationError(
            f"hosts cannot take part: {_listed(lacking)}",
            hint=f"Install hvd_autosync there too, for {sys.executable}.",
        )


def _listed(findings: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{host}: {said}" for host, said in findings)
