"""A job as the user gave it: the ``horovodrun`` line without hvd_autosync's options."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.horovodrun_options import ELASTIC, HOSTFILE, is_option, without_option
from hvd_autosync.launch.masking import redact, redact_launcher
from hvd_autosync.launch.user_script import module_file
from hvd_autosync.search_space import Host, Value
from hvd_autosync.search_space.records import NOT_STORED, Record
from hvd_autosync.util.amounts import amount

#: Endings of the words of a command that name scripts.
_SCRIPTS = (".py", ".sh")
#: Fewer than a billion.
_SLOTS = re.compile("0*[1-9][0-9]{0,8}")
#: Of a host, as Horovod takes it (``horovod/runner/common/util/hosts.py``),
#: in labels that a resolver takes.
_NAME = re.compile(r"[\w-]{1,63}(\.[\w-]{1,63})*\.?")
_LOCAL_NAMES = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Job(Record):
    """One Horovod job.

    Attributes:
        options: Options of ``horovodrun`` in the user's order, without hvd_autosync's.
        command: The user's command and its arguments.
        hosts: Hosts in rank order with the slots that the job uses.
        controller: ``"gloo"`` or ``"mpi"`` if the user chose; ``None`` if Horovod chooses.
        held: Knobs fixed by the user's options, environment or configuration file, with their
            values.
        ssh: Port and identity file for ssh to the hosts; ``None`` if not given. Only the launch
            needs them.
        digests: Digest of the script that each word of the command names, "" for other words; then,
            with ``python -m``, that of the user's module. They are taken when the job is made, so
            that its key stays when a script is edited that its ranks have already loaded.
    """

    options: tuple[str, ...]
    command: tuple[str, ...]
    hosts: tuple[Host, ...]
    controller: str | None = None
    held: tuple[tuple[str, Value], ...] = ()
    ssh: tuple[int | None, str | None] = field(default=(None, None), metadata=NOT_STORED)
    digests: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Take the digests of the scripts, unless they are given."""
        super().__post_init__()
        if not self.digests:
            object.__setattr__(self, "digests", _digests(self.command))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(host.slots for host in self.hosts)

    @property
    def elastic(self) -> bool:
        """Whether Horovod may change its hosts and ranks while it runs."""
        return any(is_option(word, *ELASTIC) for word in self.options)

    @property
    def chosen(self) -> dict[str, Value]:
        """All knobs that the user has set, including the controller, with their values."""
        controller: dict[str, Value] = {"controller": self.controller} if self.controller else {}
        return dict(self.held) | controller

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits: equal for the same command, script text, hosts and settings.

        The text of the script matters, as it was when the job was made; the order of options does
        not, nor do the links through which the script, its Python or the working directory were
        named. What the script imports or reads does not matter. Masked words enter as keyed
        digests, so that values cannot be guessed from the key.
        """
        identity = [
            list(redact(_without_links(self.command))),
            list(self.digests),
            [(host.name, host.slots) for host in self.hosts],
            sorted(redact_launcher(self.options)),
            self.controller,
            dict(self.held),
            str(Path.cwd()),
            self.machine,
        ]
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def machine(self) -> list[str | int]:
        """Name and processors of the machine that ``localhost`` means.

        Empty if no host is local.
        """
        local = any(host.name in _LOCAL_NAMES for host in self.hosts)
        return [platform.node(), os.cpu_count() or 0] if local else []

    def on(self, hosts: tuple[Host, ...]) -> Job:
        """Return the job on a part of its hosts and slots."""
        if hosts == self.hosts:
            return self
        layout = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        count = sum(host.slots for host in hosts)
        # The last of several equal options counts; Horovod refuses -H beside --hostfile.
        options = (*without_option(self.options, HOSTFILE), "-np", str(count), "-H", layout)
        return replace(self, options=options, hosts=hosts)

    def display(self) -> tuple[str, ...]:
        """Return the ``horovodrun`` line, masked (:mod:`hvd_autosync.launch.masking`)."""
        return ("horovodrun", *redact_launcher(self.options), *redact(self.command))


def _without_links(command: Sequence[str]) -> list[str]:
    """Return ``command`` with links resolved in its program and scripts, by relative paths.

    Other words stay as they are: the job stays the same if a link to the latest checkpoint moves.
    """
    words = list(command)
    for place, word in enumerate(words):
        if word.endswith(_SCRIPTS):
            words[place] = _from_here(os.path.realpath(word))
        elif place == 0 and os.sep in word:
            # The name stays: the Python of a virtual environment is itself a link.
            folder, name = os.path.split(word)
            words[place] = _from_here(os.path.join(os.path.realpath(folder), name))
    return words


def _from_here(path: str) -> str:
    inside = os.path.relpath(path)
    return path if inside.startswith(os.pardir) else inside


def _digests(command: Sequence[str]) -> tuple[str, ...]:
    """Return :attr:`Job.digests`."""
    of_words = (_digest(word) if word.endswith(_SCRIPTS) else "" for word in command)
    module = module_file(command)
    # Without a module nothing is added: the key is that of earlier versions.
    return (*of_words, *([] if module is None else [_digest(module)]))


def _digest(script: str | Path) -> str:
    """Return the digest of a script; "" if it cannot be read."""
    try:
        return hashlib.sha256(Path(script).read_bytes()).hexdigest()
    except (OSError, ValueError):  # no file, not a valid path, or not readable
        return ""


def is_host_name(name: str) -> bool:
    """Return whether a text has the form of a host's name or address."""
    return _NAME.fullmatch(name) is not None


