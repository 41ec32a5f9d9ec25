"""How workers speak to the driver: marked lines in the job's own error output.

A rank's output reaches ``horovodrun`` from every host by whatever carries the job (pipes, ssh,
mpirun), so trials need no listening port, no shared folder and no secret. A message is a JSON
object, cut into lines short enough for any launcher to pass on whole::

    \\n@hvd-autosync@ <rank> <message number> <part>/<parts> <crc32 of the text> <text>\\n

Launchers may put a prefix such as ``[1]<stderr>:`` before a line; the marker is looked for
anywhere in it. A line that was damaged on the way is dropped, and with it its message; so are
messages that lack what their type must have.

Messages by ``"type"``:

- ``hello``: a rank counts steps now: ``host, device``.
- ``steps``: new steps, or none as a sign of life: ``first, step_s, blocked_s, losses``.
- ``profile``: rank 0's model: ``profile, owned``.
- ``link``: what a probe measured: ``ranks, latency_s, bandwidth_bytes_per_s``.
- ``server``, ``exit``: see :mod:`hvd_autosync.launch.fork_server`.
- ``end``: the rank ends the run: ``cause`` (``steps``, ``hopeless``, ``script`` or ``probe``),
  ``peak_memory_bytes``.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import zlib
from typing import Any

Message = dict[str, Any]

_PART_CHARACTERS = 700
_LINE = re.compile(
    rb"@hvd-autosync@ (\d{1,9}) (\d{1,9}) (\d{1,6})/(\d{1,6}) ([0-9a-f]{8}) ([A-Za-z0-9+/=]*)\s*$"
)
_MARK = b"@hvd-autosync@"
_MAX_PARTS = 20_000
#: What every message of a type must have; numbers may be whole where they need not be.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "hello": {"host": str, "device": str},
    "steps": {"first": int, "step_s": list, "blocked_s": list, "losses": list},
    "profile": {"profile": dict, "owned": list},
    "link": {
        "ranks": int, "latency_s": (int, float), "bandwidth_bytes_per_s": (int, float),
    },
    "end": {"cause": str, "peak_memory_bytes": int},
    "server": {"address": str, "port": int, "secret": str, "meeting": str},
    "exit": {"trial": str, "status": int},
}


def encode_message(rank: int, number: int, message: Message) -> bytes:
    """The lines that carry ``message``; ``number`` counts the messages of ``rank``."""
    text = base64.b64encode(zlib.compress(json.dumps(message).encode())).decode()
    parts = [text[i : i + _PART_CHARACTERS] for i in range(0, len(text), _PART_CHARACTERS)]
    lines = [
        f"\n@hvd-autosync@ {rank} {number} {index}/{len(parts)} "
        f"{zlib.crc32(part.encode()):08x} {part}\n"
        for index, part in enumerate(parts)
    ]
    return "".join(lines).encode()


class MessageDecoder:
    """Puts messages together from lines of output; tells lines of the script apart."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], dict[int, bytes]] = {}

    def feed(self, line: bytes) -> tuple[bool, tuple[int, Message] | None]:
        """Take one line of output.

        Returns:
            Whether the line was ours, and ``(rank, message)`` when it completed a message.
        """
        if _MARK not in line:
            return False, None
        match = _LINE.search(line)
        if match is None:
            return True, None
        rank, number, index, count = (int(match[i]) for i in range(1, 5))
        text = match[6]
        if zlib.crc32(text) != int(match[5], 16) or not index < count <= _MAX_PARTS:
            return True, None
        parts = self._parts.setdefault((rank, number), {})
        parts[index] = text
        if len(parts) < count:
            return True, None
        del self._parts[rank, number]
        return True, _decode(rank, b"".join(parts[i] for i in sorted(parts)))


def _decode(rank: int, text: bytes) -> tuple[int, Message] | None:
    try:
        message = json.loads(
            zlib.decompress(base64.b64decode(text)), parse_float=_finite, parse_constant=_finite
        )
    except (binascii.Error, zlib.error, ValueError, RecursionError):
        return None
    return (rank, message) if _is_message(message) else None


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        return False
    fields = _FIELDS.get(message["type"])
    return fields is not None and all(
        isinstance(message.get(name), kind) and _is_possible(name, message[name])
        for name, kind in fields.items()
    )


def _is_possible(name: str, value: Any) -> bool:
    if name in ("step_s", "blocked_s"):
        return all(_is_number(each) and each >= 0 for each in value)
    if name == "losses":
        return all(each is None or _is_number(each) for each in value)
    return isinstance(value, (str, dict, list)) or _is_number(value)


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a number that a trace can hold."""
    return type(value) in (int, float) and abs(value) < 2**63


def _finite(text: str) -> float:
    """The number; a ``ValueError`` for what JSON has not: NaN and infinity."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
