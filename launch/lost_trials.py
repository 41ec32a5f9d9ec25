"""Reverts what trials have changed whose drivers were killed: the next start's part."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from hvd_autosync.errors import TrialFilesError
from hvd_autosync.launch.file_journal import (
    AFTERWARDS_S,
    FileJournal,
    FilesRecord,
    JournalDamagedError,
    left_journals,
    this_host,
)
from hvd_autosync.launch.file_states import FileState, file_states, open_for_writing
from hvd_autosync.launch.originals import Originals, few
from hvd_autosync.launch.sweep import await_trials_in

#: Longest wait for the last processes of a lost trial.
_LAST_PROCESSES_S = 15.0
#: A driver on another host that has given no sign of life for so long is dead.
_SILENT_S = 120.0
_LOOK_S = 2.0


def revert_lost_trials(say: Callable[[str], None]) -> None:
    """Revert the changes of trials on this host in which their drivers were killed.

    Args:
        say: Prints a line for the user.

    Raises:
        TrialFilesError: Files of the working directory cannot be restored.
    """
    errors = []
    for journal in left_journals():
        keep = True
        try:
            record = journal.record()
            if record is None:  # its driver was killed between trials
                keep = not journal.is_of_this_host()
                continue
            here = record
            if record.host != this_host():
                shared = _shared_with_here(journal, record, say)
                if shared is None:
                    continue
                here = shared
            originals = Originals.of_record(journal, here, say)
            try:
                _revert(journal, here, originals, say)
            except TrialFilesError as error:
                if here.roots[0] == os.path.realpath(os.getcwd()):
                    errors.append(error)
                else:
                    say(str(error))
            keep = originals.keeps_journal or _keeps_rest(journal, record, here)
        except JournalDamagedError as error:
            say(f"{journal.folder} cannot be read ({error}): restore files from it, then delete it")
        finally:
            journal.close(keep=keep)
    if errors:
        raise errors[0]


def _shared_with_here(
    journal: FileJournal, record: FilesRecord, say: Callable[[str], None]
) -> FilesRecord | None:
    """Return what is known of the files of another host's trial that this host shares.

    There the same paths may be other files, and the driver may live on. ``None``: nothing is to be
    reverted here.
    """
    folder = os.path.realpath(os.getcwd())
    if record.roots[0] != folder or _lives(journal, record, say):
        return None
    now, _ = file_states(record.roots, record.skipped)
    same = [p for p, s in record.states.items() if s.is_file and p in now and _is_same(s, now[p])]
    roots = [root for root in record.roots if any(Path(p).is_relative_to(root) for p in same)]
    if folder not in roots:
        say(
            f"a driver on {record.host} was killed in a trial whose changes in {folder} are not "
            f"reverted here: start the flag there, or restore files from {journal.folder} and "
            "delete it"
        )
        return None

    roots = [root for root in record.roots if root in roots or _is_beside(root, record, now)]
    if missed := [root for root in record.roots if root not in roots and os.path.lexists(root)]:
        say(
            f"what a trial on {record.host} has changed in {few(missed)} is not reverted here: "
            f"check it before you train, or restore files from {journal.folder}"
        )

    def below(path: str) -> bool:
        return any(Path(path).is_relative_to(root) for root in roots)

    states = {path: state for path, state in record.states.items() if below(path)}
    copied = {path: copy for path, copy in record.copied.items() if below(path)}
    return replace(record, roots=roots, states=states, copied=copied)


def _is_beside(root: str, record: FilesRecord, now: Mapping[str, FileState]) -> bool:
    """Return whether a root is on the file system of the working directory, on both hosts."""
    one, new = record.states.get(root), now.get(root)
    if one is None or new is None or one.place[1] != new.place[1]:
        return False
    before, after = record.states.get(record.roots[0]), now.get(record.roots[0])
    together = before is not None and one.place[0] == before.place[0]
    return together and after is not None and new.place[0] == after.place[0]


def _keeps_rest(journal: FileJournal, record: FilesRecord, here: FilesRecord) -> bool:
    """Return whether a journal is kept for roots of another host alone, and keep those."""
    roots = [root for root in record.roots if root not in here.roots]
    if roots:
        states = {path: s for path, s in record.states.items() if path not in here.states}
        copied = {path: c for path, c in record.copied.items() if path not in here.states}
        with contextlib.suppress(OSError):  # no space is left
            journal.write(replace(record, roots=roots, states=states, copied=copied))
    return bool(roots)


def _lives(journal: FileJournal, record: FilesRecord, say: Callable[[str], None]) -> bool:
    """Return whether a driver on another host gives signs of life; it may take two minutes."""
    first = journal.last_alive_s()
    if journal.silent_s() < _SILENT_S:
        say(
            f"a driver on {record.host} may still run a trial in {record.roots[0]}: waiting for a "
            "sign of that, two minutes at most"
        )
    while journal.silent_s() < _SILENT_S:
        time.sleep(_LOOK_S)
        if not journal.folder.exists() or journal.last_alive_s() != first:
            return True
    return not journal.folder.exists() or journal.record() is None  # it has ended its trial


def _is_same(state: FileState, new: FileState) -> bool:
    """Return whether a file is the same; hosts number the file systems that they share apart."""
    one, other = (
        (each.mode, each.place[1], each.owner, each.size, each.changed_ns) for each in (state, new)
    )
    return one == other


def _revert(
    journal: FileJournal, record: FilesRecord, originals: Originals, say: Callable[[str], None]
) -> None:
    """Revert one trial.

    Raises:
        TrialFilesError: A file cannot be restored.
    """
    await_trials_in(record.roots[0], _LAST_PROCESSES_S)
    say(
        "an earlier driver was killed in a trial, or could not revert one: what the trial has "
        f"changed in {', '.join(record.roots)} is reverted"
    )
    limit_s = journal.last_alive_s() + AFTERWARDS_S
    now, _ = originals.scan()
    # File systems may have other numbers here, or since the host has started again.
    known = originals.states
    same = {path for path in known.keys() & now.keys() if _is_same(known[path], now[path])}
    devices = {known[path].place[0]: now[path].place[0] for path in same}
    now.update({path: known[path] for path in same})
    later = {path: state for path, state in now.items() if _changed_s(state) > limit_s}
    if left := sorted(path for path in later if later[path] != record.states.get(path)):
        say(f"left as they are, because they were changed later: {few(left)}")
    written = {(devices.get(device, device), inode) for device, inode in journal.others()}
    others = written | open_for_writing(record.roots)
    originals.revert(now, others | {state.place for state in later.values()}, limit_s)


def _changed_s(state: FileState) -> float:
    """Return when a file was last changed, seconds since 1970; 0 for a folder."""
    return max(state.changed_ns) / 1e9
