from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_autosync.errors import StoreError, TraceFormatError
from hvd_autosync.search_space import Strategy, horovod_settings
from hvd_autosync.traces import (
    StudyStatus,
    TraceStore,
    export_study,
    import_autotune_log,
    import_studies,
    trials_frame,
)

_HEADER = (
    "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
    "tensor_fusion_threshold,score\n"
)
_OLDER_HEADER = _HEADER.replace("torus_allreduce,", "")
# As Horovod 0.28.1 prints it, with its blank before the fourth column.
_SAMPLES = ["0,0,0, 1,5,4,424.129\n", "0,0,0, 1,50,32,491.156\n", "0,1,0, 0,9.45382,8.00599,482\n"]


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "autotune.csv"
    path.write_text(text)
    return path


def test_samples_become_trials_with_scores_and_without_times(
    store: TraceStore, tmp_path: Path
) -> None:
    path = _write(tmp_path, _HEADER + "".join(_SAMPLES))
    os.utime(path, (1_700_000_000, 1_700_000_000))
    study = store.study(import_autotune_log(store, path))
    assert study.status is StudyStatus.FINISHED
    assert study.created_at == "2023-11-14T22:13:20.000000+00:00"
    assert "microsecond" in study.settings["score"]
    trials = store.trials(study.study_id)
    assert [t.info["score_bytes_per_us"] for t in trials] == [424.129, 491.156, 482.0]
    assert [t.info["line"] for t in trials] == [2, 3, 4]
    assert all(t.result is None and t.kind == "horovod-autotune" for t in trials)
    assert trials[2].strategy == Strategy(
        {
            "hierarchical_allreduce": False,
            "hierarchical_allgather": True,
            "torus_allreduce": False,
            "cache_capacity": 0,
            "cycle_time_ms": 9.45382,
            "fusion_threshold_bytes": int(8.00599 * 1024 * 1024),
        }
    )


def test_the_highest_score_wins(store: TraceStore, tmp_path: Path) -> None:
    path = _write(tmp_path, _HEADER + "".join(_SAMPLES))
    study = store.study(import_autotune_log(store, path))
    assert study.outcome == {
        "best_trial": 1,
        "best_score_bytes_per_us": 491.156,
        "horovod_ended_its_search": False,
    }
    assert study.winner == store.trials(study.study_id)[1].strategy
    assert study.winner["fusion_threshold_bytes"] == 32 << 20
    assert ("HOROVOD_CYCLE_TIME", "50.0") in horovod_settings(study.winner).environment


def test_the_repeated_best_row_at_the_end_is_not_a_trial(store: TraceStore, tmp_path: Path) -> None:
    path = _write(tmp_path, _HEADER + "".join([*_SAMPLES, _SAMPLES[1]]))
    study = store.study(import_autotune_log(store, path))
    assert len(store.trials(study.study_id)) == 3
    assert study.outcome is not None and study.outcome["horovod_ended_its_search"] is True
    assert study.outcome["best_trial"] == 1


def test_a_log_without_torus_column(store: TraceStore, tmp_path: Path) -> None:
    path = _write(tmp_path, _OLDER_HEADER + "0,0,0,14.5041,37.2728,585.899\n")
    (trial,) = store.trials(import_autotune_log(store, path))
    assert "torus_allreduce" not in trial.strategy
    assert trial.strategy["cache_capacity"] == 0


def test_the_same_log_is_imported_once(store: TraceStore, tmp_path: Path) -> None:
    path = _write(tmp_path, _HEADER + _SAMPLES[0])
    study_id = import_autotune_log(store, path)
    os.utime(path, (0, 0))
    assert import_autotune_log(store, path) == study_id
    assert len(store.studies()) == 1


def test_the_store_may_have_a_damaged_study(
    store: TraceStore, tmp_path: Path, add_damaged: Callable[[TraceStore], str]
) -> None:
    add_damaged(store)
    assert import_autotune_log(store, _write(tmp_path, _HEADER + _SAMPLES[0])) in store.ids()


def test_the_study_can_be_tabled_exported_and_imported(store: TraceStore, tmp_path: Path) -> None:
    study_id = import_autotune_log(store, _write(tmp_path, _HEADER + "".join(_SAMPLES)))
    frame = trials_frame(store, study_id)
    assert frame["cycle_time_ms"].tolist() == [5, 50, 9.45382]
    assert frame["hierarchical_allgather"].tolist() == [False, False, True]
    export_study(store, study_id, tmp_path / "study.jsonl")
    assert import_studies(TraceStore("sqlite://"), tmp_path / "study.jsonl") == [study_id]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "not a log"),
        ("step,loss\n1,2\n", "'step,loss'"),
        (_HEADER.replace("score", "cycle_time_ms") + _SAMPLES[0], "not a log"),
        (_HEADER.replace("torus_allreduce", "something_else") + _SAMPLES[0], "not a log"),
        ("\udc80\udc81\n", "not a log"),
        (_HEADER, "no samples"),
        (_HEADER + _SAMPLES[0] + "0,0,0, 1,5,4\n", "line 3: it has 6 values instead of 7"),
        (_HEADER + "0,0,0, 1,5,4,1,1\n", "line 2: it has 8 values instead of 7"),
        (_HEADER + "0,0,0, 1,five,4,1\n", "line 2: 'five' is not a finite number"),
        (_HEADER + "0,0,0, 1,5,4,nan\n", "line 2: 'nan' is not a finite number"),
        (_HEADER + "0,0,0, 1,5,1e999,1\n", "line 2: '1e999' is not a finite number"),
        (_HEADER + "0,0,0, 1,5,1e308,1\n", "line 2: 1e\\+308 MiB is too large"),
        (_HEADER + "0,0,0, 1,5,1e300,1\n", "line 2: knob fusion_threshold_bytes"),
        (_HEADER + "0,0,0, 2,5,4,1\n", "line 2: cache_enabled is 2"),
        (_HEADER + "0,0,0, 1,500,4,1\n", "line 2: knob cycle_time_ms: 500.0 is out of bounds"),
        (_HEADER + "0,0,0, 1,5,-4,1\n", "line 2: knob fusion_threshold_bytes"),
    ],
)
def test_files_that_are_not_such_a_log(
    store: TraceStore, tmp_path: Path, text: str, what: str
) -> None:
    path = tmp_path / "log.csv"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(TraceFormatError, match=what) as caught:
        import_autotune_log(store, path)
    assert str(path) in caught.value.message and caught.value.hint
    assert store.studies() == []


def test_a_missing_file(store: TraceStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"missing.csv"):
        import_autotune_log(store, tmp_path / "missing.csv")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_special_files_are_refused(tmp_path: Path, kind: str) -> None:
    """A pipe gives its content once, and maybe never; a device may have no end."""
    file = Path("/dev/zero") if kind == "device" else tmp_path / "pipe"
    if kind == "pipe":
        os.mkfifo(file)
    with pytest.raises(StoreError, match=f"{file} is a pipe or another special file") as caught:
        import_autotune_log(TraceStore("sqlite://"), file)
    assert "Write its content to a file" in caught.value.hint
