"""TOML files that users write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from hvd_autosync.errors import ConfigurationError


def read_toml(path: str, what: str) -> dict[str, Any]:
    """Read the TOML document in ``path``.

    Args:
        path: The file's path.
        what: Description of the file for errors, such as "the space file".

    Raises:
        ConfigurationError: The file cannot be read or is not TOML.
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
            f"{what} {path!r} is not TOML: {error}", hint="Correct this line."
        ) from None
    return document
