"""A job as the user gave it: the ``horovodrun`` line without our options, and what it implies."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.search_space import Host, Value

#: Parts of the names of options and variables whose values are never stored or shown.
_SECRET = frozenset(
    "apikey auth authorization bearer credential credentials key passphrase passwd password pwd "
    "secret secrets token".split()
)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
#: User and password in a URL.
_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_HIDDEN = "***"


@dataclass(frozen=True)
class Job:
    """One Horovod job.

    Attributes:
        options: Options of ``horovodrun`` in the user's order, ours left out.
        command: The user's command and its arguments.
        hosts: Hosts in rank order with the slots that the job uses.
        controller: ``"gloo"`` or ``"mpi"`` where the user chose; ``None`` where Horovod chooses.
        held: Knobs that options, environment or configuration file set, with their values.
        ssh: Arguments for ssh to the hosts: ``port`` and ``identity file``, where given.
    """

    options: tuple[str, ...]
    command: tuple[str, ...]
    hosts: tuple[Host, ...]
    controller: str | None = None
    held: tuple[tuple[str, Value], ...] = ()
    ssh: tuple[int | None, str | None] = (None, None)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(host.slots for host in self.hosts)

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits: equal for the same command, script text, hosts and settings.

        The order of options does not matter; the text of the script does.
        """
        identity = [
            list(self.command),
            [_digest(word) for word in self.command],
            [(host.name, host.slots) for host in self.hosts],
            sorted(self.options),
            self.controller,
            dict(self.held),
            str(Path.cwd()),
        ]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    def on(self, hosts: tuple[Host, ...]) -> Job:
        """The job on a part of its hosts and slots."""
        if hosts == self.hosts:
            return self
        layout = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        count = sum(host.slots for host in hosts)
        # The last of several equal options counts, and -H before --hostfile.
        options = (*self.options, "-np", str(count), "-H", layout)
        if len(hosts) == 1 and any(o.startswith("--network-interface") for o in self.options):
            # A job on one host alone must be allowed its loopback
            # (get_local_interfaces of horovod/runner/driver/driver_service.py).
            options = (*options, "--network-interfaces", "lo")
        return replace(self, options=options, hosts=hosts)

    def display(self) -> tuple[str, ...]:
        """The ``horovodrun`` line with the values of secrets hidden."""
        return ("horovodrun", *redact(self.options), *redact(self.command))


def _digest(word: str) -> str:
    """Digest of the file that ``word`` names, or nothing: the job is the script, not its name."""
    path = Path(word)
    if path.suffix not in {".py", ".sh"} or not path.is_file():
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def redact(words: Sequence[str]) -> tuple[str, ...]:
    """``words`` of a command line with the values of options that look like secrets hidden."""
    shown: list[str] = []
    hide_next = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = _is_secret(name) and (equals != "" or word.startswith("-"))
        if hide_next and not word.startswith("-"):
            shown.append(_HIDDEN)
        elif secret and equals:
            shown.append(f"{name}={_HIDDEN}")
        elif " " in word:  # a line for a shell
            shown.append(" ".join(redact(word.split(" "))))
        else:
            shown.append(_IN_URL.sub(f"{_HIDDEN}@", word))
        hide_next = secret and not equals
    return tuple(shown)


def _is_secret(name: str) -> bool:
    """Whether an option or variable is named like one that holds a secret, such as --api-key."""
    parts = re.split(r"[^a-z]+", _CAMEL.sub("-", name).lower())
    return not _SECRET.isdisjoint(parts)


def assign_hosts(hosts: str, num_proc: int, *, exact: bool = False) -> tuple[Host, ...]:
    """The hosts and slots that ``horovodrun`` uses for ``num_proc`` ranks.

    Args:
        hosts: As given to ``-H``: ``name:slots,...``.
        num_proc: Number of ranks.
        exact: Whether slots that stay empty are an error: under Gloo Horovod starts a rank on
            each slot, whatever ``-np`` says (``launch_gloo`` of ``gloo_run.py``).

    Raises:
        ConfigurationError: The list cannot be read, has too few slots, or too many.
    """
    slots: list[Host] = []
    left, empty = num_proc, 0
    for entry in hosts.split(","):
        name, _, count = entry.strip().rpartition(":")
        if not name or not count.isdigit() or int(count) < 1:
            raise ConfigurationError(
                f"host {entry.strip()!r} in {hosts!r} is not of the form name:slots",
                hint="Write, for example, -H node1:4,node2:4.",
            )
        used = min(left, int(count))
        left -= used
        empty += int(count) - used
        if used:
            slots.append(Host(name, used))
    if left:
        raise ConfigurationError(
            f"-np {num_proc} asks for more ranks than the {num_proc - left} slots of {hosts!r}",
            hint="Lower -np or add slots with -H or --hostfile.",
        )
    if empty and exact:
        wanted = ",".join(f"{host.name}:{host.slots}" for host in slots)
        raise ConfigurationError(
            f"-np {num_proc} leaves {empty} slots of {hosts!r} empty, but under Gloo Horovod "
            "starts a rank on each slot",
            hint=f"Write -H {wanted}, or choose --mpi.",
        )
    return tuple(slots)


def python_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environment`` as the job gets it, without what belongs to one process of ours."""
    return {k: v for k, v in environment.items() if k not in {"COLUMNS", "LINES"}}
