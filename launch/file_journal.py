"""What a driver that is killed in a trial leaves to the next one: the user's files from before it.

A journal is a folder in the user's data folder. While a trial runs whose files are not private, it
holds copies of the watched files and a record of their states. Its driver holds a lock on it, which
ends with the driver however that ends. Where the lock is free but there is a record, the driver was
lost in the trial, and the next start of the flag on this host reverts the trial's changes.

The journal also notes which files other processes have had open for writing during the trial: once
a second, so a file that is written in less time may be missed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from hvd_autosync.errors import StoreError
from hvd_autosync.launch.file_states import FileState, descends_from, open_for_writing
from hvd_autosync.runtime.driver.environment import TRIAL_ID_VARIABLE

#: A file that changes so long after the last sign of life of a driver was not changed by its trial,
#: whose processes end within seconds.
AFTERWARDS_S = 30.0
_INTERVAL_S = 1.0
_FOLDER, _LOCK, _HOST, _RECORD, _OTHERS = "journals", "lock", "host", "trial.json", "others"
_CLAIM = "claim"
_NOW = "now"
#: Of the name of a journal whose lock nobody holds yet.
_NEW = "new-"

#: A copied file's state, and its copy: a file of the journal, the target of a link, or "".
Copies = Mapping[str, tuple[FileState, Path | str]]
Place = tuple[int, int]


class JournalDamagedError(Exception):
    """The record of a journal cannot be read."""


@dataclass(frozen=True)
class FilesRecord:
    """The files before a trial.

    Attributes:
        host: Host of the driver.
        roots: The watched folders and files; the first one is the working directory.
        skipped: Paths that are not watched.
        keep: Folder for files left by trials; "": a new temporary one.
        states: State of each watched file.
        copied: What has been copied.
    """

    host: str
    roots: Sequence[str]
    skipped: Collection[str]
    keep: str
    states: Mapping[str, FileState]
    copied: Copies

    def to_text(self) -> str:
        """Return the record as JSON, with surrogates for bytes of paths that are not UTF-8."""
        copied = {}
        for path, (state, copy) in self.copied.items():
            kind = "file" if isinstance(copy, Path) else "link"
            copied[path] = [astuple(state), kind, copy.name if isinstance(copy, Path) else copy]
        return json.dumps(
            {
                "host": self.host,
                "roots": [*self.roots],
                "skipped": sorted(self.skipped),
                "keep": self.keep,
                "states": {path: astuple(state) for path, state in self.states.items()},
                "copied": copied,
            }
        )

    @classmethod
    def of_text(cls, text: str, folder: Path) -> FilesRecord:
        """Read what :meth:`to_text` wrote.

        Args:
            text: The JSON.
            folder: The folder of the copies.

        Raises:
            JournalDamagedError: The text is something else.
        """
        try:
            read: dict[str, Any] = json.loads(text)
            copied: dict[str, tuple[FileState, Path | str]] = {}
            for path, (state, kind, copy) in read["copied"].items():
                copied[path] = (_state(state), folder / copy if kind == "file" else copy)
            states = {path: _state(state) for path, state in read["states"].items()}
            return cls(read["host"], read["roots"], read["skipped"], read["keep"], states, copied)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise JournalDamagedError(f"{type(error).__name__}: {error}") from error


def _state(values: Sequence[Any]) -> FileState:
    mode, place, owner, size, changed_ns = values
    return FileState(mode, (place[0], place[1]), owner, size, (changed_ns[0], changed_ns[1]))


class FileJournal:
    """The journal of one driver, or of one that was lost.

    Args:
        folder: The folder of an earlier driver; ``None``: a new one.

    Raises:
        BlockingIOError: The driver of this folder lives.
        OSError: The folder cannot be used.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._sampler: _Sampler | None = None
        if folder is not None:
            self.folder = folder
            self._lock = _locked(folder)
            return
        try:
            journals = journals_folder()
            journals.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix=_NEW, dir=journals))
            (self.folder / _HOST).write_text(this_host())
        except (OSError, StoreError):
            # Without a data folder there is no journal that a next start could find.
            self.folder = Path(tempfile.mkdtemp(prefix="hvd-autosync-copies-"))
        self._lock = -1
        with contextlib.suppress(OSError):  # a file system without locks
            self._lock = _locked(self.folder)
            locked = self.folder.with_name(self.folder.name.removeprefix(_NEW))
            self.folder = self.folder.rename(locked)

    @property
    def places(self) -> tuple[str, ...]:
        """Folders that are not watched: all journals are in them."""
        parent = self.folder.parent
        return (str(parent if parent.name == _FOLDER else self.folder),)

    def begin(self, record: FilesRecord, trial_id: str) -> None:
        """Write the record of a trial that begins now, and note who else writes.

        Raises:
            OSError: It cannot be written.
        """
        (self.folder / _OTHERS).write_text("")
        if self._lock >= 0:  # else a next start could not tell whether this driver lives
            self.write(record)
        self._sampler = _Sampler(self.folder / _OTHERS, record.roots, trial_id)
        self._sampler.start()

    def claim(self, folder: str) -> str:
        """Claim a working directory for the trials of this driver.

        Of two that claim at once neither may have it. Claims of other hosts, and of containers with
        folders of their own, are of other folders, by the numbers of their file systems.

        Args:
            folder: Its real path.

        Returns:
            This folder, one in it, or one that it is in, if the driver of another journal has
            claimed that, and lives; "": it is claimed now.

        Raises:
            OSError: The claim cannot be written.
        """
        if self._lock < 0 or self.folder.parent.name != _FOLDER:
            return ""  # a file system without locks, or no data folder: others cannot be seen
        own = _places_of(folder)
        text = json.dumps([folder, own])
        (self.folder / _CLAIM).write_text(text)
        for other in self.folder.parent.iterdir():
            with contextlib.suppress(OSError, ValueError):  # its driver has just ended, or begun
                claimed, places = json.loads((other / _CLAIM).read_text())
                apart = places[0] not in own and own[0] not in places
                if other == self.folder or apart:
                    continue
                try:
                    os.close(_locked(other))  # its driver was killed
                except BlockingIOError:
                    return str(claimed)
        return ""

    def write(self, record: FilesRecord) -> None:
        """Write a record in place of the one before.

        Raises:
            OSError: It cannot be written.
        """
        new = self.folder / f"{_RECORD}.new"
        new.write_text(record.to_text())
        new.replace(self.folder / _RECORD)

    def others(self) -> set[Place]:
        """Return the places of files that other processes have written, as far as was seen."""
        if self._sampler is not None:
            self._sampler.look()
            return self._sampler.seen
        try:
            lines = (self.folder / _OTHERS).read_text().splitlines()
            return {(int(device), int(inode)) for device, inode in map(str.split, lines)}
        except (OSError, ValueError):
            return set()

    def end(self, *, keep: bool = False) -> None:
        """Note that the trial has ended.

        Args:
            keep: Whether its record stays for a next start, because it could not be reverted.
        """
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None
        if not keep:
            (self.folder / _RECORD).unlink(missing_ok=True)

    def record(self) -> FilesRecord | None:
        """Return the record of the trial in which its driver was lost; ``None``: in none.

        Raises:
            JournalDamagedError: It cannot be read.
        """
        try:
            text = (self.folder / _RECORD).read_text()
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise JournalDamagedError(str(error)) from error
        return FilesRecord.of_text(text, self.folder)

    def is_of_this_host(self) -> bool:
        """Return whether its driver ran on this host; elsewhere it may live on, locked or not."""
        try:
            return (self.folder / _HOST).read_text() == this_host()
        except OSError:  # of an earlier version
            return True

    def last_alive_s(self) -> float:
        """Return the time of the driver's last sign of life, seconds since 1970."""
        try:
            return (self.folder / _OTHERS).stat().st_mtime
        except OSError:
            return 0.0

    def started_s(self) -> float:
        """Return when its driver has started, seconds since 1970."""
        try:
            return (self.folder / _LOCK).stat().st_mtime  # nothing is ever written to it
        except OSError:
            return 0.0

    def silent_s(self) -> float:
        """Return the seconds since that, by the clock of the file system."""
        touched = self.folder / _NOW
        try:
            touched.touch()
            now_s = touched.stat().st_mtime
        except OSError:  # no space is left, or its driver has just removed it
            now_s = time.time()
        return now_s - self.last_alive_s()

    def close(self, *, keep: bool = False) -> None:
        """Give the journal up, and delete it unless it is to be kept for a next start."""
        self.end(keep=keep)
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            if not keep:  # network file systems keep files that are open, and so their folder
                shutil.rmtree(self.folder, ignore_errors=True)


