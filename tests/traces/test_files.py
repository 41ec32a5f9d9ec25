"""Files that are written as a whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from hvd_autosync.errors import StoreError
from hvd_autosync.traces.files import write_file


def test_what_is_replaced_keeps_its_permissions_and_links(tmp_path: Path) -> None:
    file, link = tmp_path / "report.html", tmp_path / "link.html"
    write_file(file, b"first", overwrite=False)
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    link.symlink_to(file.name)
    write_file(link, b"second", overwrite=True)
    assert link.is_symlink() and file.read_bytes() == b"second"
    assert file.stat().st_mode & 0o777 == 0o644
    with pytest.raises(StoreError, match="exists already"):
        write_file(link, b"third", overwrite=False)
    assert sorted(tmp_path.iterdir()) == [link, file]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_ctrl_c_leaves_no_hidden_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os if moment == "fsync" else Path, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_file(tmp_path / "trace.jsonl", b"a study", overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_a_pipe_is_written_in_place(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_file(pipe, b"page", overwrite=True)
    assert os.read(reader, 100) == b"page" and pipe.is_fifo()
    os.close(reader)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot write .*: Is a directory"):
        write_file(tmp_path, b"page", overwrite=True)


@pytest.mark.parametrize(
    ("owner", "name", "number"),
    [
        (Path, "replace", errno.EBUSY),
        (tempfile, "mkstemp", errno.EACCES),
        (tempfile, "mkstemp", errno.EROFS),
    ],
)
def test_a_file_that_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, number: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    file, new = tmp_path / "report.html", tmp_path / "new.html"
    file.write_bytes(b"a longer page")
    inode = file.stat().st_ino
    monkeypatch.setattr(owner, name, refuse)
    write_file(file, b"page", overwrite=True)
    assert file.read_bytes() == b"page" and file.stat().st_ino == inode
    with pytest.raises(StoreError, match=r"cannot write .*new.html"):
        write_file(new, b"page", overwrite=True)
    assert list(tmp_path.iterdir()) == [file]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "report.html"
    file.write_bytes(b"a longer page")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left"):
        write_file(file, b"page", overwrite=True)
    assert file.read_bytes() == b"a longer page" and list(tmp_path.iterdir()) == [file]


def test_a_name_may_have_as_many_bytes_as_a_file_system_takes(tmp_path: Path) -> None:
    file = tmp_path / ("n" * 255)
    for data in (b"first", b"second"):
        write_file(file, data, overwrite=True)
        assert file.read_bytes() == data
