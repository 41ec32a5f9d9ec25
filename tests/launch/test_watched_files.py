"""What trials change is put back, and nothing that somebody wrote is lost."""

import json
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_autosync.errors import TrialFilesError
from hvd_autosync.launch import originals, watched_files
from hvd_autosync.launch.file_states import file_states
from hvd_autosync.launch.watched_files import WatchedFiles, watched_paths


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a log, a checkpoint, and a folder of others."""
    folder = tmp_path / "run"
    (folder / "old" / "deep").mkdir(parents=True)
    (folder / "log.txt").write_text("first\n")
    (folder / "model.pt").write_bytes(b"weights")
    (folder / "old" / "deep" / "file").write_text("deep")
    (folder / "link").symlink_to("model.pt")
    monkeypatch.chdir(folder)
    return folder


class Watch:
    """A watch with its messages."""

    def __init__(self, *command: str, **settings: object) -> None:
        self.said: list[str] = []
        self.files = WatchedFiles(command, self.said.append, **settings)  # type: ignore[arg-type]


@pytest.fixture
def watch(folder: Path, tmp_path: Path) -> Iterator[Watch]:
    watch = Watch("python", "train.py", keep=str(tmp_path / "left"))
    yield watch
    watch.files.close()


def content(folder: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else path.stat().st_mode
    return found


@pytest.mark.parametrize("below", [".", "old/deep", ".."])
def test_two_jobs_are_not_tuned_in_one_folder(
    below: str, folder: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder / below)
    with pytest.raises(TrialFilesError, match=f"tuned in {folder}; here files of trials cannot"):
        Watch("python", "train.py")
    watch.files.close()
    Watch("python", "train.py").files.close()


def test_a_folder_whose_driver_was_killed_or_that_is_beside_it_is_free(
    folder: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "run2").mkdir()
    monkeypatch.chdir(folder.parent / "run2")
    Watch("python", "train.py").files.close()
    monkeypatch.chdir(folder)
    os.close(watch.files._journal._lock)  # as the kernel does
    watch.files._journal._lock = -1
    Watch("python", "train.py").files.close()


def test_the_same_path_elsewhere_is_another_folder(folder: Path, watch: Watch) -> None:
    """As in two containers that share the data folder."""
    claim = watch.files._journal.folder / "claim"
    path, places = json.loads(claim.read_text())
    claim.write_text(json.dumps([path, [[device + 1, inode] for device, inode in places]]))
    Watch("python", "train.py").files.close()


def test_everything_is_as_it_was_after_each_trial(
    folder: Path, tmp_path: Path, watch: Watch
) -> None:
    before = content(folder)
    for _ in range(2):
        watch.files.begin("trial-0")
        with open("log.txt", "a") as log:
            log.write("more\n")
        about = os.stat("model.pt")
        Path("model.pt").write_bytes(b"WEIGHTS")  # of the same size, in the same file
        os.utime("model.pt", ns=(about.st_atime_ns, about.st_mtime_ns))
        shutil.rmtree("old")
        (folder / "old").mkdir(mode=0o700)
        (folder / "new" / "deep").mkdir(parents=True)
        (folder / "new" / "deep" / "file").write_text("new")
        os.remove("link")
        watch.files.end()
        assert content(folder) == before
    left = tmp_path / "left" / str(folder).lstrip("/")
    assert (left / "log.txt").read_text() == "first\nmore\n"
    assert (left / "model.pt.1").read_bytes() == b"WEIGHTS"
    assert (left / "new" / "deep" / "file").read_text() == "new"
    assert len(watch.said) == 2, "where it is watched, and where to look"


def test_a_log_that_is_replaced_is_put_back_too(folder: Path, watch: Watch) -> None:
    watch.files.begin("trial-0")
    Path("log.new").write_text("other\n")
    os.replace("log.new", "log.txt")
    watch.files.end()
    assert Path("log.txt").read_text() == "first\n" and not Path("log.new").exists()


def test_what_the_user_changes_between_trials_stays(folder: Path, watch: Watch) -> None:
    watch.files.begin("trial-0")
    watch.files.end()
    Path("log.txt").write_text("mine\n")
    Path("mine").write_text("mine")
    watch.files.begin("trial-0")
    Path("log.txt").write_text("the trial's\n")
    watch.files.end()
    assert Path("log.txt").read_text() == "mine\n" and Path("mine").read_text() == "mine"


def test_what_others_still_write_is_left_alone(folder: Path, watch: Watch) -> None:
    watch.files.begin("trial-0")
    with open("output", "w") as file, open("log.txt", "a") as log:
        print("line", file=file, flush=True)
        print("line", file=log, flush=True)
        watch.files.end()
    assert Path("output").read_text() == "line\n" and "line" in Path("log.txt").read_text()


def test_a_new_folder_of_others_stays_with_what_they_write(
    folder: Path, tmp_path: Path, watch: Watch
) -> None:
    """As that of another run, beside what the trial has put there."""
    watch.files.begin("trial-0")
    (folder / "runs" / "of-others").mkdir(parents=True)
    (folder / "runs" / "of-trial").mkdir()
    (folder / "runs" / "of-trial" / "step").write_text("7")
    with open(folder / "runs" / "of-others" / "log", "w") as log:
        print("line", file=log, flush=True)
        watch.files.end()
        (folder / "runs" / "of-others" / "next").touch()
    left = tmp_path / "left" / str(folder).lstrip("/")
    assert (left / "runs" / "of-trial" / "step").read_text() == "7"
    found = {str(path.relative_to(folder)) for path in (folder / "runs").rglob("*")}
    assert found == {"runs/of-others", "runs/of-others/log", "runs/of-others/next"}


@pytest.mark.parametrize("over", ["", "model.pt", "new"])
def test_a_large_file_that_a_trial_has_renamed_has_its_name_again(folder: Path, over: str) -> None:
    """As in a rotation of checkpoints, also over one that is copied."""
    Path("large").write_bytes(bytes(5000))
    if over == "new":
        os.link("large", folder.parent / "second-name")
    before = content(folder)
    watch = Watch("python", "train.py", copied_bytes=1000)
    watch.files.begin("trial-0")
    os.replace("large", over or "previous")
    if over != "new":
        Path("large").write_bytes(b"of the trial")
    os.chmod(over or "previous", 0o400)
    watch.files.end()
    watch.files.close()
    assert content(folder) == before and os.stat("large").st_mode & 0o777 == 0o644
    if len(watch.said) > 1:
        shutil.rmtree(watch.said[-1].partition("moved to ")[2].partition(":")[0])


def test_a_second_name_of_a_large_file_is_its_copy(folder: Path) -> None:
    Path("last.pt").write_bytes(bytes(5000))
    os.link("last.pt", "best.pt")
    before = content(folder)
    watch = Watch("python", "train.py", copied_bytes=1000)
    for _ in range(2):
        watch.files.begin("trial-0")
        os.remove("last.pt")
        Path("last.pt").write_bytes(b"of the trial")
        watch.files.end()
        assert content(folder) == before and os.path.samefile("last.pt", "best.pt")
    watch.files.close()
    shutil.rmtree(watch.said[-1].partition("moved to ")[2].partition(":")[0])


def test_the_only_copy_of_a_file_stays_where_a_trial_has_put_it(
    folder: Path, tmp_path: Path
) -> None:
    """With its folder, and a link in place of that."""
    Path("ckpt").mkdir()
    Path("ckpt/large").write_bytes(bytes(5000))
    watch = Watch("python", "train.py", copied_bytes=1000, keep=str(tmp_path / "left"))
    watch.files.begin("trial-0")
    os.rename("ckpt", "ckpt.old")
    Path("ckpt.new").mkdir()
    Path("ckpt").symlink_to("ckpt.new")
    with pytest.raises(TrialFilesError, match=r"ckpt/large \(is now .*ckpt\.old/large\)"):
        watch.files.end()
    watch.files.close()
    assert Path("ckpt.old/large").read_bytes() == bytes(5000)


def test_large_files_that_have_changed_names_have_their_own_again(folder: Path) -> None:
    """Whatever is restored first."""
    for name in ("last.1.pt", "last.pt", "swapped"):
        Path(name).write_bytes(name.encode() * 500)
    before = content(folder)
    watch = Watch("python", "train.py", copied_bytes=1000)
    watch.files.begin("trial-0")
    os.rename("last.1.pt", "last.2.pt")
    os.rename("last.pt", "last.1.pt")
    os.rename("swapped", "last.pt")
    os.rename("last.2.pt", "swapped")
    watch.files.end()
    watch.files.close()
    assert content(folder) == before


def test_nothing_is_restored_or_moved_behind_a_link(
    folder: Path, tmp_path: Path, watch: Watch
) -> None:
    """There are files of the user, which a trial has not written."""
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "last.pt").write_text("of the user")
    (folder / "out").symlink_to(tmp_path / "scratch")
    watch.files.begin("trial-0")
    os.remove("out")
    Path("out").mkdir()
    Path("out/last.pt").write_text("of the trial")
    shutil.move("old/deep", tmp_path / "moved")
    Path("old/deep").symlink_to(tmp_path / "moved")
    (tmp_path / "moved" / "file").write_text("written there")
    watch.files.end()
    assert (tmp_path / "scratch" / "last.pt").read_text() == "of the user"
    assert (tmp_path / "moved" / "file").read_text() == "written there"
    assert Path("out").is_symlink() and Path("old/deep/file").read_text() == "deep"


def test_a_folder_that_is_moved_there_during_a_trial_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(originals, "AFTERWARDS_S", 0.0)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("mine")
    time.sleep(0.1)
    watch = Watch("python", "train.py", keep=str(tmp_path / "left"))
    watch.files.begin("trial-0")
    os.rename(tmp_path / "data", "data")
    os.rename("old", "older")  # by the trial
    watch.files.end()
    watch.files.close()
    assert Path("data/file").read_text() == "mine"
    assert Path("old/deep/file").read_text() == "deep" and not Path("older").exists()


def test_a_new_folder_goes_with_what_is_never_watched(
    folder: Path, tmp_path: Path, watch: Watch
) -> None:
    """As of a download, which a script leaves out where its folder is there."""
    watch.files.begin("trial-0")
    (folder / "data" / ".cache" / "files").mkdir(parents=True)
    (folder / "data" / ".cache" / "files" / "1").touch()
    (folder / "data" / "images").write_text("of the trial")
    watch.files.end()
    assert not (folder / "data").exists()
    left = tmp_path / "left" / str(folder).lstrip("/")
    assert (left / "data" / ".cache" / "files" / "1").exists()


def test_other_permissions_of_a_large_file_stop_no_training(folder: Path) -> None:
    Path("large").write_bytes(bytes(5000))
    watch = Watch("python", "train.py", copied_bytes=1000)
    for _ in range(2):
        watch.files.begin("trial-0")
        os.chmod("large", 0o400)
        os.link("large", folder.parent / "second-name")
        os.remove(folder.parent / "second-name")
        watch.files.end()
        assert os.stat("large").st_mode & 0o777 == 0o644
    watch.files.close()


def test_what_passes_through_a_pipe_changes_nothing(folder: Path, watch: Watch) -> None:
    os.mkfifo("pipe")
    watch.files.begin("trial-0")
    descriptor = os.open("pipe", os.O_RDWR)
    os.write(descriptor, b"line")
    os.close(descriptor)
    watch.files.end()
    assert Path("pipe").is_fifo()


def test_our_own_files_are_left_alone(folder: Path) -> None:
    watch = Watch("python", "train.py", own=[str(folder / "traces.db")])
    watch.files.begin("trial-0")
    Path("traces.db").write_text("trials")
    watch.files.end()
    watch.files.close()
    assert Path("traces.db").read_text() == "trials" and len(watch.said) == 1


@pytest.mark.parametrize("change", ["write", "remove"])
def test_what_cannot_be_put_back_stops_the_tuning(folder: Path, change: str) -> None:
    Path("large").write_bytes(bytes(5000))
    watch = Watch("python", "train.py", copied_bytes=1000)
    watch.files.begin("trial-0")
    if change == "write":
        with open("large", "r+b") as file:
            file.write(b"x")
    else:
        os.remove("large")
    Path("log.txt").write_text("other\n")
    with pytest.raises(TrialFilesError) as error:
        watch.files.end()
    watch.files.close()
    assert str(folder / "large") in error.value.message and "--autosync" in error.value.hint
    assert Path("log.txt").read_text() == "first\n", "what can be put back is"
    shutil.rmtree(Path(watch.said[-1].split()[7].rstrip(":")))


def test_folders_that_the_command_names_are_watched(folder: Path, tmp_path: Path) -> None:
    for name in ("data", "elsewhere"):
        (tmp_path / name).mkdir()
    named = watched_paths(
        [
            "python",
            "train.py",
            f"--out={tmp_path}/elsewhere/model.pt",
            str(tmp_path / "data"),
            "8",
            "old",
            str(tmp_path),
        ]
    )
    outside = [str(tmp_path / "elsewhere" / "model.pt"), str(tmp_path / "data")]
    assert named == [str(folder), *outside], "not the folder above the working directory"


def test_too_many_files_are_reported(folder: Path) -> None:
    (folder / "many").mkdir()
    for number in range(20):
        (folder / "many" / str(number)).touch()
    states, beyond = file_states([str(folder)], (), 15)
    assert beyond == [str(folder / name) for name in ("many", "model.pt", "old")]
    assert [*states] == [str(folder), str(folder / "link"), str(folder / "log.txt")]
    assert file_states([str(folder)], (), 1000)[1] == []


def test_the_working_directory_comes_before_large_data(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "a data set"
    data.mkdir()
    for number in range(20):
        (data / str(number)).touch()
    states, beyond = file_states([str(folder), str(data)], (), 15)
    assert str(folder / "model.pt") in states and beyond == [str(data)]


@pytest.mark.parametrize("change", ["fewer", "more"])
def test_what_is_not_watched_stays_so_after_a_trial(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Whether or not there is more room for it then."""
    for name in ("checkpoints", "images"):
        (folder / name).mkdir()
        for number in range(10):
            (folder / name / str(number)).write_text(f"{name} {number}")
    monkeypatch.setattr(watched_files, "_MOST_ENTRIES", 22)
    before = content(folder)
    watch = Watch("python", "train.py", keep=str(folder.parent / "left"))
    watch.files.begin("trial-0")
    for number in range(10):
        if change == "fewer":
            (folder / "checkpoints" / str(number)).unlink()
        else:
            (folder / "checkpoints" / f"new {number}").touch()
    (folder / "images" / "1").write_text("not watched")
    watch.files.end()
    watch.files.close()
    assert str(folder / "images") in watch.said[1]
    assert content(folder) == before | {"images/1": b"not watched"}


