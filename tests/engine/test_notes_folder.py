"""The notes of a training are removed, by the next driver if their own was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from hvd_autosync.engine import notes_folder
from hvd_autosync.engine.notes_folder import NotesFolder

#: A driver: it prints the name of its folder, and is killed.
DRIVER = """
import os, signal
from hvd_autosync.engine.notes_folder import NotesFolder
folder = NotesFolder()
print(folder.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files are in the folder of the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def age(folder: Path) -> None:
    """Let a folder not have changed for an hour."""
    before = time.time() - 3600
    os.utime(folder, (before, before))


def of_killed_driver() -> Path:
    """The folder of a driver that was killed an hour ago, with a note."""
    died = subprocess.run([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert died.returncode == -signal.SIGKILL
    folder = Path(died.stdout.strip())
    (folder / "begun").touch()
    age(folder)
    return folder


def open_in(folder: Path) -> list[Path]:
    """The files of a folder that this process has open."""
    held = [each.resolve() for each in Path("/proc/self/fd").iterdir() if each.exists()]
    return [each for each in held if each.is_relative_to(folder)]


def test_a_driver_removes_its_folder(tmp_path: Path) -> None:
    with NotesFolder() as name:
        assert Path(name).is_dir()
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_killed_driver_is_removed_by_the_next() -> None:
    left = of_killed_driver()
    assert left.is_dir()
    with NotesFolder() as name:
        assert not left.exists() and Path(name).is_dir()


def test_the_folder_of_a_driver_that_lives_stays(tmp_path: Path) -> None:
    """However long nothing was noted there."""
    with NotesFolder() as one:
        age(Path(one))
        with NotesFolder() as other:
            assert Path(one).is_dir() and one != other


@pytest.mark.parametrize("case", ["new", "another host", "another user", "unlocked", "a link"])
def test_what_may_be_of_another_driver_stays(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = of_killed_driver()
    if case == "new":
        os.utime(left)
    elif case == "another host":
        monkeypatch.setattr(notes_folder, "this_host", lambda: "elsewhere")
    elif case == "another user":
        monkeypatch.setattr(notes_folder.os, "getuid", lambda: left.stat().st_uid + 1)
    elif case == "unlocked":
        (left / "driver").unlink()
        age(left)
    else:
        kept = left.rename(tmp_path / "kept")
        left.symlink_to(kept)
        os.utime(left, (1, 1), follow_symlinks=False)
        left = kept
    with NotesFolder():
        assert (left / "begun").exists()


def test_without_locks_there_is_a_folder_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def lock(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(notes_folder.fcntl, "flock", lock)
    with NotesFolder() as name:
        assert not list(Path(name).iterdir()), "nobody can tell when its driver has ended"


def test_no_file_is_open_when_the_folder_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system would keep it, and so the folder."""
    own = tempfile.TemporaryDirectory.cleanup
    seen = []

    def cleanup(self: NotesFolder) -> None:
        seen.append(open_in(Path(self.name)))
        own(self)

    monkeypatch.setattr(tempfile.TemporaryDirectory, "cleanup", cleanup)
    with NotesFolder() as name:
        assert open_in(Path(name)) == [Path(name, notes_folder._LOCK)]
    assert seen == [[]] and not Path(name).exists()


def test_what_cannot_be_removed_ends_no_driver() -> None:
    with NotesFolder() as name:
        Path(name).rename(f"{name}.moved")
        Path(name).touch()
    assert Path(name).is_file()
