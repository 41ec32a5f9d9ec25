"""The folder in which the ranks of a training leave notes for their driver.

Its driver removes it. One that was killed cannot, so the next start of a driver does. Each driver
holds a lock on its folder, which ends with it however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from hvd_autosync.launch.file_journal import this_host

_PREFIX, _LOCK = "hvd-autosync-notes-", "driver"
#: A folder that has changed since may be one that is not locked yet, or whose ranks are ending.
_UNUSED_S = 60.0


class NotesFolder(tempfile.TemporaryDirectory[str]):
    """A new folder; those of drivers that were killed are removed before.

    Raises:
        OSError: There is no place for temporary files.
    """

    def __init__(self) -> None:
        _remove_left(Path(tempfile.gettempdir()))
        # A training that has ended well does not fail because a note is still being written.
        super().__init__(prefix=_PREFIX, ignore_cleanup_errors=True)
        self._unlock: Callable[[], object] = lambda: None
        lock = Path(self.name, _LOCK)
        with contextlib.suppress(OSError):  # a full disk: then nobody else removes it
            lock.write_text(this_host())
            if (descriptor := _locked(lock)) is None:
                lock.unlink()
            else:
                self._unlock = weakref.finalize(self, os.close, descriptor)

    def cleanup(self) -> None:
        """Remove the folder."""
        self._unlock()  # first: network file systems keep files that are open
        super().cleanup()


def _remove_left(place: Path) -> None:
    """Remove the folders of drivers of this user and host that have ended, as far as possible."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):  # another start has just removed it
            state = folder.lstat()
            if state.st_uid != os.getuid() or time.time() - state.st_mtime < _UNUSED_S:
                continue
            # On another host it may be locked, which this one need not see.
            if (folder / _LOCK).read_text() != this_host():
                continue
            if (descriptor := _locked(folder / _LOCK)) is not None:
                os.close(descriptor)
                shutil.rmtree(folder, ignore_errors=True)


def _locked(file: Path) -> int | None:
    """Lock a file; return the descriptor that holds the lock, ``None`` if another has it.

    Raises:
        OSError: The file cannot be opened.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # or there are no locks here
        os.close(descriptor)
        return None
    return descriptor
