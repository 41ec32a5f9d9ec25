"""Reverts the changes of trials to files, if the files cannot be private.

Before a trial, the working directory and the paths in the command are scanned, and files are copied
up to a total size. After the trial, changed and removed files are restored, and new ones are moved
aside; nothing is deleted, because another program may have written it meanwhile. If a file without
a copy was changed, the training must not start.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from hvd_autosync.errors import TrialFilesError
from hvd_autosync.launch.file_states import FileState, file_states, open_for_writing

_MOST_ENTRIES = 50_000
_MOST_COPIED_BYTES = 1 << 30
_KERNEL = ("/dev", "/proc", "/run", "/sys")
_REMEDY = (
    "Restore it, then tune in a copy of the folder with --autosync-tune-only, or on a machine "
    "where trial files can be private: docs/faq.md."
)


class WatchedFiles:
    """The state of a job's files before its trials.

    Args:
        command: The job's command; the paths in it are watched, too.
        say: Prints a line for the user.
        own: Files that hvd_autosync itself changes; they are not watched.
        keep: Folder to which files left by trials are moved; "": a new temporary folder.
        copied_bytes: Most bytes to copy.
    """

    def __init__(
        self,
        command: Sequence[str],
        say: Callable[[str], None],
        own: Collection[str] = (),
        keep: str = "",
        copied_bytes: int = _MOST_COPIED_BYTES,
    ) -> None:
        self._say = say
        self._keep = keep
        self._roots = watched_paths(command)
        self._own = {os.path.realpath(path) for path in own}
        self._left = copied_bytes
        self._copies = Path(tempfile.mkdtemp(prefix="hvd-autosync-copies-"))
        self._copied: dict[str, tuple[FileState, Path | str]] = {}
        self._numbers = itertools.count()
        self._states: dict[str, FileState] = {}
        self._unwatched: list[str] = []
        self._aside: Path | None = None
        self._keep_copies = False
        states, unwatched = self._scan(_MOST_ENTRIES)
        folders = ", ".join(self._roots)
        say(f"changes that a trial makes in {folders} on this host are reverted after the trial")
        if unwatched:
            say(f"{unwatched[0]} and later paths are not watched: more than {_MOST_ENTRIES} files")
        try:
            for path in sorted(states, key=lambda each: states[each].size):
                self._copy(path, states[path])
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Record the state before a trial; changes since the last trial are the user's."""
        self._unwatched = []
        self._states, self._unwatched = self._scan(_MOST_ENTRIES)
        for path, state in self._states.items():
            if self._copied.get(path, (None,))[0] != state:
                self._copy(path, state)

    def end(self) -> None:
        """Restore the state from before the trial.

        Raises:
            TrialFilesError: A file cannot be restored, or what a trial left cannot be moved.
        """
        now, _ = self._scan()
        others = open_for_writing()
        lost, failed = [], []
        for path, state in self._states.items():
            new = now.get(path)
            if new == state or (new is not None and new.place in others):
                continue
            try:
                if not self._restore(path, state, new):
                    lost.append(f"{path} ({state.size / 1e6:.1f} MB)")
            except OSError as error:
                failed.append(f"{path} ({error.strerror}; copy: {self._copied[path][1]})")
        for path in [path for path in now if path not in self._states]:
            if now[path].place not in others and os.path.lexists(path):
                try:
                    self._move_aside(path)
                except OSError as error:
                    failed.append(f"{path}, which was not there before ({error.strerror})")
        if failed:
            self._keep_copies = True
            raise TrialFilesError(
                f"changes of a trial cannot be reverted: {_few([*failed, *lost])}; "
                "the training is not started",
                hint=f"What was copied before the trial is kept in {self._copies}. {_REMEDY}",
            )
        if lost:
            raise TrialFilesError(
                f"a trial changed {_few(lost)}, too large to be copied before; "
                "the training is not started",
                hint=_REMEDY,
            )

    def close(self) -> None:
        """Remove the copies, unless a file could not be restored from them."""
        if not self._keep_copies:
            shutil.rmtree(self._copies, ignore_errors=True)

    def _scan(self, most: int | None = None) -> tuple[dict[str, FileState], list[str]]:
        """Return the states of what is watched: all, or as many entries as ``most``.

        What :meth:`begin` left out is left out after the trial, too.
        """
        skipped = {*_KERNEL, *self._own, str(self._copies), *self._unwatched}
        if self._keep:
            skipped.add(os.path.realpath(self._keep))
        return file_states(self._roots, skipped, most)

    def _copy(self, path: str, state: FileState) -> None:
        """Copy the file at ``path``, if there is room."""
        _, before = self._copied.pop(path, (None, ""))
        if isinstance(before, Path):
            self._left += before.stat().st_size
            before.unlink()
        with contextlib.suppress(OSError):  # not readable, deleted, or no room: no copy
            if state.is_folder:
                self._copied[path] = (state, "")
            elif os.path.islink(path):
                self._copied[path] = (state, os.readlink(path))
            elif state.is_file and state.size <= self._left:
                copy = self._copies / str(next(self._numbers))
                shutil.copy2(path, copy)
                self._left -= state.size
                self._copied[path] = (state, copy)

    def _restore(self, path: str, state: FileState, new: FileState | None) -> bool:
        """Restore ``path``; return whether that is possible."""
        known, copy = self._copied.get(path, (None, ""))
        if known != state:
            return False
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
            shutil.copyfile(copy, path)  # writes into the same file if it still exists
            shutil.copystat(copy, path)
        self._copied[path] = (FileState.of(os.lstat(path)), copy)
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


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


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
