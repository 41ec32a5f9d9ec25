"""Text in an environment variable: short, and such that any launcher passes it on unchanged.

Linux allows 128 KiB for one variable, and for the line that Gloo's launcher makes of all of them.
"""

from __future__ import annotations

import base64
import zlib


def pack(text: str) -> str:
    """Return ``text`` compressed and in base64."""
    return base64.b64encode(zlib.compress(text.encode())).decode()


def unpack(packed: str) -> str:
    """Return the text of which :func:`pack` has made ``packed``."""
    return zlib.decompress(base64.b64decode(packed)).decode()
