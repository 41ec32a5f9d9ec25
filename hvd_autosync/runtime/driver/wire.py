"""Messages from workers to the driver: marked lines in the job's own standard error.

A rank's output reaches ``horovodrun`` from every host by whatever runs the job (pipes, ssh,
mpirun), so trials need no listening port and no shared folder. A message is a JSON object, split
into lines short enough for any launcher to pass on whole::

    \\n@hvd-autosync@ <rank> <message number> <part>/<parts> <mac> <text>\\n

The MAC is the first half of an HMAC-SHA256 over the rest of the line, with a key that only the
trial's processes have. So output of a script, of its data or an earlier trial's output, is no
message, nor is one that comes twice. Launchers may put a prefix such as ``[1]<stderr>:`` before a
line; the marker is searched for anywhere in it.

The fields of each type are those of its record in :mod:`hvd_autosync.runtime.driver.messages`.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import select
import zlib
from typing import Any

Message = dict[str, Any]

_PART_CHARACTERS = 700
MARK = b"@hvd-autosync@"


def encode_message(key: str, rank: int, number: int, message: Message) -> bytes:
    """Return the lines of ``message``.

    Args:
        key: The key of the trial, or of the fork servers.
        rank: The sender.
        number: Larger than that of the previous message of the same rank under the same key.
        message: The message.
    """
    # Half characters, as Python has for bytes of paths that are not UTF-8, are not JSON.
    plain = json.dumps(message, ensure_ascii=False).encode(errors="replace")
    text = base64.b64encode(zlib.compress(plain))
    parts = [text[i : i + _PART_CHARACTERS] for i in range(0, len(text), _PART_CHARACTERS)]
    lines = []
    for index, part in enumerate(parts):
        place = f"{rank} {number} {index}/{len(parts)}".encode()
        lines.append(b"\n%s %s %s %s\n" % (MARK, place, mac(key, place, part), part))
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


def mac(key: str, place: bytes, part: bytes) -> bytes:
    """Return the code that authenticates a line.

    Args:
        key: The key of the trial, or of the fork servers.
        place: Rank, message number and place of the part.
        part: The part.
    """
    return hmac.digest(key.encode(), place + b" " + part, hashlib.sha256).hex()[:32].encode()