def journals_folder() -> Path:
    """Return the folder of the journals.

    Raises:
        StoreError: There is no home folder.
    """
    from hvd_autosync.traces.location import data_folder  # with SQLAlchemy, which loads slowly

    return Path(os.path.realpath(data_folder())) / _FOLDER


def left_journals() -> Iterator[FileJournal]:
    """Yield the journals whose drivers have ended; each must be closed."""
    try:
        folders = sorted(journals_folder().iterdir())
    except (OSError, StoreError):
        return
    for folder in folders:
        if folder.name.startswith(_NEW):
            continue
        with contextlib.suppress(OSError):  # its driver lives, or it was just removed
            yield FileJournal(folder)


def this_host() -> str:
    """Return the name of this host, as records have it."""
    return socket.gethostname()


def _places_of(folder: str) -> list[list[int]]:
    """Return device and inode of a folder, and of those that it is in."""
    found = [path.stat() for path in (Path(folder), *Path(folder).parents)]
    return [[each.st_dev, each.st_ino] for each in found]


def _locked(folder: Path) -> int:
    """Lock a journal; return the descriptor that holds the lock.

    Raises:
        OSError: Another process holds it, or there are no locks.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (folder / _LOCK).exists():  # its last holder has just removed it
            raise FileNotFoundError(folder)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class _Sampler:
    """Notes once a second which watched files other processes than the trial's write.

    Args:
        file: Gets a line for each; the time of its last change is the driver's sign of life.
        roots: The watched folders and files.
        trial_id: The trial.

    Attributes:
        seen: The places of these files so far.
    """

    def __init__(self, file: Path, roots: Sequence[str], trial_id: str) -> None:
        self._file, self._roots = file, roots
        self._mark = f"{TRIAL_ID_VARIABLE}={trial_id}".encode()
        self.seen: set[Place] = set()
        self._ended = threading.Event()
        self._looking = threading.Lock()
        self._thread = threading.Thread(
            target=self._run, name="hvd-autosync-file-journal", daemon=True
        )

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._ended.set()
        self._thread.join()

    def look(self) -> None:
        """Look once, now."""
        with self._looking, contextlib.suppress(OSError):  # the disk is full
            new = open_for_writing(self._roots, self._is_the_trials) - self.seen
            self.seen |= new
            with open(self._file, "a") as file:
                file.writelines(f"{device} {inode}\n" for device, inode in sorted(new))
            os.utime(self._file)

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self.look()

    def _is_the_trials(self, pid: int) -> bool:
        """Return whether a process is one of the trial, as far as this can be seen."""
        if pid != os.getpid() and descends_from(pid, os.getpid()):
            return True
        with contextlib.suppress(OSError):
            return self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return False
