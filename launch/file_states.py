"""What lies in some folders: each entry with what any change of it changes.

Modification times can be set; a change of content, mode or place sets the time of the last status
change (``ctime``), which cannot. Python's audit events would show neither what C++ nor what Rust
opens, as ``torch.save`` and safetensors do.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

#: Folders of tools and caches: what they hold can be had again, and is much.
_SKIPPED = frozenset({"__pycache__", ".git", ".venv", "venv", "node_modules", ".cache"})
_WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True)
class FileState:
    """One file, folder or link.

    Attributes:
        mode: Its type and permissions.
        place: Its file system and inode.
        size: Bytes; 0 of a folder.
        changed_ns: Times of the last change of its content and of its status; 0 of a folder,
            whose entries tell.
    """

    mode: int
    place: tuple[int, int]
    size: int
    changed_ns: tuple[int, int]

    @classmethod
    def of(cls, about: os.stat_result) -> FileState:
        """From what ``lstat`` gives."""
        folder = stat.S_ISDIR(about.st_mode)
        return cls(
            about.st_mode,
            (about.st_dev, about.st_ino),
            0 if folder else about.st_size,
            (0, 0) if folder else (about.st_mtime_ns, about.st_ctime_ns),
        )

    @property
    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        """Whether it has content."""
        return stat.S_ISREG(self.mode)


def file_states(
    roots: Iterable[str], skipped: Collection[str], most: int
) -> tuple[dict[str, FileState], str]:
    """Every entry below ``roots``, folders before what they hold.

    Args:
        roots: Absolute paths; what is not there is left out.
        skipped: Absolute paths that are left out.
        most: Entries that are looked at.

    Returns:
        The states by path, and the folder in which that many were exceeded, or "".
    """
    found: dict[str, FileState] = {}
    waiting = [root for root in sorted(set(roots), reverse=True) if root not in skipped]
    while waiting:
        path = waiting.pop()
        try:
            about = os.lstat(path)
            found[path] = FileState.of(about)
            if not stat.S_ISDIR(about.st_mode):
                continue
            entries = sorted(os.scandir(path), key=lambda entry: entry.name, reverse=True)
        except OSError:  # gone meanwhile, or not ours to read
            continue
        if len(found) + len(entries) > most:
            return found, path
        waiting += [
            entry.path
            for entry in entries
            if entry.name not in _SKIPPED and entry.path not in skipped
        ]
    return found, ""


def written_by_the_living() -> set[tuple[int, int]]:
    """File system and inode of what processes have open for writing now, this one's too."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            descriptors = list(folder.iterdir())
        except OSError:  # gone, or another user's
            continue
        for descriptor in descriptors:
            try:
                text = (folder.parent / "fdinfo" / descriptor.name).read_text()
                flags = int(text.partition("flags:")[2].split()[0], 8)
                if flags & _WRITING:
                    about = descriptor.stat()
                    found.add((about.st_dev, about.st_ino))
            except (OSError, IndexError):
                continue
    return found
