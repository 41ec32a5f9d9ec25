"""Starts Horovod's own launcher, in a process of its own, for a job under a strategy.

The launcher replaces signal handlers and, with MPI, replaces itself by ``mpirun``. A separate
process shields the driver from that, and makes a trial exactly what ``horovodrun`` would start.
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
from hvd_autosync.launch.facts import known_controllers
from hvd_autosync.launch.horovodrun_options import BINDING, is_option
from hvd_autosync.launch.job import Job, job_environment
from hvd_autosync.launch.masking import redact
from hvd_autosync.runtime.driver.environment import DRIVER_VARIABLE, worker_environment
from hvd_autosync.search_space import TrialSpec, Value, horovod_settings
from hvd_autosync.search_space.horovod_settings import PROCESS_SETS_VARIABLE, without_held
from hvd_autosync.util.program import run_code, search_path
from hvd_autosync.util.variables import CONTROLLERS_VARIABLE, LIVE_VARIABLE, STORE_VARIABLE

_LOG = logging.getLogger(__name__)
#: Open MPI 5 reads Horovod's ``-bind-to`` as the program's name; this option means the same there.
OPEN_MPI_5_BINDING = "--binding-args=--bind-to none --map-by slot"
#: The hook at Python's start (``hvd_autosync.pth``) recognizes launchers by the last word.
_LAUNCH = "from horovod.runner.launch import run_commandline; run_commandline()  # as horovodrun"
#: Lets setproctitle, by which scripts name their processes, not overwrite ``/proc/PID/environ``, by
#: which processes of trials are found (:mod:`hvd_autosync.launch.sweep`).
_KEPT_MARK = {"SPT_NOENV": "1"}


@cache
def open_mpi_major() -> int | None:
    """Return the major version of ``mpirun``'s Open MPI, or ``None`` if it is another MPI."""
    mpirun = shutil.which("mpirun", path=search_path())
    if mpirun is None:
        return None
    shown = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, errors="replace"
    ).stdout
    match = re.search(r"\(Open MPI\) (\d+)", shown)
    return int(match[1]) if match else None


def launcher_options(job: Job, strategy: Mapping[str, Value]) -> tuple[str, ...]:
    """Return all ``horovodrun`` options of the job under ``strategy``."""
    options = (*job.options, *horovod_settings(strategy).options)
    # Without an option Horovod uses MPI if it was built with it; under Gloo this has no effect.
    under_gloo = strategy.get("controller", job.controller) == "gloo"
    user_binds = any(is_option(word, BINDING) for word in job.options)
    if not under_gloo and not user_binds and (open_mpi_major() or 0) >= 5:
        options = (*options, OPEN_MPI_5_BINDING)
    return options


def launcher_command(job: Job, strategy: Mapping[str, Value]) -> list[str]:
    """Return the command line that launches the job under ``strategy``."""
    return [*_horovodrun(), *launcher_options(job, strategy), *job.command]


def _horovodrun() -> list[str]:
    """Return the command of ``horovodrun`` that does not import from the working directory.

    See :mod:`hvd_autosync.util.program`.
    """
    script = os.path.join(os.path.dirname(sys.executable), "horovodrun")
    if not os.path.exists(script):
        return run_code(_LAUNCH)
    # Processes that it spawns with multiprocessing inherit -P; the ranks do not.
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), script]


def start_launcher(
    job: Job,
    strategy: Mapping[str, Value],
    spec: TrialSpec | None = None,
    *,
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start the launcher of a trial, with pipes for its output, in a session of its own.

    It ends with the thread that started it, even if that thread is killed.

    Args:
        job: The job.
        strategy: The strategy to run under.
        spec: The trial, if the job is one.
        variables: Additional environment variables.

    Raises:
        AutosyncError: The process cannot be started.
    """
    environment = launcher_environment(strategy, spec)
    return launch(
        job,
        strategy,
        {**_KEPT_MARK, **environment, **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def launch(
    job: Job, strategy: Mapping[str, Value], environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[bytes]:
    """Start the launcher in ``environment``, with ``options`` of :class:`subprocess.Popen`.

    Raises:
        AutosyncError: The process cannot be started, for example because the environment is too
            large.
    """
    environment = {**environment, DRIVER_VARIABLE: str(os.getpid())}
    if known := known_controllers():
        environment[CONTROLLERS_VARIABLE] = " ".join(known)
    _LOG.debug("launching %s under %s", shlex.join(redact(job.command)), dict(strategy))
    try:
        return subprocess.Popen(launcher_command(job, strategy), env=environment, **options)
    except OSError as error:
        hint = "Free memory and processes on this machine, then run the same command again."
        if error.errno == errno.E2BIG:
            hint = "Unset large variables that the job does not need, and shorten its command."
        raise AutosyncError(f"the job cannot be launched: {error}", hint=hint) from None


def strategy_environment(strategy: Mapping[str, Value]) -> dict[str, str]:
    """Return the variables of ``strategy``.

    The variable for process sets is left out if the user has set it, because the script needs it;
    so are variables of libraries below Horovod.
    """
    environment = without_held(dict(horovod_settings(strategy).environment), os.environ)
    if os.environ.get(PROCESS_SETS_VARIABLE, "0") != "0":
        environment.pop(PROCESS_SETS_VARIABLE, None)
    return environment


def launcher_environment(
    strategy: Mapping[str, Value], spec: TrialSpec | None = None
) -> dict[str, str]:
    """Return the launcher's environment: the user's, the strategy's, and the trial's, if any.

    Horovod writes it on command lines, so a store's address with a password is left out.
    """
    environment = job_environment() | strategy_environment(strategy)
    environment.pop(LIVE_VARIABLE, None)  # whoever launches the job knows whether it is tuned live
    if STORE_VARIABLE in environment:
        from hvd_autosync.traces.location import has_secrets  # with SQLAlchemy, which loads slowly

        if has_secrets(environment[STORE_VARIABLE]):
            del environment[STORE_VARIABLE]
    if spec is not None:
        environment |= worker_environment(spec)
    environment["PATH"] = search_path()
    return environment
