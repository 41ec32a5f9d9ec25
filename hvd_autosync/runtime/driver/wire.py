"""Messages from workers to the driver: marked lines in the job's own standard error.

A rank's output reaches ``horovodrun`` from every host by whatever runs the job (pipes, ssh,
mpirun), so trials need no listening port and no shared folder. A message is a JSON object, split
into lines short enough for any launcher to pass on whole::

    \\n@hvd-autosync@ <rank> <message number> <part>/<parts> <mac> <text>\\n

The MAC is the first half of an HMAC-SHA256 over the rest of the line, with a key that only the
trial's processes have. So output of a script, of its data or an earlier trial's output, is no
message, nor is one that comes twice. Launchers may put a prefix such as ``[1]<stderr>:`` before a
line; the marker is searched for anywhere in it. A line that was damaged on the way is dropped, and
with it its message; so are messages without the fields of their type.

Messages of a trial, by ``"type"``:

- ``hello``: a rank counts steps now: ``host, device``, and, if known, ``cores``: how many it has to
  itself, and ``script_s``: seconds from the worker's start to the script's.
- ``steps``: new steps, or none as a sign of life: ``first, step_s, blocked_s, losses``.
- ``profile``: rank 0's model: ``profile, owned``.
- ``link``: what a probe measured: ``ranks, latency_s, bandwidth_bytes_per_s``.
- ``refused``: a rank ends because its files cannot be private: ``trial, reason``.
- ``files``: what a trial wrote on a host: ``trial, host, files, bytes, limit_bytes``, ``full`` (0
  or 1), ``copied, copied_bytes`` (the largest file that was there before, and its size).
- ``end``: the rank ends the run: ``cause`` (``steps``, ``pruned``, ``script`` or ``probe``),
  ``peak_memory_bytes``.

Messages of fork servers, with a key of their own: ``server``, ``exit``, see
:mod:`hvd_autosync.launch.fork_server`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import math
import os
import re
import select
import zlib
from typing import Any

Message = dict[str, Any]

_PART_CHARACTERS = 700
_LINE = re.compile(
    rb"@hvd-autosync@ ((\d{1,9}) (\d{1,9}) (\d{1,6})/(\d{1,6})) ([0-9a-f]{32}) "
    rb"([A-Za-z0-9+/=]*)\s*$"
)
_MARK = b"@hvd-autosync@"
#: The longest message is a model's profile, about 150 bytes for each parameter, which compresses
#: well.
_MAX_PARTS, _MAX_BYTES = 4000, 8 << 20
#: Longest text in a message, such as a host's name.
_MAX_TEXT = 4096
#: The required fields of each type; numbers may be integers where they need not be.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "hello": {"host": str, "device": str},
    "steps": {"first": int, "step_s": list, "blocked_s": list, "losses": list},
    "profile": {"profile": dict, "owned": list},
    "link": {"ranks": int, "latency_s": (int, float), "bandwidth_bytes_per_s": (int, float)},
    "end": {"cause": str, "peak_memory_bytes": int},
    "refused": {"trial": str, "reason": str},
    "files": {
        "trial": str,
        "host": str,
        "files": int,
        "bytes": int,
        "limit_bytes": int,
        "full": int,
        "copied": str,
        "copied_bytes": int,
    },
    "server": {"address": str, "port": int, "secret": str, "rendezvous": str},
    "exit": {"trial": str, "status": int},
}


def encode_message(key: str, rank: int, number: int, message: Message) -> bytes:
    """The lines of ``message``.

    Args:
        key: The key of the trial, or of the fork servers.
        rank: The sender.
        number: Larger than that of the previous message of the same rank under the same key.
        message: The message.
    """
    text = base64.b64encode(zlib.compress(json.dumps(message).encode()))
    parts = [text[i : i + _PART_CHARACTERS] for i in range(0, len(text), _PART_CHARACTERS)]
    lines = []
    for index, part in enumerate(parts):
        place = f"{rank} {number} {index}/{len(parts)}".encode()
        lines.append(b"\n%s %s %s %s\n" % (_MARK, place, _mac(key, place, part), part))
    return b"".join(lines)


def write_message(fd: int, key: str, rank: int, number: int, message: Message) -> None:
    """Write the lines of ``message`` to ``fd``; the arguments are those of :func:`encode_message`.

    Each line is one write of less than PIPE_BUF bytes, so that output of the script cannot get into
    it.

    Raises:
        OSError: Nothing reads the descriptor any more.
    """
    for line in filter(None, encode_message(key, rank, number, message).split(b"\n")):
        _write(fd, b"\n" + line + b"\n")


def _write(fd: int, line: bytes) -> None:
    while line:
        try:
            line = line[os.write(fd, line) :]
        except BlockingIOError:
            # The file description, which is shared with the script, was made non-blocking.
            select.select([], [fd], [])


def _mac(key: str, place: bytes, part: bytes) -> bytes:
    return hmac.digest(key.encode(), place + b" " + part, hashlib.sha256).hex()[:32].encode()


class MessageDecoder:
    """Reassembles messages from lines of output, and recognizes lines of the script.

    A rank sends one message after the other, so at most one of each rank is incomplete.

    Args:
        key: The key of the trial, or of the fork servers.
        ranks: The number of ranks; lines of other ranks are dropped.
    """

    def __init__(self, key: str, ranks: int) -> None:
        self._key = key
        self._ranks = ranks
        #: Rank -> number and parts of its incomplete message.
        self._unfinished: dict[int, tuple[int, dict[int, bytes]]] = {}
        #: Rank -> number of its last message.
        self._last: dict[int, int] = {}

    def feed(self, line: bytes) -> tuple[bool, tuple[int, Message] | None]:
        """Take one line of output.

        Returns:
            Whether the line is marked as ours, and ``(rank, message)`` when it completed a message.
        """
        if _MARK not in line:
            return False, None
        match = _LINE.search(line)
        if match is None:
            return True, None
        rank, number, index, count = (int(match[i]) for i in range(2, 6))
        text = match[7]
        if not hmac.compare_digest(match[6], _mac(self._key, match[1], text)):
            return True, None
        if rank >= self._ranks or not index < count <= _MAX_PARTS:
            return True, None
        if number <= self._last.get(rank, -1):
            return True, None
        current, parts = self._unfinished.get(rank, (-1, {}))
        if number != current:
            parts = {}
            self._unfinished[rank] = number, parts
        parts[index] = text
        if len(parts) < count:
            return True, None
        del self._unfinished[rank]
        self._last[rank] = number
        return True, _decode(rank, b"".join(parts[i] for i in sorted(parts)))


def _decode(rank: int, text: bytes) -> tuple[int, Message] | None:
    try:
        message = json.loads(
            _unpack(base64.b64decode(text)), parse_float=_finite, parse_constant=_finite
        )
    except (binascii.Error, zlib.error, ValueError, RecursionError):
        return None
    return (rank, message) if _is_message(message) else None


def _unpack(packed: bytes) -> bytes:
    """Decompress; a ``ValueError`` if the text is too long or incomplete."""
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(packed, _MAX_BYTES)
    if not unpacking.eof:
        raise ValueError("the message is too large, or has no end")
    return text


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
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT
    return isinstance(value, (dict, list)) or _is_number(value)


def _is_number(value: Any) -> bool:
    """Whether ``value`` is a number that a trace can hold."""
    return type(value) in (int, float) and abs(value) < 2**63


def _finite(text: str) -> float:
    """The number; a ``ValueError`` for NaN and infinity, which JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value