def test_what_cannot_be_put_back_yet_is_kept(folder: Path, tmp_path: Path) -> None:
    """As on a full disk."""
    (tmp_path / "full").touch()
    watch = Watch("python", "train.py", keep=str(tmp_path / "full" / "left"))
    watch.files.begin("trial-0")
    Path("log.txt").write_text("other")
    Path("new").touch()
    os.remove("model.pt")
    with pytest.raises(TrialFilesError, match=r"log.txt .*copy: .*new, which was not") as error:
        watch.files.end()
    watch.files.close()
    assert Path("model.pt").read_bytes() == b"weights", "what can be put back is"
    copies = Path(str(error.value.hint).partition("kept in ")[2].split(". ")[0])
    assert b"first\n" in [copy.read_bytes() for copy in copies.iterdir()]
    shutil.rmtree(copies)


@pytest.mark.usefixtures("folder")
def test_no_copies_stay_when_copying_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(WatchedFiles, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Watch("python", "train.py")
    assert not [*(tmp_path / "temporary").iterdir()]


def test_caches_and_sockets_do_no_harm(folder: Path, watch: Watch) -> None:
    watch.files.begin("trial-0")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "a.pyc").touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    watch.files.end()
    assert (folder / "__pycache__" / "a.pyc").exists() and not Path("socket").exists()


def test_without_a_folder_for_copies_no_trial_begins(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(TrialFilesError, match=str(folder)) as caught:
        Watch("python", "train.py")
    assert "XDG_DATA_HOME or TMPDIR" in caught.value.hint
