"""Messages from workers to the driver, as records.

Workers write them as JSON objects with a ``"type"`` (:mod:`hvd_autosync.runtime.driver.wire`); only
the driver reads them (:mod:`hvd_autosync.runtime.driver.decoder`), by msgspec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hvd_autosync.search_space import Link, ModelProfile
from hvd_autosync.search_space.records import LEFT_OUT, OrNan, Real, Record

#: Longest text in a message, such as a host's name.
_MAX_TEXT = 4096
#: A trace can hold no larger number.
_MAX_NUMBER = 2**63


@dataclass(frozen=True)
class Message(Record):
    """Any message; no text and no number is larger than a trace can hold."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for each in fields(self):
            value = getattr(self, each.name)
            for one in value if isinstance(value, tuple) else (value,):
                if isinstance(one, str) and len(one) > _MAX_TEXT:
                    raise ValueError(f"{each.name}: {len(one)} characters are too many")
                if isinstance(one, (int, float)) and abs(one) >= _MAX_NUMBER:
                    raise ValueError(f"{each.name}: {one!r:.60} is too large")


@dataclass(frozen=True)
class Hello(Message):
    """A rank counts steps now.

    Attributes:
        host: Host name.
        device: ``"cpu"`` or the accelerator's name.
        cores: Numbers of the cores that the rank may use; empty: unknown.
        script_s: Seconds from the worker's start to the script's; ``None``: unknown.
    """

    host: str
    device: str
    cores: tuple[int, ...] = field(default=(), metadata=LEFT_OUT)
    script_s: Real | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True)
class Steps(Message):
    """New steps, or none as a sign of life.

    Attributes:
        first: Number of the first of them.
        step_s: Seconds of each.
        blocked_s: Seconds of each in which the rank waited for communication.
        losses: New losses; NaN: a step without one.
        in_round: Positions of those that replicas had in a round of local steps, each its own.
        several_losses: Whether the script has several losses, and reports none.
        untypical: Numbers of those steps that are not like the others.
        unlike: Events so far in the step that goes on, which make it unlike the others.
    """

    first: int
    step_s: tuple[Real, ...]
    blocked_s: tuple[Real, ...]
    losses: tuple[OrNan, ...]
    in_round: tuple[int, ...] = field(default=(), metadata=LEFT_OUT)
    several_losses: bool = field(default=False, metadata=LEFT_OUT)
    untypical: tuple[int, ...] = field(default=(), metadata=LEFT_OUT)
    unlike: int = field(default=0, metadata=LEFT_OUT)


@dataclass(frozen=True)
class Profile(Message):
    """Rank 0's model.

    Attributes:
        profile: Its profile.
        owned: Knobs that the script itself sets.
    """

    profile: ModelProfile
    owned: tuple[str, ...]


@dataclass(frozen=True)
class Refused(Message):
    """A rank ends because its files cannot be private.

    Attributes:
        trial: The trial.
        reason: The reason, for people.
    """

    trial: str
    reason: str


@dataclass(frozen=True)
class Files(Message):
    """What a trial wrote on a host.

    Attributes:
        trial: The trial.
        host: Host name.
        files: Number of written files.
        bytes: Their bytes.
        limit_bytes: How many they could be.
        full: 1 if they were as many, else 0.
        copied: The largest file that was there before; empty if none was.
        copied_bytes: Its size.
    """

    trial: str
    host: str
    files: int
    bytes: int
    limit_bytes: int
    full: int
    copied: str
    copied_bytes: int


@dataclass(frozen=True)
class End(Message):
    """The rank ends the run.

    Attributes:
        cause: ``"steps"``, ``"pruned"``, ``"script"`` or ``"probe"``.
        peak_memory_bytes: Most memory that the rank has had.
    """

    cause: str
    peak_memory_bytes: int


@dataclass(frozen=True)
class Server(Message):
    """A fork server listens for orders (:mod:`hvd_autosync.launch.fork_server`).

    Attributes:
        address: Its address.
        port: Its port.
        secret: Its secret, in hexadecimal digits.
        rendezvous: Address of the job's rendezvous.
    """

    address: str
    port: int
    secret: str
    rendezvous: str


@dataclass(frozen=True)
class Exit(Message):
    """A fork server's rank of a trial has ended.

    Attributes:
        trial: The trial.
        status: Its exit status, negative for signals.
    """

    trial: str
    status: int


#: Type of a message -> its record; what a probe measured is a :class:`Link` itself.
RECORDS: Mapping[str, type[Record]] = {
    "hello": Hello,
    "steps": Steps,
    "profile": Profile,
    "link": Link,
    "refused": Refused,
    "files": Files,
    "end": End,
    "server": Server,
    "exit": Exit,
}


def read_message(text: bytes) -> Record:
    """Return the record of a message.

    Args:
        text: JSON. Fields that the record has not are left out, as those of a newer worker.

    Raises:
        ValueError: It is no such message; the error says which field is wrong, and why.
    """
    import msgspec

    try:
        plain: Any = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"no JSON: {error}") from None
    kind = plain.get("type") if isinstance(plain, dict) else None
    record = RECORDS.get(kind) if isinstance(kind, str) else None
    if record is None:
        raise ValueError(f"type: {kind!r:.60} is wrong: expected one of {', '.join(RECORDS)}")
    return record.from_json(record.known(plain))
