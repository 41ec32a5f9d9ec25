"""Errors of the look-up of the best known strategy when the store cannot be used."""

import sys
from contextlib import closing
from pathlib import Path

import pytest

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.optimizer import tuned
from hvd_autosync.runtime.optimizer.tuned import _look_up
from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    ModelProfile,
    ParameterProfile,
    Resources,
    SearchSpace,
    Strategy,
    Task,
    catalogue_knob,
)
from hvd_autosync.search_space.knobs import integer_knob
from hvd_autosync.search_space.strategy_file import read_strategy
from hvd_autosync.traces import StudyStatus, TraceStore

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


def test_a_winner_with_a_knob_of_an_extension_is_found(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that prints while it is loaded."""
    file = tmp_path / "mine.py"
    file.write_text(
        "from hvd_autosync.extensions import add_knob\n"
        "from hvd_autosync.search_space.knob_spec import KnobSpec, Variable\n"
        "from hvd_autosync.search_space.knobs import integer_knob\n"
        "mine = integer_knob('mine', 0, 9, 1, help='Mine.')\n"
        "add_knob(KnobSpec(mine, Variable('HOROVOD_MINE'), 'always'))\n"
        "print('loaded')\n"
    )
    monkeypatch.setenv("HVD_AUTOSYNC_EXTENSIONS", str(file))
    winner = Strategy({"buckets": 3, "mine": 2})
    with closing(TraceStore(store)) as traces:
        study = traces.create_study(job_key="job", command=(), settings={}, versions={})
        model = ModelProfile((ParameterProfile("weight", (2, 2), "float32"),))
        build = HorovodBuild("0.28.1", gloo=True, mpi=False)
        task = Task(model, Resources((Host("a", 2),), "cpu", build))
        mine = integer_knob("mine", 0, 9, 1, help="Mine.")
        space = SearchSpace((catalogue_knob("buckets"), mine))
        traces.describe_task(study.study_id, task, space)
        traces.finish(study.study_id, StudyStatus.FINISHED, {}, winner)
    assert _look_up(QUESTION)["knobs"] == dict(winner)
