"""Notes on a training are written as a whole or not at all, and never end it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.live.notes import has_note, leave_note, read_note
from hvd_autosync.runtime.live.refusal import hand_over
from hvd_autosync.util.variables import STOPPED_VARIABLE, TUNING_ENDED_NOTE

#: An error about a file whose name is no valid text, in another alphabet than a locale may have.
REASON = "no such file: 'Übung \udcff/データ 1'"
READ = "no such file: 'Übung \\udcff/データ 1'"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of notes; its name is odd, too."""
    folder = tmp_path / "t m\udcffp ü"
    folder.mkdir()
    monkeypatch.setenv(STOPPED_VARIABLE, str(folder / "stopped"))
    return folder


def test_a_note_may_say_anything(folder: Path) -> None:
    assert not has_note(TUNING_ENDED_NOTE) and read_note(folder / TUNING_ENDED_NOTE) == ""
    leave_note(TUNING_ENDED_NOTE, REASON)
    assert has_note(TUNING_ENDED_NOTE)
    assert read_note(folder / TUNING_ENDED_NOTE) == READ


def test_a_reason_to_hand_over_may_say_anything(folder: Path) -> None:
    handed = ThreadRanks(2, seed=0).run(lambda: hand_over(str(folder / "refusal"), REASON))
    assert handed == [True] * 2
    assert read_note(folder / "refusal") == READ


def test_no_part_of_a_note_is_left_on_a_full_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look like a whole one: a training that goes on, like one that has handed over."""
    write = Path.write_text

    def write_a_part(path: Path, text: str, *args: Any, **given: Any) -> int:
        write(path, text[:3], *args, **given)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_a_part)
    leave_note(TUNING_ENDED_NOTE, REASON)
    handed = ThreadRanks(2, seed=0).run(lambda: hand_over(str(folder / "refusal"), REASON))
    assert handed == [False] * 2
    assert not has_note(TUNING_ENDED_NOTE) and not has_note("refusal")
