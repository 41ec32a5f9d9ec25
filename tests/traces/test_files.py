"""Files that are written as a whole or not at all."""

from __future__ import annotations

import os
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
