"""The process that launches a job under a strategy: Horovod's own launcher, in its own process.

The launcher replaces signal handlers and, with MPI, replaces itself by ``mpirun``; a process of
its own keeps the driver out of that, and makes a trial exactly what ``horovodrun`` would start.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from hvd_autosync.errors import AutosyncError
from hvd_autosync.launch.job import Job, python_environment
from hvd_autosync.launch.masking import redact
from hvd_autosync.runtime.driver.environment import DRIVER_VARIABLE, worker_environment
from hvd_autosync.search_space import TrialSpec, Value, horovod_settings
from hvd_autosync.search_space.horovod_settings import PROCESS_SETS_VARIABLE
from hvd_autosync.util.program import run_code

_LOG = logging.getLogger(__name__)
#: Open MPI 5 takes Horovod's ``-bind-to`` for the program's name; this is the same in its spelling.
OPEN_MPI_5_BINDING = "--binding-args=--bind-to none --map-by slot"
#: The hook at Python's start (``hvd_autosync.pth``) knows launchers by the last word.
_LAUNCH = "from horovod.runner.launch import run_commandline; run_commandline()  # as horovodrun"


def search_path() -> str:
    """The PATH, and beside this interpreter: a virtual environment need not be activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])


def has_mpirun() -> bool:
    """Whether there is an ``mpirun`` that the launcher will find."""
    return shutil.which("mpirun", path=search_path()) is not None


@cache
def open_mpi_major() -> int | None:
    """Major version of the Open MPI that ``mpirun`` belongs to, or ``None``."""
    mpirun = shutil.which("mpirun", path=search_path())
    if mpirun is None:
        return None
    shown = subprocess.run([mpirun, "--version"], capture_output=True, text=True).stdout
    match = re.search(r"\(Open MPI\) (\d+)", shown)
    return int(match[1]) if match else None


def launcher_options(job: Job, strategy: Mapping[str, Value]) -> tuple[str, ...]:
    """All ``horovodrun`` options of the job under ``strategy``."""
    options = (*job.options, *horovod_settings(strategy).options)
    # Without a choice Horovod takes MPI where it is built; under Gloo the option has no effect.
    under_gloo = strategy.get("controller", job.controller) == "gloo"
    user_binds = any(option.startswith("--binding-args") for option in job.options)
    if not under_gloo and not user_binds and (open_mpi_major() or 0) >= 5:
        options = (*options, OPEN_MPI_5_BINDING)
    return options


def launcher_command(job: Job, strategy: Mapping[str, Value]) -> list[str]:
    """Arguments of the process that launches the job under ``strategy``."""
    return [*_horovodrun(), *launcher_options(job, strategy), *job.command]


def _horovodrun() -> list[str]:
    """Horovod's script, or what it does, without the working directory (:mod:`..util.program`)."""
    script = os.path.join(os.path.dirname(sys.executable), "horovodrun")
    if not os.path.exists(script):
        return run_code(_LAUNCH)
    # The processes that it spawns with multiprocessing inherit this option, the ranks do not.
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), script]


def start_launcher(
    job: Job,
    strategy: Mapping[str, Value],
    spec: TrialSpec | None = None,
    *,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start that process with pipes for its output, in a session of its own.

    It ends with the thread that started it, also when that is killed.

    Args:
        job: The job.
        strategy: What it runs under.
        spec: The trial that it is.
        variables: Further ones of its environment.

    Raises:
        AutosyncError: The system refuses to.
    """
    environment = launcher_environment(strategy, spec)
    return launch(
        job,
        strategy,
        {**environment, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def launch(
    job: Job, strategy: Mapping[str, Value], environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start that process in ``environment``, with ``options`` of :class:`subprocess.Popen`.

    Raises:
        AutosyncError: The system refuses to, as where the environment is too large.
    """
    environment = {**environment, DRIVER_VARIABLE: str(os.getpid())}
    _LOG.debug("launching %s under %s", shlex.join(redact(job.command)), dict(strategy))
    try:
        return subprocess.Popen(launcher_command(job, strategy), env=environment, **options)
    except OSError as error:
        hint = "Free memory and processes on this machine, then run the same command again."
        if error.errno == errno.E2BIG:
            hint = "Unset large variables that the job does not need, and shorten its command."
        raise AutosyncError(f"the job cannot be launched: {error}", hint=hint) from None


def strategy_environment(strategy: Mapping[str, Value]) -> dict[str, str]:
    """Horovod's variables of ``strategy``, but for one that the user's own process sets need."""
    environment = dict(horovod_settings(strategy).environment)
    if os.environ.get(PROCESS_SETS_VARIABLE, "0") != "0":
        environment.pop(PROCESS_SETS_VARIABLE, None)
    return environment


def launcher_environment(
    strategy: Mapping[str, Value], spec: TrialSpec | None = None
) -> dict[str, str]:
    """Environment of that process: the user's, the strategy's, and the worker's, if any."""
    environment = python_environment() | strategy_environment(strategy)
    if spec is not None:
        environment |= worker_environment(spec)
    environment["PATH"] = search_path()
    return environment
