"""What others write during a trial is seen, and a journal outlives its driver."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hvd_autosync.launch import file_journal
from hvd_autosync.launch.file_journal import (
    FileJournal,
    FilesRecord,
    JournalDamagedError,
    journals_folder,
    left_journals,
    this_host,
)
from hvd_autosync.launch.file_states import FileState, file_states

#: Appends to a file, and holds it open until a folder appears; then it closes the file.
_WRITER = """
import os, sys, time
with open(sys.argv[1], "a") as file:
    print("line", file=file, flush=True)
    until = time.monotonic() + 60
    while not os.path.exists(sys.argv[2]) and time.monotonic() < until:
        time.sleep(0.01)
os.rmdir(sys.argv[2])
"""


def _await(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def journal(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileJournal]:
    monkeypatch.setattr(file_journal, "_INTERVAL_S", 0.02)
    journal = FileJournal()
    yield journal
    journal.close()


def _record(folder: Path, host: str = "a") -> FilesRecord:
    states, _ = file_states([str(folder)], ())
    return FilesRecord(host, [str(folder)], (), "", states, {})


@pytest.mark.parametrize(
    ("own", "environment"),
    [
        (False, {}),
        (False, {"HVD_AUTOSYNC_TRIAL_ID": "another-job"}),
        (True, {}),
        (True, {"HVD_AUTOSYNC_TRIAL_ID": "trial-0"}),
    ],
)
def test_files_that_others_have_written_and_closed_are_known(
    tmp_path: Path,
    journal: FileJournal,
    own: bool,
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a process is the trial's is seen by its ancestors, and by the trial's name."""
    looks: list[None] = []
    look = file_journal._Sampler.look
    monkeypatch.setattr(file_journal._Sampler, "look", lambda own: looks.append(look(own)))
    folder, ready = tmp_path / "run", tmp_path / "ready"
    folder.mkdir()
    log = folder / "log.txt"
    log.touch()
    journal.begin(_record(folder), "trial-0")
    command = [sys.executable, "-c", _WRITER, str(log), str(ready)]
    variables = {**os.environ, **environment}
    if not own or environment:  # so it does not descend from this process
        subprocess.run(["sh", "-c", '"$@" & exit', "sh", *command], env=variables)
    else:
        subprocess.Popen(command, env=variables)
    _await(lambda: log.read_text() == "line\n")
    seen = len(looks)
    _await(lambda: len(looks) >= seen + 2)  # one of them began with the file open
    ready.mkdir()
    _await(lambda: not ready.exists())
    about = log.stat()
    assert ((about.st_dev, about.st_ino) in journal.others()) is not own


def test_a_record_is_read_as_it_was_written(tmp_path: Path, journal: FileJournal) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9")).write_text("x")
    states, _ = file_states([str(tmp_path)], ())
    (path,) = (path for path, state in states.items() if state.is_file)
    copied: dict[str, tuple[FileState, Path | str]] = {
        path: (states[path], journal.folder / "0.copy"),
        str(tmp_path / "link"): (states[path], os.fsdecode(b"target\xff")),
        str(tmp_path): (states[str(tmp_path)], ""),
    }
    written = FilesRecord("a", [str(tmp_path)], ["/dev", "/proc"], "kept", states, copied)
    journal.begin(written, "trial-0")
    assert journal.record() == written
    journal.end()
    assert journal.record() is None


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"host": 1, "copied": {"a": [1]}}', "[" * 9999])
def test_a_damaged_record_is_an_error(journal: FileJournal, text: str) -> None:
    (journal.folder / "trial.json").write_text(text)
    with pytest.raises(JournalDamagedError):
        journal.record()


def test_a_journal_is_left_when_its_driver_has_ended(tmp_path: Path) -> None:
    driver = textwrap.dedent(
        """
        import sys, time
        from hvd_autosync.launch.file_journal import FileJournal, FilesRecord
        journal = FileJournal()
        journal.begin(FilesRecord("a", [sys.argv[1]], (), "", {}, {}), "trial-0")
        print(journal.folder, flush=True)
        time.sleep(60)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", driver, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    assert folder.parent == journals_folder()
    assert folder.stat().st_mode & 0o077 == 0, "copies of the user's files"
    assert not [*left_journals()], "its driver lives"
    process.send_signal(signal.SIGKILL)
    process.wait()
    (left,) = left_journals()
    assert left.folder == folder and left.record() is not None
    assert 0 <= time.time() - left.last_alive_s() < 60
    assert not [*left_journals()], "this process has it now"
    left.close()
    assert not folder.exists() and not [*left_journals()]


def test_without_a_data_folder_there_is_nothing_to_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    journal = FileJournal()
    journal.begin(_record(tmp_path, this_host()), "trial-0")
    assert journal.folder.exists() and not [*left_journals()]
    journal.close()
    assert not journal.folder.exists()
