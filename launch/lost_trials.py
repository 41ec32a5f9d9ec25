"""Reverts what trials have changed whose drivers were killed: the next start's part."""

from __future__ import annotations

import os
from collections.abc import Callable

from hvd_autosync.errors import TrialFilesError
from hvd_autosync.launch.file_journal import (
    AFTERWARDS_S,
    FileJournal,
    FilesRecord,
    JournalDamagedError,
    left_journals,
    this_host,
)
from hvd_autosync.launch.file_states import FileState, open_for_writing
from hvd_autosync.launch.originals import Originals, few
from hvd_autosync.launch.sweep import await_trials_in

#: Longest wait for the last processes of a lost trial.
_LAST_PROCESSES_S = 15.0


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
            elif record.host == this_host():  # elsewhere its paths may be other files
                originals = Originals.of_record(journal, record, say)
                try:
                    _revert(journal, record, originals, say)
                except TrialFilesError as error:
                    if record.roots[0] == os.path.realpath(os.getcwd()):
                        errors.append(error)
                    else:
                        say(str(error))
                keep = originals.keeps_journal
        except JournalDamagedError as error:
            say(f"{journal.folder} cannot be read ({error}): restore files from it, then delete it")
        finally:
            journal.close(keep=keep)
    if errors:
        raise errors[0]


def _revert(
    journal: FileJournal, record: FilesRecord, originals: Originals, say: Callable[[str], None]
) -> None:
    """Revert one trial.

    Raises:
        TrialFilesError: A file cannot be restored.
    """
    await_trials_in(record.roots[0], _LAST_PROCESSES_S)
    say(
        "an earlier driver was killed in a trial: what the trial has changed in "
        f"{', '.join(record.roots)} is reverted"
    )
    limit_s = journal.last_alive_s() + AFTERWARDS_S
    now, _ = originals.scan()
    later = {path: state for path, state in now.items() if _changed_s(state) > limit_s}
    if left := sorted(path for path in later if later[path] != record.states.get(path)):
        say(f"left as they are, because they were changed later: {few(left)}")
    others = journal.others() | open_for_writing(record.roots)
    originals.revert(now, others | {state.place for state in later.values()})


def _changed_s(state: FileState) -> float:
    """Return when a file was last changed, seconds since 1970; 0 for a folder."""
    return max(state.changed_ns) / 1e9
