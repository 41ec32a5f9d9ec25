"""Puts back what trials change, where their files cannot be private.

Before a trial everything in the working directory, and what the command names, is looked at and
copied as far as that is little. After it what was changed or removed is put back, and what is new
is moved aside: nothing is deleted, for somebody else may have written it meanwhile. If something
was changed of which there is no copy, no training may start from it.
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
    "Put it back, then tune in a copy of the folder with --autosync-tune-only, or on a machine "
    "where trials can have files of their own: docs/faq.md."
)


class WatchedFiles:
    """The files of one job, as they were before its trials.

    Args:
        command: The job's; paths that it names are watched, too.
        say: Takes a line for the user.
        own: Files of ours, which change.
        keep: Where what trials leave is moved to; a new folder for temporary files if "".
        copied_bytes: Most bytes that are copied.
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
        self._aside: Path | None = None
        states, beyond = self._look()
        folders = ", ".join(self._roots)
        say(f"what trials change in {folders} on this host is put back after each of them")
        if beyond:
            say(f"{beyond} and what follows it is not watched: more than {_MOST_ENTRIES} files")
        for path in sorted(states, key=lambda each: states[each].size):
            self._copy(path, states[path])

    def begin(self) -> None:
        """A trial is about to start: what was changed since the last one is the user's."""
        self._states, _ = self._look()
        for path, state in self._states.items():
            if self._copied.get(path, (None,))[0] != state:
                self._copy(path, state)

    def end(self) -> None:
        """A trial is over: have everything as it was.

        Raises:
            TrialFilesError: Something cannot be put back.
        """
        now, _ = self._look()
        others = open_for_writing()
        lost = []
        for path in [path for path in now if path not in self._states]:
            if now[path].place not in others and os.path.lexists(path):
                self._move_aside(path)
        for path, state in self._states.items():
            new = now.get(path)
            if new == state or (new is not None and new.place in others):
                continue
            if not self._put_back(path, state, new):
                lost.append((path, state))
        if lost:
            names = ", ".join(f"{path} ({state.size / 1e6:.1f} MB)" for path, state in lost[:3])
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            raise TrialFilesError(
                f"a trial changed {names}{more}, too large to be copied before; "
                "the training is not started",
                hint=_REMEDY,
            )

    def close(self) -> None:
        """Remove the copies."""
        shutil.rmtree(self._copies, ignore_errors=True)

    def _look(self) -> tuple[dict[str, FileState], str]:
        skipped = {*_KERNEL, *self._own, str(self._copies)}
        if self._keep:
            skipped.add(os.path.realpath(self._keep))
        return file_states(self._roots, skipped, _MOST_ENTRIES)

    def _copy(self, path: str, state: FileState) -> None:
        """Keep what is at ``path``, where there is room."""
        _, before = self._copied.pop(path, (None, ""))
        if isinstance(before, Path):
            self._left += before.stat().st_size
            before.unlink()
        with contextlib.suppress(OSError):  # not ours to read, gone, or no room: it has no copy
            if state.is_folder:
                self._copied[path] = (state, "")
            elif os.path.islink(path):
                self._copied[path] = (state, os.readlink(path))
            elif state.is_file and state.size <= self._left:
                copy = self._copies / str(next(self._numbers))
                shutil.copy2(path, copy)
                self._left -= state.size
                self._copied[path] = (state, copy)

    def _put_back(self, path: str, state: FileState, new: FileState | None) -> bool:
        """Whether ``path`` is what it was again."""
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
            shutil.copyfile(copy, path)  # into the same file, where it is still that
            shutil.copystat(copy, path)
        self._copied[path] = (FileState.of(os.lstat(path)), copy)
        return True

    def _move_aside(self, path: str, *, leave: bool = False) -> None:
        """Give what a trial left another place."""
        if self._aside is None:
            prefix = "hvd-autosync-left-by-trials-"
            self._aside = Path(self._keep or tempfile.mkdtemp(prefix=prefix)).absolute()
            self._say(f"what trials leave is moved to {self._aside}: look there, then delete it")
        target = self._aside / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        number = 1
        while os.path.lexists(target):
            target, number = target.with_name(f"{os.path.basename(path)}.{number}"), number + 1
        if leave:
            shutil.copy2(path, target)
        else:
            shutil.move(path, target)


def watched_paths(command: Sequence[str]) -> list[str]:
    """The working directory, and what a command names that is not below it, by real paths."""
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
            if named and not any(Path(path).is_relative_to(root) for root in roots):
                if not Path(roots[0]).is_relative_to(path):
                    roots.append(path)
    return roots