def assign_hosts(hosts: str, num_proc: int, *, exact: bool = False) -> tuple[Host, ...]:
    """Return the hosts and slots that ``horovodrun`` uses for ``num_proc`` ranks.

    Args:
        hosts: Argument of ``-H``: ``name:slots,...``.
        num_proc: Number of ranks.
        exact: Whether empty slots are an error: under Gloo Horovod starts a rank on each slot,
            regardless of ``-np`` (``launch_gloo`` of ``gloo_run.py``).

    Raises:
        ConfigurationError: The list is malformed, or has too few or too many slots.
    """
    slots: list[Host] = []
    left, empty = num_proc, 0
    for entry in hosts.split(","):
        name, _, count = entry.strip().rpartition(":")
        if not is_host_name(name) or not _SLOTS.fullmatch(count):
            raise ConfigurationError(
                f"host {entry.strip()!r} in {hosts!r} is not of the form name:slots",
                hint="Write, for example, -H node1:4,node2:4.",
            )
        used = min(left, int(count))
        left -= used
        empty += int(count) - used
        if slots and slots[-1].name == name:  # as in a file with one line per slot
            slots[-1] = Host(name, slots[-1].slots + used)
        elif any(host.name == name for host in slots):
            raise ConfigurationError(
                f"host {name} appears twice in {hosts!r}, with other hosts in between",
                hint=f"Name it once, with all its slots: {name}:N.",
            )
        elif used:
            slots.append(Host(name, used))
    if left:
        known = amount(num_proc - left, "slot")
        raise ConfigurationError(
            f"-np {num_proc} asks for more ranks than the {known} of {hosts!r}",
            hint="Lower -np or add slots with -H or --hostfile.",
        )
    if empty and exact:
        wanted = ",".join(f"{host.name}:{host.slots}" for host in slots)
        raise ConfigurationError(
            f"-np {num_proc} leaves {amount(empty, 'slot')} of {hosts!r} empty, but under Gloo "
            "Horovod starts a rank on each slot",
            hint=f"Write -H {wanted}, or choose --mpi.",
        )
    return tuple(slots)


def job_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environment`` as the job gets it, without the size of this terminal."""
    return {k: v for k, v in environment.items() if k not in {"COLUMNS", "LINES"}}
