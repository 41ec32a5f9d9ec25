"""The watched files as they were before a trial, and how they become so again."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from hvd_autosync.errors import TrialFilesError
from hvd_autosync.launch.file_journal import (
    AFTERWARDS_S,
    FileJournal,
    FilesRecord,
    Place,
    this_host,
)
from hvd_autosync.launch.file_states import SKIPPED, FileState, file_states

_KERNEL = ("/dev", "/proc", "/run", "/sys")
#: User ids that file systems give to files whose owner they do not tell.
_NOBODY = (65534, (1 << 32) - 2)
_REMEDY = (
    "Restore it, then tune in a copy of the folder with --autosync-tune-only, or on a machine "
    "where trial files can be private: docs/faq.md."
)


class Originals:
    """The state of files before a trial.

    Args:
        journal: The journal with their copies.
        roots: The watched folders and files.
        own: Files that hvd_autosync itself changes; they are not watched.
        keep: Folder to which files left by trials are moved; "": a new temporary folder.
        say: Prints a line for the user.

    Attributes:
        states: State of each file.
        copied: State and copy of each file that was copied.
        unwatched: Paths that are not watched, because there are too many.
        keeps_journal: Whether the copies must be kept, as the files are not restored (yet).
    """

    def __init__(
        self,
        journal: FileJournal,
        roots: Sequence[str],
        own: Collection[str],
        keep: str,
        say: Callable[[str], None],
    ) -> None:
        self._journal, self._roots, self._keep, self._say = journal, roots, keep, say
        self._own = own
        self._aside: Path | None = None
        self.states: dict[str, FileState] = {}
        self.copied: dict[str, tuple[FileState, Path | str]] = {}
        self.unwatched: list[str] = []
        self.keeps_journal = False

    @classmethod
    def of_record(
        cls, journal: FileJournal, record: FilesRecord, say: Callable[[str], None]
    ) -> Originals:
        """Return the originals of a trial in which its driver was lost."""
        found = cls(journal, record.roots, record.skipped, record.keep, say)
        found.states, found.copied = dict(record.states), dict(record.copied)
        found.keeps_journal = True
        return found

    def record(self) -> FilesRecord:
        """Return what a next start needs to restore them."""
        return FilesRecord(
            this_host(), self._roots, self._skipped(), self._keep, self.states, self.copied
        )

    def scan(self, most: int | None = None) -> tuple[dict[str, FileState], list[str]]:
        """Return the states of what is watched: all, or as many entries as ``most``.

        What was left out before the trial is left out after it, too.
        """
        return file_states(self._roots, self._skipped(), most)

    def revert(
        self, now: dict[str, FileState], others: Collection[Place], until_s: float = math.inf
    ) -> None:
        """Restore the files, and move new ones aside.

        Args:
            now: The state of all watched files.
            others: Places of files that other programs have written; they stay as they are.
            until_s: New folders that were changed later, in seconds since 1970, stay.

        Raises:
            TrialFilesError: A file cannot be restored, or a new one cannot be moved.
        """
        lost, failed = [], []
        others = {*others, *self._brought(now)}
        self._restore_names(now, others)
        #: The only copies of files that cannot be restored: they stay where the trial has put them.
        only: set[str] = set()
        for path, state in self.states.items():
            new = now.get(path)
            if not _differs(state, new) or (new is not None and new.place in others):
                continue
            replaced = new is not None and new.is_folder and not state.is_folder
            if replaced and (_changed_s(path) > until_s or _any_in(path, others)):
                continue  # by another program, or by the user
            try:
                if not self._restore(path, state, new):
                    found = next((name for name in now if _same_content(state, now[name])), "")
                    only.add(found)
                    where = f"is now {found}" if found else f"{state.size / 1e6:.1f} MB"
                    lost.append(f"{path} ({where})")
            except OSError as error:
                failed.append(f"{path} ({error.strerror}; copy: {self.copied[path][1]})")
        failed += self._clear({p: s for p, s in now.items() if p not in only}, others, until_s)
        self.keeps_journal = bool(failed or lost)
        if failed:
            raise TrialFilesError(
                f"changes of a trial cannot be reverted: {few([*failed, *lost])}; "
                "the training is not started",
                hint=f"What was copied before the trial is kept in {self._journal.folder}. The "
                f"next start tries again, unless you delete that folder. {_REMEDY}",
            )
        if lost:
            raise TrialFilesError(
                f"a trial changed {few(lost)}, too large to be copied before; "
                "the training is not started",
                hint=f"No start trains here until you have restored it, or deleted "
                f"{self._journal.folder}. {_REMEDY}",
            )

    def _brought(self, now: Mapping[str, FileState]) -> set[Place]:
        """Return the places of new files that are older than the driver.

        A trial makes none: the user has moved, or mounted, a folder with them.
        """
        since_s = self._journal.started_s() - AFTERWARDS_S
        before = [state for state in self.states.values() if state.is_file]
        known = {(state.place[1], state.size, state.changed_ns[0]) for state in before}
        return {
            state.place
            for path, state in now.items()
            if path not in self.states
            and not state.is_folder
            and state.changed_ns[1] / 1e9 < since_s
            # A trial may have renamed a folder with what it had before.
            and (state.place[1], state.size, state.changed_ns[0]) not in known
        }

    def _restore_names(self, now: dict[str, FileState], others: Collection[Place]) -> None:
        """Give files without a copy, which a trial has only renamed, their names again.

        As in the usual rotation of checkpoints, whose older one takes another name. Likewise their
        permissions.

        Args:
            now: As of :meth:`revert`; brought up to date.
            others: As of :meth:`revert`.
        """
        for path, state in self.states.items():
            new = now.get(path)
            if not state.is_file or self._has_copy(path, state) or not _differs(state, new):
                continue
            if new is not None and new.place in others:
                continue
            with contextlib.suppress(OSError):  # it counts as lost
                if new is None or not _same_content(state, new):
                    source = self._new_name(state, now, others)
                    if (
                        not source
                        or _is_behind_link(path)
                        or not os.path.isdir(os.path.dirname(path))
                    ):
                        continue
                    if new is not None and new.is_folder:
                        continue
                    keep = self._had_name(source, now)
                    if new is not None:
                        self._make_way(path, new, now)
                    _rename(source, path, keep=keep)
                    if not keep:
                        del now[source]
                os.chmod(path, state.mode & 0o7777)
                now[path] = self.states[path] = FileState.of(os.lstat(path))

    def _make_way(self, path: str, new: FileState, now: dict[str, FileState]) -> None:
        """Move what has the name of another file: aside, or to a name from which it is restored."""
        if any(each.is_file and _same_content(each, new) for each in self.states.values()):
            spare = f"{path}.before-trial"  # another name's file, which gets that again
            _rename(path, spare)
            now[spare] = new
        else:
            self._move_aside(path)

    def _new_name(
        self, state: FileState, now: Mapping[str, FileState], others: Collection[Place]
    ) -> str:
        """Return the name that a trial has given to a file; empty if there is none.

        Without one, it is a second name that it had before.
        """
        names = [n for n, s in now.items() if _same_content(state, s) and s.place not in others]
        new = (name for name in names if not self._had_name(name, now))
        return next(new, names[0] if names else "")

    def _had_name(self, name: str, now: Mapping[str, FileState]) -> bool:
        """Return whether a file had this name before the trial."""
        before = self.states.get(name)
        return before is not None and before.place[1] == now[name].place[1]

    def _clear(
        self, now: Mapping[str, FileState], others: Collection[Place], until_s: float
    ) -> list[str]:
        """Move new files aside, and remove new folders that are empty then.

        A new folder may be another program's, which has files in it, or will have.

        Returns:
            Files that could not be moved, with the reasons.
        """
        failed = []
        new = [path for path in now if path not in self.states and os.path.lexists(path)]
        new = [path for path in new if not _is_behind_link(path)]
        folders = [path for path in new if now[path].is_folder and not _is_foreign(now[path])]
        gone = [path for path in folders if _changed_s(path) <= until_s]
        for path in new:
            state = now[path]
            if state.is_folder or state.place in others or _is_foreign(state):
                continue
            try:
                self._move_aside(path)
            except OSError as error:
                failed.append(f"{path}, which was not there before ({error.strerror})")
        for path in reversed(gone):
            with contextlib.suppress(OSError):
                names = os.listdir(path)
                # What was not watched goes with its folder.
                if set(names) <= SKIPPED and not _any_in(path, others):
                    for name in names:
                        self._move_aside(os.path.join(path, name))
                    os.rmdir(path)
        return failed

    def _has_copy(self, path: str, state: FileState) -> bool:
        return self.copied.get(path, (None,))[0] == state

    def _skipped(self) -> set[str]:
        skipped = {*_KERNEL, *self._own, *self._journal.places, *self.unwatched}
        if self._keep:
            skipped.add(os.path.realpath(self._keep))
        return skipped

    def _restore(self, path: str, state: FileState, new: FileState | None) -> bool:
        """Restore ``path``; return whether that is possible."""
        if not self._has_copy(path, state):
            return False
        if _is_behind_link(path):
            raise OSError(errno.EEXIST, "its folder is now a link")
        if new is None and not state.is_folder and os.path.lexists(path):
            raise OSError(errno.EEXIST, "it was written meanwhile")
        _, copy = self.copied[path]
        if new is not None and new.is_folder and state.is_folder:
            os.chmod(path, state.mode & 0o7777)
            return True
        if new is not None:
            self._move_aside(path, leave=new.is_file and new.place == state.place)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if state.is_folder:
            os.makedirs(path, exist_ok=True)
            os.chmod(path, state.mode & 0o7777)
        elif isinstance(copy, str):
            os.symlink(copy, path)
        else:
            if os.path.exists(path) and not os.access(path, os.W_OK):  # by the trial
                os.chmod(path, stat.S_IRUSR | stat.S_IWUSR)
            shutil.copyfile(copy, path)  # writes into the same file if it still exists
            shutil.copystat(copy, path)
        with contextlib.suppress(OSError):  # only root may, and not on each file system
            os.chown(path, state.owner, -1, follow_symlinks=False)
        self.copied[path] = (FileState.of(os.lstat(path)), copy)
        return True

    def _move_aside(self, path: str, *, leave: bool = False) -> None:
        """Move a file that a trial left to the folder for such files."""
        if self._aside is None:
            prefix = "hvd-autosync-left-by-trials-"
            self._aside = Path(self._keep or tempfile.mkdtemp(prefix=prefix)).absolute()
            self._say(
                f"files left by trials are moved to {self._aside}: check them, then delete it"
            )
        target = self._aside / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while os.path.lexists(target):
            target, number = target.with_name(f"{os.path.basename(path)}.{number}"), number + 1
        if leave:
            shutil.copy2(path, target)
        else:
            shutil.move(path, target)


def _differs(state: FileState, new: FileState | None) -> bool:
    """Return whether an entry has changed; what passes through a pipe does not change it."""
    if new is None or state.is_folder or state.is_file or stat.S_ISLNK(state.mode):
        return new != state
    return new.place != state.place


def _same_content(state: FileState, new: FileState) -> bool:
    """Return whether a file is the same, though it may have another name or other permissions."""
    same = (state.place[1], state.size) == (new.place[1], new.size)
    return new.is_file and same and state.changed_ns[0] == new.changed_ns[0]


def _any_in(folder: str, others: Collection[Place]) -> bool:
    """Return whether a folder has one of the files that other programs have written."""
    for place, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                if FileState.of(os.lstat(os.path.join(place, name))).place in others:
                    return True
    return False


def _is_behind_link(path: str) -> bool:
    """Return whether a path leads through a link, perhaps to files of the user elsewhere."""
    folder = os.path.dirname(path)
    return os.path.realpath(folder) != folder


def _rename(source: str, path: str, *, keep: bool = False) -> None:
    """Give a file another name, which nothing has.

    Args:
        source: Its name.
        path: The other one.
        keep: Whether it keeps the first, too.

    Raises:
        OSError: Something has that name, or the file system allows neither.
    """
    try:
        os.link(source, path)  # unlike a rename, it replaces nothing
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if keep or os.path.lexists(path):
            raise
        os.rename(source, path)
    else:
        if not keep:
            os.unlink(source)


def _changed_s(folder: str) -> float:
    """Return when the entries of a folder last changed, seconds since 1970; infinite if unknown."""
    try:
        return os.lstat(folder).st_mtime
    except OSError:  # it has just been removed
        return math.inf


def _is_foreign(state: FileState) -> bool:
    """Return whether a new file is another user's, as far as its owner tells that."""
    return os.geteuid() != 0 and state.owner not in (os.geteuid(), *_NOBODY)


def few(names: Sequence[str]) -> str:
    """Return up to three names, and the number of the others."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
