"""TOML files that users write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hvd_autosync.errors import ConfigurationError


def read_toml(path: str, what: str) -> dict[str, Any]:
    """The document in ``path``.

    Args:
        path: The file.
        what: What it is, for the error: "the space file".

    Raises:
        ConfigurationError: It cannot be read, or is not TOML.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document: dict[str, Any] = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{what} {path!r} cannot be read: {error}", hint="Check its path."
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(
            f"{what} {path!r} is not TOML: {error}", hint="Correct that line."
        ) from None
    return document
