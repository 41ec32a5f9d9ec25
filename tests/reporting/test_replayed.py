"""What is said of a study that is replayed."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_autosync.reporting.replayed import missing_sources
from hvd_autosync.search_space import Strategy
from hvd_autosync.study.related_studies import RELATED
from hvd_autosync.traces import StudyRecord, TrialRecord


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["5"], "from 1 study that is not in this store (5)"),
        (["5", "6"], "from 2 studies that are not in this store (5, 6)"),
    ],
)
def test_studies_that_a_replay_lacks_are_counted_and_named(
    names: list[str], said: str, store: Any, finished: StudyRecord
) -> None:
    info = {RELATED: [[name, 0.5] for name in [*names, finished.study_id]]}
    trial = TrialRecord("study", 0, "sobol", Strategy(), "", "", info, None)
    (line,) = missing_sources(store, [trial])
    assert said in line


def test_nothing_is_said_where_all_are_there(store: Any, finished: StudyRecord) -> None:
    info = {RELATED: [[finished.study_id, 0.5]]}
    trial = TrialRecord("study", 0, "sobol", Strategy(), "", "", info, None)
    assert list(missing_sources(store, [trial])) == []
