"""The state of all files in some folders, such that any change of a file changes its state.

A program can set a modification time, but not the time of the last status change (``ctime``), which
changes with content, mode and place. Python's audit events would miss files that C++ or Rust code
opens, as ``torch.save`` and safetensors do.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Folders of tools and caches: large, and reproducible.
SKIPPED = frozenset({"__pycache__", ".git", ".venv", "venv", "node_modules", ".cache"})
_WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class FileState:
    """One file, folder or link.

    Attributes:
        mode: Type and permissions.
        place: File system and inode.
        owner: User id of its owner.
        size: Bytes; 0 for a folder.
        changed_ns: Times of the last changes of content and status; 0 for a folder, whose entries
            are compared instead.
    """

    mode: int
    place: tuple[int, int]
    owner: int
    size: int
    changed_ns: tuple[int, int]

    @classmethod
    def of(cls, about: os.stat_result) -> FileState:
        """Make the state from the result of ``lstat``."""
        folder = stat.S_ISDIR(about.st_mode)
        return cls(
            about.st_mode,
            (about.st_dev, about.st_ino),
            about.st_uid,
            0 if folder else about.st_size,
            (0, 0) if folder else (about.st_mtime_ns, about.st_ctime_ns),
        )

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return stat.S_ISREG(self.mode)


def file_states(
    roots: Iterable[str], skipped: Collection[str], most: int | None = None
) -> tuple[dict[str, FileState], list[str]]:
    """Return the state of every entry below ``roots``, folders before their entries.

    Args:
        roots: Absolute paths, the most important ones first; missing ones are left out.
        skipped: Absolute paths that are left out.
        most: Largest number of entries; ``None``: any.

    Returns:
        The states by path, and the paths that were left out because ``most`` was exceeded, in
        order.
    """
    found: dict[str, FileState] = {}
    waiting = [root for root in reversed(dict.fromkeys(roots)) if root not in skipped]
    while waiting:
        path = waiting.pop()
        try:
            about = os.lstat(path)
            found[path] = FileState.of(about)
            if not stat.S_ISDIR(about.st_mode):
                continue
            entries = sorted(os.scandir(path), key=lambda entry: entry.name, reverse=True)
        except OSError:  # deleted meanwhile, or not readable
            continue
        if most is not None and len(found) + len(entries) > most:
            del found[path]
            return found, [path, *reversed(waiting)]
        waiting += [
            entry.path
            for entry in entries
            if entry.name not in SKIPPED and entry.path not in skipped
        ]
    return found, []


def open_for_writing(
    below: Sequence[str] = ("/",), but_of: Callable[[int], bool] = lambda pid: False
) -> set[tuple[int, int]]:
    """Return file system and inode of the files that processes have open for writing.

    Processes of other users, and on other hosts, cannot be seen.

    Args:
        below: The folders, as real paths, in which files are looked at.
        but_of: Whether the process of this id is left out.
    """
    prefixes = tuple(f"{folder.rstrip('/')}/" for folder in below)
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        places = set()
        with contextlib.suppress(OSError):  # ended, or another user's process
            for descriptor in os.listdir(process / "fd"):
                with contextlib.suppress(OSError, IndexError):
                    file = f"{process}/fd/{descriptor}"
                    path = os.readlink(file)
                    if path not in below and not path.startswith(prefixes):
                        continue
                    text = (process / "fdinfo" / descriptor).read_text()
                    if int(text.partition("flags:")[2].split()[0], 8) & _WRITING:
                        about = os.stat(file)
                        places.add((about.st_dev, about.st_ino))
        if places and not but_of(int(process.name)):
            found |= places
    return found


def descends_from(pid: int, ancestor: int) -> bool:
    """Return whether a process is another one, or was started by it or by its children."""
    while pid not in (ancestor, 0, 1):
        try:
            # The name in parentheses may contain anything; see proc(5), field 4.
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except (OSError, IndexError):  # it has ended
            return False
    return pid == ancestor
