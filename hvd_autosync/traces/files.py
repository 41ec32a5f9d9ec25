"""Files that are written as a whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

from hvd_autosync.errors import StoreError

#: Errors where a folder takes no new file, or a file cannot be replaced, as where it is mounted.
_NOT_REPLACED = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EROFS)


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
    place, and so is a file that can be written but not replaced.

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
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        real = Path(os.path.realpath(path))
        try:
            _put(real, data)
        except OSError as error:
            writable = overwrite and real.is_file() and os.access(real, os.W_OK)
            if error.errno not in _NOT_REPLACED or not writable:
                raise
            real.write_bytes(data)
    except OSError as error:
        raise StoreError(
            f"cannot write {path}: {error.strerror}",
            hint="Name a file in a folder that you may write to.",
        ) from error


def _put(path: Path, data: bytes) -> None:
    """Write a file beside its place, and put it there."""
    temporary = None
    try:
        # Not by the name of the file, which may have as many bytes as a name can.
        descriptor, temporary = tempfile.mkstemp(prefix=".hvd-autosync.", dir=path.parent)
        with open(descriptor, "wb") as stream:
            if path.exists():
                os.fchmod(descriptor, stat.S_IMODE(path.stat().st_mode))
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).replace(path)
    finally:  # also by Ctrl-C
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
