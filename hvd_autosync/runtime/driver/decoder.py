"""Reads the messages of workers out of a job's output (:mod:`hvd_autosync.runtime.driver.wire`).

A line that was damaged on the way is dropped, and with it its message; so is a message that is not
a record of its type.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import logging
import re
import zlib

from hvd_autosync.runtime.driver.messages import read_message
from hvd_autosync.runtime.driver.wire import MARK, mac
from hvd_autosync.search_space.records import Record

_log = logging.getLogger(__name__)
_LINE = re.compile(
    MARK + rb" ((\d{1,9}) (\d{1,9}) (\d{1,6})/(\d{1,6})) ([0-9a-f]{32}) ([A-Za-z0-9+/=]*)\s*$"
)
#: The longest message is a model's profile, about 150 bytes for each parameter, which compresses
#: well.
_MAX_PARTS, _MAX_BYTES = 4000, 8 << 20


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

    def feed(self, line: bytes) -> tuple[bool, tuple[int, Record] | None]:
        """Take one line of output.

        Returns:
            Whether the line is marked as ours, and ``(rank, message)`` when it completed a message.
        """
        if MARK not in line:
            return False, None
        match = _LINE.search(line)
        if match is None:
            return True, None
        rank, number, index, count = (int(match[i]) for i in range(2, 6))
        text = match[7]
        if not hmac.compare_digest(match[6], mac(self._key, match[1], text)):
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


def _decode(rank: int, text: bytes) -> tuple[int, Record] | None:
    try:
        return rank, read_message(_unpack(base64.b64decode(text)))
    except (binascii.Error, zlib.error, ValueError) as error:
        _log.info("a message of rank %d is dropped: %s", rank, error)
        return None


def _unpack(packed: bytes) -> bytes:
    """Decompress; a ``ValueError`` if the text is too long or incomplete."""
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(packed, _MAX_BYTES)
    if not unpacking.eof:
        raise ValueError("the message is too large, or has no end")
    return text
