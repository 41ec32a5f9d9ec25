"""Checks of host names and of other hosts."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from hvd_autosync.doctor.finding import Finding, Severity
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.remote import (
    hosts_without_package,
    remote_hosts,
    run_on,
    ssh_remedy,
    unreachable_hosts,
)
from hvd_autosync.search_space import Host

_LOCALHOST = "In a list of several hosts, write this machine's own name."
_ETC_HOSTS = "Give {name} the address of its network card in /etc/hosts of {where}."


def check_hosts(
    names: Sequence[str], ssh: tuple[int | None, str | None] = (None, None)
) -> Iterator[Finding]:
    """Check whether host names resolve to reachable addresses, and whether ssh reaches the hosts.

    Ranks on several hosts connect to the address that a host's own name resolves to on that host
    (Gloo process sets, whatever network interface is requested).

    Args:
        names: The job's hosts; empty for a job on this machine only.
        ssh: Port and identity file; ``None``: ssh's defaults.
    """
    own = socket.gethostname()
    several = len(set(names)) > 1
    job = Job(options=(), command=(), hosts=tuple(Host(name, 1) for name in names), ssh=ssh)
    remote = [host.name for host in remote_hosts(job)]
    has_rank = own in names or len(remote) < len(names)
    yield _check_name(own, _resolve(own), "this machine", needed=several and has_rank)
    for name in names:
        if name != own:
            yield _check_name(name, _resolve(name), "every host", needed=several)
    if not names:
        return
    unreachable = dict(unreachable_hosts(job))
    lacking = dict(hosts_without_package(job))
    with ThreadPoolExecutor(16) as pool:
        reachable = [name for name in remote if name not in unreachable]
        answers = pool.map(lambda name: _ask(name, ssh), reachable)
        own_addresses = dict(zip(reachable, answers, strict=True))
    for name in remote:
        if name in unreachable:
            yield Finding(
                f"ssh {name}", Severity.FAIL, unreachable[name], ssh_remedy(name, unreachable[name])
            )
        else:
            yield Finding(f"ssh {name}", Severity.OK, "answers")
            if name in lacking:
                yield Finding(
                    f"package on {name}",
                    Severity.FAIL,
                    lacking[name],
                    f"Run there, in a checkout: {sys.executable} -m pip install .",
                )
            yield _check_name(name, own_addresses[name], name, needed=several)


def _check_name(name: str, addresses: list[str], where: str, *, needed: bool) -> Finding:
    """Return the finding for a name that resolves to ``addresses`` on the host ``where``.

    Args:
        name: The host's name.
        addresses: The addresses that it resolves to; empty if it does not resolve.
        where: The host that resolved it, in words.
        needed: Whether other hosts connect to that host; else a problem is a warning only.
    """
    subject = f"name {name}" if where in ("this machine", "every host") else f"name on {where}"
    remedy = _LOCALHOST if name == "localhost" else _ETC_HOSTS.format(name=name, where=where)
    bad = Severity.FAIL if needed else Severity.WARN
    if not addresses:
        return Finding(subject, bad, "does not resolve to an address", remedy)
    if any(ipaddress.ip_address(address).is_loopback for address in addresses):
        reached = ", ".join(addresses)
        return Finding(
            subject, bad, f"resolves to {reached}: other hosts cannot connect to that", remedy
        )
    return Finding(subject, Severity.OK, f"resolves to {', '.join(addresses)}")


def _resolve(name: str) -> list[str]:
    """IPv4 addresses of ``name`` as this machine resolves it."""
    try:
        return socket.gethostbyname_ex(name)[2]
    except (OSError, UnicodeError):
        return []


def _ask(name: str, ssh: tuple[int | None, str | None]) -> list[str]:
    """IPv4 addresses that the host ``name`` resolves its own name to."""
    try:
        done = run_on(name, "getent ahostsv4 `hostname`", ssh)  # csh does not know $(...)
    except subprocess.TimeoutExpired:
        return []
    rows = map(str.split, done.stdout.splitlines())  # and what a shell says at its start
    return sorted({row[0] for row in rows if row[1:2] in (["STREAM"], ["DGRAM"], ["RAW"])})
