"""A job as the user gave it: the ``horovodrun`` line without our options, and what it implies."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.search_space import Host, Value

#: Names of options and variables whose values are never stored or shown.
_SECRET = re.compile(r"key|token|secret|passw|credential|auth(?!or|osync)", re.IGNORECASE)
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
        """Twelve hexadecimal digits: equal for the same command, script text, layout and settings.

        Host names and the order of options do not matter; the text of the script does.
        """
        identity = [
            list(self.command),
            [_digest(word) for word in self.command],
            [host.slots for host in self.hosts],
            self.controller,
            dict(self.held),
            str(Path.cwd()),
        ]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

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
        secret = _SECRET.search(name) is not None and (equals != "" or word.startswith("-"))
        if hide_next and not word.startswith("-"):
            shown.append(_HIDDEN)
        elif secret and equals:
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(word)
        hide_next = secret and not equals
    return tuple(shown)


def assign_hosts(hosts: str, num_proc: int) -> tuple[Host, ...]:
    """The hosts and slots that ``horovodrun`` uses for ``num_proc`` ranks.

    Args:
        hosts: As given to ``-H``: ``name:slots,...``.
        num_proc: Number of ranks.

    Raises:
        ConfigurationError: The list cannot be read, or has too few slots.
    """
    slots: list[Host] = []
    left = num_proc
    for entry in hosts.split(","):
        name, _, count = entry.strip().rpartition(":")
        if not name or not count.isdigit() or int(count) < 1:
            raise ConfigurationError(
                f"host {entry.strip()!r} in {hosts!r} is not of the form name:slots",
                hint="Write, for example, -H node1:4,node2:4.",
            )
        used = min(left, int(count))
        left -= used
        if used:
            slots.append(Host(name, used))
    if left:
        raise ConfigurationError(
            f"-np {num_proc} asks for more ranks than the {num_proc - left} slots of {hosts!r}",
            hint="Lower -np or add slots with -H or --hostfile.",
        )
    return tuple(slots)


def python_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environment`` as the job gets it, without what belongs to one process of ours."""
    return {k: v for k, v in environment.items() if k not in {"COLUMNS", "LINES"}}
