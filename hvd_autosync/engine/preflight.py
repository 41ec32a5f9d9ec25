"""Checks before a job is launched: its program, its script, its controller, its other hosts."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.job import Job
from hvd_autosync.util.log import start_log
from hvd_autosync.util.program import search_path

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


def start_driver_log() -> None:
    """Start the driver's log if ``HVD_AUTOSYNC_LOG`` is set.

    Raises:
        ConfigurationError: The variable is not a log level.
    """
    try:
        start_log("driver")
    except ValueError as error:
        raise ConfigurationError(str(error), hint="Set it to one of them, or unset it.") from None


def check_command(job: Job) -> None:
    """Check that the program and the Python script exist, if this host takes part.

    Raises:
        ConfigurationError: One of them does not exist.
    """
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
            hint="Check the spelling, or give the path of an executable file.",
        )
    script = script_word(words)
    if script is not None and not os.path.exists(script):  # noqa: PTH110 (takes any text)
        raise ConfigurationError(
            f"the script {script!r} does not exist in {Path.cwd()}", hint="Check its path."
        )


def check_controller(job: Job, named: object = None) -> None:
    """Check that ``horovodrun`` can launch the job as it is; its trials may name a controller.

    Args:
        job: The job.
        named: The controller of the strategy that it is to run under; ``None``: its own.

    Raises:
        ConfigurationError: Horovod was built without that controller, or there is no ``mpirun`` for
            it, or for a job that names none where Horovod was built with MPI.
        HorovodBuildError: ``horovod.torch`` cannot be imported.
    """
    from hvd_autosync.launch.facts import horovod_build, mpi_built

    build = horovod_build()
    if named is not None:
        if not (build.mpi if named == "mpi" else build.gloo):
            what = "there is no mpirun" if named == "mpi" and mpi_built() else "Horovod lacks it"
            raise ConfigurationError(
                f"the strategy needs the controller {named}, but {what}",
                hint=f"Build Horovod with {named}, load its MPI, or tune the job here.",
            )
        return
    names_none = job.controller is None and not job.elastic  # elastic jobs always run under Gloo
    if names_none and mpi_built() and not build.mpi:
        raise ConfigurationError(
            "Horovod was built with MPI, by which horovodrun launches this job, but there is no "
            "mpirun",
            hint="Load the MPI of this Horovod, or give --gloo.",
        )


def check_hosts(job: Job) -> None:
    """Check that all hosts can be reached and have this package.

    Raises:
        ConfigurationError: Some cannot take part; the message names hosts and reasons.
    """
    from hvd_autosync.launch.remote import hosts_without_package, ssh_remedy, unreachable_hosts

    if unreachable := unreachable_hosts(job):
        raise ConfigurationError(
            f"hosts cannot be reached by ssh: {_listed(unreachable)}",
            hint=" ".join(
                [
                    *(ssh_remedy(*finding) for finding in unreachable),
                    "Without ssh, start the ranks by srun or mpirun with HVD_AUTOSYNC_LIVE=1 "
                    "(docs/live.md).",
                ]
            ),
        )
    if lacking := hosts_without_package(job):
        raise ConfigurationError(
            f"hosts lack this version of hvd_autosync: {_listed(lacking)}",
            hint=f"Run there, in a checkout: {sys.executable} -m pip install .",
        )


def _listed(findings: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{host}: {reason}" for host, reason in findings)
