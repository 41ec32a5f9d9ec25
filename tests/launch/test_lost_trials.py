"""The files of a user whose driver was killed in a trial are put back by the next start."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_autosync.api import notebook
from hvd_autosync.commands import flag
from hvd_autosync.engine.job_line import parse_words
from hvd_autosync.errors import TrialFilesError
from hvd_autosync.launch import file_journal, lost_trials, originals
from hvd_autosync.launch.file_journal import FileJournal, journals_folder
from hvd_autosync.launch.lost_trials import revert_lost_trials
from hvd_autosync.launch.watched_files import WatchedFiles

_DRIVER = textwrap.dedent(
    """
    import os, signal, sys
    from pathlib import Path
    from hvd_autosync.launch.watched_files import WatchedFiles
    watch = WatchedFiles(["python", "train.py"], print, keep=sys.argv[1])
    watch.begin("trial-0")
    Path("model.pt").write_bytes(b"WEIGHTS")
    with open("log.txt", "a") as log:
        log.write("of the trial\\n")
    os.remove("link")
    Path("new").write_text("new")
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    """
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "model.pt").write_bytes(b"weights")
    (folder / "log.txt").write_text("first\n")
    (folder / "link").symlink_to("model.pt")
    monkeypatch.chdir(folder)
    return folder


def _lose(folder: Path) -> None:
    """Run a driver that is killed in a trial."""
    command = [sys.executable, "-c", _DRIVER, str(folder.parent / "left")]
    assert subprocess.run(command, cwd=folder).returncode == -signal.SIGKILL
    assert (folder / "model.pt").read_bytes() == b"WEIGHTS"


def _end_trial(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is written from now on be later than the trial, however long this took."""
    (journal,) = journals_folder().iterdir()
    trial_s = max(path.lstat().st_ctime for path in (folder, *folder.rglob("*")))
    alive_s = (journal / "others").stat().st_mtime
    monkeypatch.setattr(lost_trials, "AFTERWARDS_S", trial_s - alive_s + 0.01)
    time.sleep(0.05)


def test_the_next_start_puts_everything_back(folder: Path, tmp_path: Path) -> None:
    _lose(folder)
    said: list[str] = []
    revert_lost_trials(said.append)
    assert (folder / "model.pt").read_bytes() == b"weights"
    assert (folder / "log.txt").read_text() == "first\n"
    assert os.readlink(folder / "link") == "model.pt"
    assert not (folder / "new").exists()
    left = tmp_path / "left" / str(folder).lstrip("/")
    assert (left / "model.pt").read_bytes() == b"WEIGHTS", "nothing is deleted"
    assert (left / "new").read_text() == "new"
    assert "an earlier driver was killed in a trial" in said[0] and str(folder) in said[0]
    assert not [*journals_folder().iterdir()]
    revert_lost_trials(said.append)
    assert len(said) == 2, "it is done once"


def test_what_was_written_later_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _lose(folder)
    _end_trial(folder, monkeypatch)
    (folder / "model.pt").write_bytes(b"of a later training")
    (folder / "mine").write_text("mine")
    said: list[str] = []
    revert_lost_trials(said.append)
    assert (folder / "model.pt").read_bytes() == b"of a later training"
    assert (folder / "mine").read_text() == "mine"
    assert (folder / "log.txt").read_text() == "first\n"
    assert any("changed later: " in line and "model.pt" in line for line in said)


def test_a_folder_that_was_made_later_stays_with_what_is_in_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial's driver was killed days ago, and the user has gone on without us."""
    _lose(folder)
    _end_trial(folder, monkeypatch)
    (folder / "runs" / "exp7").mkdir(parents=True)
    (folder / "runs" / "exp7" / "model.pt").write_bytes(b"mine")
    (folder / "empty").mkdir()
    revert_lost_trials(lambda _: None)
    assert (folder / "runs" / "exp7" / "model.pt").read_bytes() == b"mine"
    assert (folder / "empty").is_dir() and not (folder / "new").exists()


