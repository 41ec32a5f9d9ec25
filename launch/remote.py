"""Commands of the driver on other hosts, through ssh as in Horovod's own launcher."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import hvd_autosync
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host
from hvd_autosync.util.program import run_code, run_main

_CONNECT_S = 10
#: Part of an error of ssh or of the shell -> hint. The first part that occurs counts.
_REMEDIES = {
    "not found": "Install an ssh client on this machine (Debian: apt-get install openssh-client).",
    "Connection refused": "Start sshd on {host}, or give its port with -p.",
    "resolve hostname": "Check the name, or give {host} an address in DNS or /etc/hosts.",
    "Host key verification failed": "If {host} was reinstalled, remove its old key "
    "(ssh-keygen -R {host}) and connect to it once by hand.",
    "Permission denied": "Authorize your key there (ssh-copy-id {host}), or give the key with -i: "
    "ssh must work without a password.",
}
_UNREACHABLE = ("timed out", "no answer", "o route to host", "Network is unreachable")
_UP = "Check that {host} is up, and that no firewall blocks the port of ssh (-p)."
_BY_HAND = "Make `ssh {host} true` work, without a password."
_T = TypeVar("_T")


def remote_hosts(job: Job) -> list[Host]:
    """Return the job's hosts other than this one, by Horovod's own rule."""
    from horovod.runner.util import network

    names = [host.name for host in job.hosts]
    remote = set(network.filter_local_addresses(names))
    return [host for host in job.hosts if host.name in remote]


def run_on(
    host: str, command: str, ssh: tuple[int | None, str | None] = (None, None)
) -> subprocess.CompletedProcess[str]:
    """Run a shell command on another host.

    Args:
        host: The host's name.
        command: The command, for the shell there.
        ssh: Port and identity file; ``None`` if not given.

    Raises:
        subprocess.TimeoutExpired: The host did not answer.
    """
    from horovod.runner.util.remote import get_remote_command

    line = get_remote_command(shlex.quote(command), host, *ssh, timeout_s=_CONNECT_S)
    with subprocess.Popen(
        line,
        shell=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",  # banners need not be UTF-8
        start_new_session=True,  # Ctrl-C must not end what cleans up
    ) as shell:
        try:
            out, err = shell.communicate(timeout=3 * _CONNECT_S)
        except BaseException:
            os.killpg(shell.pid, signal.SIGKILL)  # with ssh, which would go on
            raise
    return subprocess.CompletedProcess(line, shell.returncode, out, err)


def unreachable_hosts(job: Job) -> list[tuple[str, str]]:
    """Return (host, ssh's error) for each host that cannot be reached."""
    return _failing_hosts(job, "true")


def ssh_remedy(host: str, error: str) -> str:
    """Return a hint for ``host``, by the ``error`` of ssh or of the shell that runs it."""
    found = next((remedy for part, remedy in _REMEDIES.items() if part in error), _BY_HAND)
    if any(part in error for part in _UNREACHABLE):
        found = _UP
    return found.format(host=host)


def hosts_without_package(job: Job) -> list[tuple[str, str]]:
    """Return (host, Python's error) for each other host that lacks this version of the package.

    Every host is asked for the Python at this interpreter's path, as Horovod's launcher does.
    """
    own = hvd_autosync.__version__
    check = (
        f"import hvd_autosync; there = hvd_autosync.__version__; there == {own!r} or "
        f"sys.exit(f'hvd_autosync is {{there}} there and {own} here')"
    )
    return _failing_hosts(job, _as_of_ranks(run_code(check)))


def _as_of_ranks(command: list[str]) -> str:
    """Return a command line of Python, with the variables of ranks that it may need to start."""
    needed = ("LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")
    variables = [f"{name}={os.environ[name]}" for name in needed if name in os.environ]
    return shlex.join(["env", *variables, *command])


def _failing_hosts(job: Job, command: str) -> list[tuple[str, str]]:
    """Return (host, last line of the output) for each other host where ``command`` fails."""

    def check(host: Host) -> tuple[str, str] | None:
        try:
            done = run_on(host.name, command, job.ssh)
        except subprocess.TimeoutExpired:
            return host.name, f"no answer within {3 * _CONNECT_S} s"
        lines = (done.stderr or done.stdout).strip().splitlines()
        return (host.name, lines[-1] if lines else "ssh failed") if done.returncode else None

    return _each(check, remote_hosts(job))


def sweep_remote_hosts(job: Job, trial_id: str) -> list[str]:
    """Kill a trial's left-over processes on other hosts.

    Workers end by themselves when their output is closed; this is for stuck ones.

    Returns:
        A line for the user for each host where that failed.
    """

    def end(host: Host) -> str | None:
        command = _as_of_ranks(run_main("hvd_autosync.launch.sweep", trial_id))
        try:
            done = run_on(host.name, command, job.ssh)
        except subprocess.TimeoutExpired:
            return f"{host.name} does not answer; trial {trial_id} may have left processes there"
        if done.returncode:
            return f"cannot look for left-over processes on {host.name}: {done.stderr.strip()}"
        return None

    return _each(end, remote_hosts(job))


def _each(function: Callable[[Host], _T | None], hosts: list[Host]) -> list[_T]:
    """Call ``function`` for all hosts in parallel; return the results that are not ``None``."""
    if not hosts:
        return []
    with ThreadPoolExecutor(min(len(hosts), 16)) as pool:
        return [result for result in pool.map(function, hosts) if result is not None]
