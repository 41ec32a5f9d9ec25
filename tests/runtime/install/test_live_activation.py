"""Whether a training that begins is tuned in its own steps."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime import current
from hvd_autosync.runtime.install.live_activation import activate_live
from hvd_autosync.search_space.horovod_settings import AUTOTUNE_VARIABLE, RANK_VARIABLES
from hvd_autosync.util.variables import LIVE_VARIABLE, STOPPED_VARIABLE, TUNING_ENDED_NOTE


def test_who_waits_for_the_tuning_learns_that_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = current.live
    monkeypatch.setenv(LIVE_VARIABLE, "1")
    monkeypatch.setenv(AUTOTUNE_VARIABLE, "1")
    monkeypatch.setenv(RANK_VARIABLES[0], "0")
    monkeypatch.setenv(STOPPED_VARIABLE, str(tmp_path / "stopped"))
    activate_live("")
    assert current.live is before
    said = (tmp_path / TUNING_ENDED_NOTE).read_text()
    assert said.startswith(f"this training is not tuned: {AUTOTUNE_VARIABLE} is set")
    assert said in capsys.readouterr().err