def test_a_folder_that_the_user_has_moved_there_since_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are as old as before, and older than the driver."""
    monkeypatch.setattr(originals, "AFTERWARDS_S", 0.0)
    (tmp_path / "data" / "deep").mkdir(parents=True)
    (tmp_path / "data" / "deep" / "file").write_text("mine")
    time.sleep(0.1)
    _lose(folder)
    os.rename(tmp_path / "data", folder / "data")
    revert_lost_trials(lambda _: None)
    assert (folder / "data" / "deep" / "file").read_text() == "mine"
    assert not (folder / "new").exists()


def test_what_others_had_written_stays_though_file_systems_have_other_numbers(
    folder: Path, elsewhere: Callable[[], Path]
) -> None:
    """As after the host has started again."""
    (folder / "data").write_text("unchanged")
    _lose(folder)
    (folder / "of-another-job").write_text("done")
    journal = elsewhere()
    about = (folder / "of-another-job").stat()
    (journal / "others").write_text(f"{about.st_dev + 1} {about.st_ino}\n")
    revert_lost_trials(lambda _: None)
    assert (folder / "of-another-job").read_text() == "done"
    assert (folder / "model.pt").read_bytes() == b"weights"


def test_what_the_user_has_moved_behind_a_link_is_not_overwritten(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ckpt").mkdir()
    (folder / "ckpt" / "last.pt").write_text("before")
    driver = _DRIVER.replace('os.remove("link")', 'Path("ckpt/last.pt").write_text("trial")')
    subprocess.run([sys.executable, "-c", driver, str(tmp_path / "left")], cwd=folder)
    _end_trial(folder, monkeypatch)
    shutil.move(folder / "ckpt", tmp_path / "ckpt")
    (folder / "ckpt").symlink_to(tmp_path / "ckpt")
    (tmp_path / "ckpt" / "last.pt").write_text("of a later training")
    with pytest.raises(TrialFilesError, match=r"ckpt/last.pt \(its folder is now a link"):
        revert_lost_trials(lambda _: None)
    assert (tmp_path / "ckpt" / "last.pt").read_text() == "of a later training"
    assert (folder / "model.pt").read_bytes() == b"weights", "what can be restored is"


def test_what_was_too_large_to_be_copied_starts_no_training_until_it_is_restored(
    folder: Path,
) -> None:
    """Also not the next one, which would go on from what the trial has written."""
    (folder / "large").write_bytes(bytes(5000))
    watch = WatchedFiles(["python", "train.py"], lambda _: None, copied_bytes=1000)
    watch.begin("trial-0")
    (folder / "large").write_bytes(b"of the trial")
    with pytest.raises(TrialFilesError, match="large"):
        watch.end()
    watch.close()
    for _ in range(2):
        with pytest.raises(TrialFilesError, match="large") as caught:
            revert_lost_trials(lambda _: None)
        assert "No start trains here" in caught.value.hint
    (journal,) = journals_folder().iterdir()
    shutil.rmtree(journal)
    revert_lost_trials(lambda _: None)


def test_the_files_of_a_driver_that_lives_are_left_alone(folder: Path) -> None:
    watch = WatchedFiles(["python", "train.py"], lambda _: None, keep=str(folder.parent / "left"))
    watch.begin("trial-0")
    (folder / "model.pt").write_bytes(b"of the trial")
    said: list[str] = []
    revert_lost_trials(said.append)
    assert (folder / "model.pt").read_bytes() == b"of the trial" and not said
    watch.end()
    watch.close()


def test_a_driver_that_is_killed_between_trials_leaves_nothing(folder: Path) -> None:
    driver = _DRIVER.partition("watch.begin")[0] + "os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", driver, ""], cwd=folder)
    assert [*journals_folder().iterdir()]
    revert_lost_trials(lambda _: None)
    assert not [*journals_folder().iterdir()]


def test_a_driver_on_another_host_may_live_though_its_lock_is_not_seen_here(folder: Path) -> None:
    """As on a file system that is mounted with local locks."""
    driver = _DRIVER.partition("watch.begin")[0] + "os.kill(os.getpid(), signal.SIGKILL)"
    subprocess.run([sys.executable, "-c", driver, ""], cwd=folder)
    (journal,) = journals_folder().iterdir()
    (journal / "host").write_text("elsewhere")
    revert_lost_trials(lambda _: None)
    assert journal.exists()


def test_a_journal_that_is_being_made_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another start comes before its driver has locked it."""
    made: list[Path] = []

    def locked(place: Path) -> int:
        made.append(place)
        revert_lost_trials(lambda _: None)
        assert place.exists()
        return os.open(place / "lock", os.O_RDWR | os.O_CREAT)

    monkeypatch.setattr(file_journal, "_locked", locked)
    FileJournal().close()
    assert len(made) == 1


