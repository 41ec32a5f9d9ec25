"""Which study a worker is answered by when it asks for the best strategy for its model."""

import io
import json
import sqlite3
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_autosync.engine.best_known import best_known, main
from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    ModelProfile,
    ParameterProfile,
    RankReport,
    Resources,
    SearchSpace,
    Strategy,
    Task,
    TrialResult,
    TrialStatus,
    catalogue_knob,
)
from hvd_autosync.search_space.knobs import CategoricalKnob, Knob, Value
from hvd_autosync.traces import Fallback, StudyStatus, TraceStore

MODEL = ModelProfile((ParameterProfile("weight", (4, 4), "float32"),))
PARAMETERS = [["weight", [4, 4], "float32"]]


def tuned(
    store: TraceStore,
    buckets: int,
    *,
    device: str = "cpu",
    slots: int = 2,
    lossy: Knob | None = None,
    trials: int = 1,
    **knobs: Value,
) -> str:
    """A finished study of the model, won by that number of buckets, or 0: the default; its id."""
    study = store.create_study(job_key="job", command=(), settings={}, versions={})
    build = HorovodBuild("0.28.1", gloo=True, mpi=False)
    task = Task(MODEL, Resources((Host("a", slots),), device, build))
    space = SearchSpace((catalogue_knob("buckets"), *([] if lossy is None else [lossy])))
    store.describe_task(study.study_id, task, space)
    measured = TrialResult(TrialStatus.COMPLETED, ranks=(RankReport(0, "a", (0.1,) * 20),))
    for number in range(trials):
        strategy = Strategy({"buckets": number + 1}) if number else space.default
        trial = store.ask(study.study_id, strategy, "sobol" if number else "default", {})
        store.tell(study.study_id, trial, measured)
    winner = Strategy({"buckets": buckets, **knobs}) if buckets else space.default
    store.finish(study.study_id, StudyStatus.FINISHED, {}, winner)
    return study.study_id


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    return TraceStore(tmp_path / "traces.db")


def test_the_newest_of_the_same_layout_on_the_same_device_answers(store: TraceStore) -> None:
    for buckets in (2, 3):
        tuned(store, buckets)
    tuned(store, 4, device="NVIDIA H100")
    tuned(store, 5, slots=4)
    found = best_known(store, PARAMETERS, [2], "cpu")
    assert found is not None and found["knobs"] == {"buckets": 3}
    assert best_known(store, PARAMETERS, [2, 2], "cpu") is None


def test_a_study_that_has_compared_nothing_hides_no_other(store: TraceStore) -> None:
    tuned(store, 2)
    tuned(store, 0)
    found = best_known(store, PARAMETERS, [2], "cpu")
    assert found is not None and found["knobs"] == {"buckets": 2}


def test_a_study_that_has_tried_others_and_kept_the_default_answers(store: TraceStore) -> None:
    tuned(store, 2)
    tuned(store, 0, trials=4)
    found = best_known(store, PARAMETERS, [2], "cpu")
    assert found is not None and found["knobs"] == {"buckets": 0}


def test_a_winner_whose_steps_became_slower_is_not_taken(store: TraceStore) -> None:
    tuned(store, 2)
    store.keep_drift(tuned(store, 3), ["steps have become slower: 9 ms"])
    found = best_known(store, PARAMETERS, [2], "cpu")
    assert found is not None and found["knobs"] == {"buckets": 2}


def test_a_winner_that_the_loss_guard_has_ended_is_not_taken(store: TraceStore) -> None:
    """Also where the study of the fallback is another one."""
    tuned(store, 2)
    for _ in range(2):
        last = tuned(store, 3)
    store.keep_fallback(last, Fallback(Strategy({"buckets": 3}), 64, "it has risen"))
    found = best_known(store, PARAMETERS, [2], "cpu")
    assert found is not None and found["knobs"] == {"buckets": 2}


@pytest.mark.parametrize("default", [1, 4])
def test_a_lossy_winner_is_not_taken(
    store: TraceStore, capsys: pytest.CaptureFixture[str], default: int
) -> None:
    """It was admitted by another training's losses, also if it is the default of a live stage."""
    own = replace(catalogue_knob("local_steps"), default=default)
    study_id = tuned(store, 3, lossy=own, local_steps=4)
    assert best_known(store, PARAMETERS, [2], "cpu") is None
    assert f"the winner of study {study_id} is not used: it is lossy" in capsys.readouterr().err
    tuned(store, 2, lossy=own, local_steps=1)
    tuned(store, 3, lossy=own, local_steps=4)
    found = best_known(store, PARAMETERS, [2], "cpu")
    assert found is not None and found["knobs"] == {"buckets": 2, "local_steps": 1}
    assert not capsys.readouterr().err


def test_a_winner_of_an_extension_that_is_not_loaded_is_not_taken(
    store: TraceStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranks could not train under it."""
    tuned(store, 2)
    knob = catalogue_knob("rest_exchange")
    assert isinstance(knob, CategoricalKnob)
    own = replace(knob, choices=(*knob.choices, "gather"))
    study_id = tuned(store, 3, lossy=own, rest_exchange="gather")
    found = best_known(store, PARAMETERS, [2], "cpu")
    assert found is not None and found["knobs"] == {"buckets": 2}
    assert f"the winner of study {study_id}: knob rest_exchange" in capsys.readouterr().err


def test_a_damaged_study_is_left_out(
    store: TraceStore, add_damaged: Callable[[TraceStore], str]
) -> None:
    tuned(store, 2)
    damaged = add_damaged(store)
    with sqlite3.connect(store.name) as connection:
        ended = "UPDATE hvd_autosync_studies SET status = 'finished' WHERE study_id = ?"
        connection.execute(ended, [damaged])
    connection.close()
    found = best_known(store, PARAMETERS, [2], "cpu")
    assert found is not None and found["knobs"] == {"buckets": 2}


def test_another_model_is_not_answered_for(store: TraceStore) -> None:
    tuned(store, 2)
    assert best_known(store, [["weight", [4, 5], "float32"]], [2], "cpu") is None


def test_a_store_that_does_not_exist_has_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"parameters": PARAMETERS, "slots": [2], "device": "cpu"}
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", str(tmp_path / "missing.db"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
    main(sys.stdout)
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
