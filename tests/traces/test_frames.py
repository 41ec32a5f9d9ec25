from __future__ import annotations

from collections.abc import Callable

import pandas as pd
import pytest

from hvd_autosync.errors import StoreError
from hvd_autosync.search_space import TrialResult, TrialStatus
from hvd_autosync.traces import StudyRecord, TraceStore, trials_frame


def test_one_row_per_trial_with_measures_in_their_units(
    store: TraceStore, finished: StudyRecord
) -> None:
    frame = trials_frame(store, finished.study_id[:6])
    assert list(frame["number"]) == [0, 1, 2, 3]
    assert list(frame["kind"]) == ["default", "sobol", "model", "confirm"]
    assert list(frame["status"][:3]) == ["completed", "completed", "crashed"]
    assert frame["step_ms"][:2].tolist() == pytest.approx([200, 100])
    assert frame["step_ms_error"][:2].tolist() == pytest.approx([0, 0], abs=1e-9)
    assert frame["steps"][:2].tolist() == [10, 10]
    assert frame["steps_per_s"][:2].tolist() == pytest.approx([5, 10])
    assert frame["speedup"][:2].tolist() == pytest.approx([1, 2])
    assert frame["blocked_share"][:2].tolist() == pytest.approx([0.25, 0.25])
    assert (frame["setup_s"][0], frame["total_s"][0]) == (1.5, 4.0)
    assert frame["reason"][2] == "rank 1 was killed"


def test_what_was_not_measured_is_missing(store: TraceStore, finished: StudyRecord) -> None:
    frame = trials_frame(store, "last")
    measures = ["step_ms", "step_ms_error", "steps", "steps_per_s", "speedup"]
    assert frame.loc[2:, measures].isna().all(axis=None)
    assert frame.loc[3, ["status", "setup_s", "reason"]].isna().all()


def test_one_column_per_knob_that_keeps_its_type(store: TraceStore, finished: StudyRecord) -> None:
    frame = trials_frame(store, "last")
    assert finished.space is not None
    assert list(frame.columns[12:]) == [knob.name for knob in finished.space.knobs]
    assert frame["fusion_threshold_bytes"][1] == 1 << 20
    assert pd.api.types.is_integer_dtype(frame["fusion_threshold_bytes"])
    assert frame["controller"][2] == "mpi"
    assert frame.loc[0, "fusion_threshold_bytes"] is pd.NA
    assert frame["cycle_time_ms"].dtype == "float64"


def test_a_default_without_a_step_time_gives_no_speedup(
    store: TraceStore,
    create: Callable[..., StudyRecord],
    make_result: Callable[..., TrialResult],
    finished: StudyRecord,
) -> None:
    study_id = create().study_id
    fast = store.trials(finished.study_id)[1].strategy
    store.ask(study_id, fast, "default", {})
    store.tell(study_id, 0, make_result(0.1, TrialStatus.HUNG))
    store.tell(study_id, store.ask(study_id, fast, "sobol", {}), make_result(0.1))
    frame = trials_frame(store, study_id)
    assert frame["speedup"].isna().all() and frame["step_ms"][1] == pytest.approx(100)
    assert list(frame.columns[12:]) == ["cycle_time_ms", "fusion_threshold_bytes"]


def test_a_study_without_trials_is_an_empty_table(
    store: TraceStore, create: Callable[..., StudyRecord]
) -> None:
    frame = trials_frame(store, create().study_id)
    assert len(frame) == 0 and "step_ms" in frame.columns


def test_no_such_study(store: TraceStore) -> None:
    with pytest.raises(StoreError, match="'none'"):
        trials_frame(store, "none")
