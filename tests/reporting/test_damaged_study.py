"""A damaged study is listed as such, or refused with a message that names it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from hvd_autosync.errors import TraceFormatError
from hvd_autosync.reporting.listing import studies_table
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord


@pytest.mark.parametrize(
    "change",
    [
        {"winner": {"cycle_time_ms": 7.0}},
        {"winner": None},
        {"reason": 5},
        {"default_s": "fast"},
        {"comparisons": None},
        {"comparisons": [1]},
        {"comparisons": [{"strategy": {}}]},
        {"stopped": ...},
    ],
)
def test_a_damaged_conclusion(finished: StudyRecord, change: dict[str, Any]) -> None:
    assert finished.outcome is not None and Conclusion.of(finished) is not None
    outcome = {k: v for k, v in {**finished.outcome, **change}.items() if v is not ...}
    damaged = replace(finished, outcome=outcome)
    with pytest.raises(TraceFormatError, match=finished.study_id) as caught:
        Conclusion.of(damaged)
    assert "traces delete" in caught.value.hint
    table = studies_table([damaged])
    assert list(table.columns[3].cells) == ["damaged"]


@pytest.mark.parametrize("value", ["2026", None, math.inf, [1]])
def test_a_comparison_with_an_impossible_strategy(finished: StudyRecord, value: Any) -> None:
    assert finished.outcome is not None
    (first,) = finished.outcome["comparisons"]
    outcome = finished.outcome | {"comparisons": [{**first, "strategy": {"cycle_time_ms": value}}]}
    with pytest.raises(TraceFormatError, match="damaged") as caught:
        Conclusion.of(replace(finished, outcome=outcome))
    assert "traces delete" in caught.value.hint


def test_a_comparison_with_a_choice_that_an_extension_may_have_added(finished: StudyRecord) -> None:
    assert finished.outcome is not None
    (first,) = finished.outcome["comparisons"]
    outcome = finished.outcome | {"comparisons": [{**first, "strategy": {"large_codec": "mine"}}]}
    with pytest.raises(TraceFormatError, match="'mine'") as caught:
        Conclusion.of(replace(finished, outcome=outcome))
    assert "HVD_AUTOSYNC_EXTENSIONS" in caught.value.hint