@pytest.mark.parametrize("here", [True, False])
def test_what_cannot_be_put_back_starts_no_training_in_its_folder(
    folder: Path, tmp_path: Path, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lose(folder)
    (tmp_path / "left").touch()  # so nothing can be moved there
    if not here:
        monkeypatch.chdir(tmp_path)
    said: list[str] = []
    if here:
        with pytest.raises(TrialFilesError, match=r"model\.pt") as caught:
            revert_lost_trials(said.append)
        assert "The next start tries again" in caught.value.hint
    else:
        revert_lost_trials(said.append)
        assert any("model.pt" in line for line in said)
    (tmp_path / "left").unlink()
    revert_lost_trials(said.append)
    assert (folder / "model.pt").read_bytes() == b"weights"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """``elsewhere()``: let the only journal be of another host; returns it."""
    monkeypatch.setattr(lost_trials, "_SILENT_S", 0.0)

    def moved() -> Path:
        (journal,) = journals_folder().iterdir()
        record = json.loads((journal / "trial.json").read_text())
        # Each host has numbers of its own for file systems.
        for state in (*record["states"].values(), *(each[0] for each in record["copied"].values())):
            state[1][0] += 1
        (journal / "trial.json").write_text(json.dumps(record | {"host": "elsewhere"}))
        return journal

    return moved


@pytest.mark.parametrize("same", [True, False])
def test_a_trial_of_another_host_is_reverted_where_its_files_are_shared(
    folder: Path, same: bool, elsewhere: Callable[[], Path]
) -> None:
    """As after a batch job was started again elsewhere."""
    (folder / "data").write_text("unchanged")
    _lose(folder)
    journal = elsewhere()
    if not same:
        (folder / "copy").write_text("unchanged")
        (folder / "copy").replace(folder / "data")
    said: list[str] = []
    revert_lost_trials(said.append)
    assert (folder / "model.pt").read_bytes() == (b"weights" if same else b"WEIGHTS")
    assert (folder / "data").read_text() == "unchanged"
    assert journal.exists() is not same
    assert any("on elsewhere was killed" in line for line in said) is not same


def test_a_shared_script_says_nothing_of_a_local_folder(
    folder: Path, tmp_path: Path, elsewhere: Callable[[], Path]
) -> None:
    """Each host has a folder of that name on a disk of its own."""
    script = tmp_path / "home" / "train.py"
    script.parent.mkdir()
    script.write_text("pass")
    driver = _DRIVER.replace('"train.py"', repr(str(script)))
    subprocess.run([sys.executable, "-c", driver, str(tmp_path / "left")], cwd=folder)
    journal = elsewhere()
    for file in [*folder.iterdir()]:
        file.unlink()
    (folder / "model.pt").write_bytes(b"of this host")
    said: list[str] = []
    revert_lost_trials(said.append)
    assert (folder / "model.pt").read_bytes() == b"of this host" and journal.exists()
    assert not (folder / "log.txt").exists() and any("not reverted here" in line for line in said)


def test_a_driver_on_another_host_that_lives_is_not_reverted(
    folder: Path, elsewhere: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is waited for, since a pod that is started again has another host name."""
    (folder / "data").write_text("unchanged")
    _lose(folder)
    journal, looks = elsewhere(), 0
    monkeypatch.setattr(lost_trials, "_SILENT_S", 120.0)

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            os.utime(journal / "others", (time.time() + 1, time.time() + 1))

    monkeypatch.setattr(lost_trials, "time", SimpleNamespace(sleep=sleep))
    said: list[str] = []
    revert_lost_trials(said.append)
    assert (folder / "model.pt").read_bytes() == b"WEIGHTS" and journal.exists()
    assert looks == 3 and "a driver on elsewhere may still run a trial" in said[0]


def test_a_driver_on_another_host_that_ends_its_trial_meanwhile_has_reverted_it(
    folder: Path, elsewhere: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "data").write_text("unchanged")
    _lose(folder)
    journal = elsewhere()
    monkeypatch.setattr(FileJournal, "silent_s", lambda _: 0.0 if looks < 2 else 600.0)
    monkeypatch.setattr(lost_trials, "_SILENT_S", 120.0)
    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        (journal / "trial.json").unlink(missing_ok=True)

    monkeypatch.setattr(lost_trials, "time", SimpleNamespace(sleep=sleep))
    revert_lost_trials(lambda _: None)
    assert (folder / "model.pt").read_bytes() == b"WEIGHTS", "what the user has written since"


def test_what_was_saved_later_under_the_name_of_a_renamed_file_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "large").write_bytes(bytes(5000))
    driver = _DRIVER.replace("print, keep", "print, copied_bytes=1000, keep").replace(
        'os.remove("link")', 'os.rename("large", "older"); Path("large").write_text("trial")'
    )
    subprocess.run([sys.executable, "-c", driver, str(folder.parent / "left")], cwd=folder)
    _end_trial(folder, monkeypatch)
    (folder / "large").write_text("of a later training")
    revert_lost_trials(lambda _: None)
    assert (folder / "large").read_text() == "of a later training"


def test_a_damaged_journal_is_named_and_kept(folder: Path) -> None:
    _lose(folder)
    (journal,) = journals_folder().iterdir()
    (journal / "trial.json").write_text("{")
    said: list[str] = []
    revert_lost_trials(said.append)
    (line,) = said
    assert str(journal) in line and "then delete it" in line
    assert any(copy.read_bytes() == b"weights" for copy in journal.glob("*.copy"))


class Reached(Exception):
    """A start has come as far as its hosts."""


@pytest.fixture
def reaches_hosts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial was lost, whose changes are reverted where a start looks at its hosts."""
    _lose(folder)

    def check_hosts(_: object) -> None:
        assert (folder / "model.pt").read_bytes() == b"weights"
        raise Reached

    monkeypatch.setattr(flag, "check_hosts", check_hosts)
    monkeypatch.setattr(notebook, "check_hosts", check_hosts)


@pytest.mark.usefixtures("reaches_hosts")
def test_the_flag_puts_them_back_before_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--autosync", "-np", "2", sys.executable, "-c", "pass"]
    with pytest.raises(Reached):
        flag.autosync(parse_words(words), words)
    assert "hvd-autosync: an earlier driver was killed" in capsys.readouterr().err


@pytest.mark.usefixtures("reaches_hosts")
@pytest.mark.parametrize("mode", ["launched", "live"])
def test_a_notebook_puts_them_back_before_anything_starts(
    mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Reached):
        notebook.tune([sys.executable, "-c", "pass"], np=2, mode=mode)
    assert "hvd-autosync: an earlier driver was killed" in capsys.readouterr().err
