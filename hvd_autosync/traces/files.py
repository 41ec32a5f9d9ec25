"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from hvd_autosync.errors import StoreError


def check_regular(path: str | os.PathLike[str]) -> None:
    """Check that a file can be read from its beginning more than once.

    Raises:
        OSError: It does not exist.
        StoreError: It is a pipe, a device or a socket.
    """
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise StoreError(
            f"{os.fspath(path)} is a pipe or another special file, which cannot be read twice",
            hint="Write its content to a file, and name that.",
        )


def write_file(
    path: Path, data: bytes, *, overwrite: bool, if_exists: str = "Name another file."
) -> None:
    """Write a file that only the user can read, beside its place, and put it there.

    What it replaces keeps its permissions. A link is followed. A device or a pipe is written in
    place.

    Args:
        path: The file.
        data: Its content.
        overwrite: Whether an existing file may be replaced.
        if_exists: What the caller can do where it may not.

    Raises:
        StoreError: It exists and may not be replaced, or it cannot be written.
    """
    if os.path.lexists(path) and not overwrite:
        raise StoreError(f"{path} exists already", hint=if_exists)
    temporary = None
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        real = Path(os.path.realpath(path))
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=real.parent)
        with open(descriptor, "wb") as stream:
            if real.exists():
                os.fchmod(descriptor, stat.S_IMODE(real.stat().st_mode))
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(real)
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}",
            hint="Name a file in a folder that you may write to.",
        ) from error
    finally:  # also by Ctrl-C
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
