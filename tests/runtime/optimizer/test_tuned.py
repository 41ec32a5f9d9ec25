"""Errors of the look-up of the best known strategy when the store cannot be used."""

import sys
from pathlib import Path

import pytest

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.optimizer import tuned
from hvd_autosync.runtime.optimizer.tuned import _look_up
from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.strategy_file import read_strategy
from hvd_autosync.traces import TraceStore

QUESTION = {"parameters": [["weight", [2, 2], "float32"]], "slots": [2], "device": "cpu"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "traces.db"
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", str(path))
    return path


def test_a_store_that_cannot_be_used_is_named_with_what_to_do(
    store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store.write_text("this is no database, but it is long enough to be taken for one" * 99)
    with pytest.raises(ConfigurationError, match=f"{store} .*not a database") as caught:
        _look_up(QUESTION)
    assert "another store" in caught.value.hint
    assert "Traceback" not in capfd.readouterr().err


def test_nothing_known_is_no_error(store: Path, capfd: pytest.CaptureFixture[str]) -> None:
    TraceStore(store).close()
    assert read_strategy(_look_up(QUESTION)) == (Strategy(), {})
    assert "no strategy is known" in capfd.readouterr().err


def test_what_is_no_answer_is_an_error_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a sitecustomize module that prints."""
    monkeypatch.setattr(tuned, "_LOOK_UP", [sys.executable, "-c", "print('welcome')"])
    with pytest.raises(ConfigurationError, match="could not be looked up"):
        _look_up(QUESTION)
