"""Reverts the changes of trials to files, if the files cannot be private.

Before a trial, the working directory and the paths in the command are scanned, and files are copied
up to a total size. After the trial, changed and removed files are restored, and new ones are moved
aside; nothing is deleted, because another program may have written it meanwhile. What other
programs are seen to write stays as it is. If a file without a copy was changed, the training must
not start. If the driver is killed in a trial, the next start reverts it
(:mod:`hvd_autosync.launch.lost_trials`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from hvd_autosync.errors import FolderInUseError, TrialFilesError
from hvd_autosync.launch.file_journal import FileJournal
from hvd_autosync.launch.file_states import FileState
from hvd_autosync.launch.originals import Originals

_MOST_ENTRIES = 50_000
_MOST_COPIED_BYTES = 1 << 30
#: The largest part of the free space that copies may take.
_SHARE_OF_SPACE = 0.25


class WatchedFiles:
    """The state of a job's files before its trials.

    Args:
        command: The job's command; the paths in it are watched, too.
        say: Prints a line for the user.
        own: Files that hvd_autosync itself changes; they are not watched.
        keep: Folder to which files left by trials are moved; "": a new temporary folder.
        copied_bytes: Most bytes to copy.

    Raises:
        TrialFilesError: There is no folder for the copies.
        FolderInUseError: Another job is being tuned in the working directory.
    """

    def __init__(
        self,
        command: Sequence[str],
        say: Callable[[str], None],
        own: Collection[str] = (),
        keep: str = "",
        copied_bytes: int = _MOST_COPIED_BYTES,
    ) -> None:
        self._roots = watched_paths(command)
        journal = None
        try:
            self._journal = journal = FileJournal()
            claimed = journal.claim(self._roots[0])
        except OSError as error:
            if journal is not None:
                journal.close()
            raise TrialFilesError(
                f"there is no folder for copies of the files of {self._roots[0]}, which trials "
                f"may change: {error.strerror}",
                hint="Set XDG_DATA_HOME or TMPDIR to a folder that you may write to.",
            ) from None
        if claimed:
            self._journal.close()
            raise FolderInUseError(
                f"another job is being tuned in {claimed}; here files of trials cannot be private, "
                "so each job would take the other's files for those of its own trials",
                hint="Wait until it has ended, or start this one in a folder of its own.",
            )
        owned = {os.path.realpath(path) for path in own}
        self._originals = Originals(self._journal, self._roots, owned, keep, say)
        free = shutil.disk_usage(self._journal.folder).free
        self._left = min(copied_bytes, int(free * _SHARE_OF_SPACE))
        self._numbers = itertools.count()
        try:
            states, unwatched = self._originals.scan(_MOST_ENTRIES)
            folders = ", ".join(self._roots)
            changes = f"changes that a trial makes in {folders} on this host"
            say(f"{changes} are reverted after the trial")
            if unwatched:
                most = f"more than {_MOST_ENTRIES} files"
                say(f"{unwatched[0]} and later paths are not watched: {most}")
            for path in sorted(states, key=lambda each: states[each].size):
                self._copy(path, states[path])
        except BaseException:
            self.close()
            raise

    def begin(self, trial_id: str) -> None:
        """Record the state before a trial; changes since the last trial are the user's.

        Args:
            trial_id: The trial id in the environment of the trial's processes.

        Raises:
            TrialFilesError: The record cannot be written, so the trial must not start.
        """
        files = self._originals
        files.unwatched = []
        files.states, files.unwatched = files.scan(_MOST_ENTRIES)
        for path, state in files.states.items():
            if files.copied.get(path, (None,))[0] != state:
                self._copy(path, state)
        try:
            self._journal.begin(files.record(), trial_id)
            files.keeps_journal = True
        except OSError as error:
            raise TrialFilesError(
                f"cannot write to {self._journal.folder}, which keeps the files of "
                f"{self._roots[0]} during a trial: {error.strerror}",
                hint="Free some space there, or name another folder with XDG_DATA_HOME.",
            ) from None

    def end(self) -> None:
        """Restore the state from before the trial.

        Raises:
            TrialFilesError: A file cannot be restored, or what a trial left cannot be moved.
        """
        files = self._originals
        try:
            now, _ = files.scan()
            files.revert(now, self._journal.others())
        finally:
            self._journal.end(keep=files.keeps_journal)

    def close(self) -> None:
        """Remove the copies, unless a file could not be restored from them."""
        self._journal.close(keep=self._originals.keeps_journal)

    def _copy(self, path: str, state: FileState) -> None:
        """Copy the file at ``path``, if there is room."""
        copied = self._originals.copied
        _, before = copied.pop(path, (None, ""))
        if isinstance(before, Path):
            self._left += before.stat().st_size
            before.unlink()
        with contextlib.suppress(OSError):  # not readable, deleted, or no room: no copy
            if state.is_folder:
                copied[path] = (state, "")
            elif os.path.islink(path):
                copied[path] = (state, os.readlink(path))
            elif state.is_file and state.size <= self._left:
                copied[path] = (state, self._copy_of(path))
                self._left -= state.size

    def _copy_of(self, path: str) -> Path:
        """Copy a file to the journal, and return the copy; if that fails, there is none."""
        copy = self._journal.folder / f"{next(self._numbers)}.copy"
        try:
            shutil.copy2(path, copy)
        except OSError:
            copy.unlink(missing_ok=True)
            raise
        return copy


def watched_paths(command: Sequence[str]) -> list[str]:
    """Return the real paths of the working directory and of a command's paths outside it."""
    roots = [os.path.realpath(os.getcwd())]
    for word in command[1:]:
        for text in (word, word.partition("=")[2]):
            path = os.path.realpath(text)
            named = (
                text
                and not text.startswith("-")
                and (
                    os.path.exists(path)
                    or (os.sep in text and os.path.isdir(os.path.dirname(path)))
                )
            )
            covered = any(Path(path).is_relative_to(root) for root in roots)
            if named and not covered and not Path(roots[0]).is_relative_to(path):
                roots.append(path)
    return roots
