"""Which finished study of the same task ends a new one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hvd_autosync.engine.compatibility import why_again
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.reuse import of_same_task
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
from hvd_autosync.study.confirm import Comparison
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore

MODEL = ModelProfile((ParameterProfile("weight", (4, 4), "float32"),))
TASK = Task(MODEL, Resources((Host("a", 2),), "cpu", HorovodBuild("0.28.1", True, False)))
SPACE = SearchSpace((catalogue_knob("buckets"),))
WINNER = Strategy({"buckets": 2})
FOUND = Conclusion(
    WINNER, "it won", "all 20 trials were used", 0.1, (Comparison(WINNER, 2.0, 1.9, 2.1, 3),)
)
KEPT = Conclusion(Strategy(), "nothing was faster", "the only trial was used", 0.1)


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    return TraceStore(tmp_path / "traces.db")


def study(
    store: TraceStore,
    conclusion: Conclusion | None = None,
    trials: int = 1,
    space: SearchSpace = SPACE,
    **settings: float,
) -> StudyRecord:
    """A study of the task; ``None``: a running one."""
    made = store.create_study(job_key="job", command=(), settings=settings, versions={})
    store.describe_task(made.study_id, TASK, space)
    measured = TrialResult(TrialStatus.COMPLETED, ranks=(RankReport(0, "a", (0.1,) * 20),))
    for number in range(trials):
        kind = "sobol" if number else "default"
        store.tell(made.study_id, store.ask(made.study_id, Strategy(), kind, {}), measured)
    if conclusion is not None:
        values = conclusion.to_json()
        store.finish(made.study_id, StudyStatus.FINISHED, values, conclusion.winner)
    return store.study(made.study_id)


@pytest.mark.parametrize(("trials", "hidden"), [(1, False), (3, False), (4, True)])
def test_a_study_that_has_tried_next_to_nothing_hides_no_winner(
    trials: int, hidden: bool, store: TraceStore
) -> None:
    """As one under ``--autosync-trials 1``, or whose minutes were over at once."""
    first = study(store, FOUND, trials=20)
    second = study(store, KEPT, trials=trials)
    found = of_same_task(store, study(store), 0.1, print)
    assert found is not None
    assert found.source == (second if hidden else first).study_id
    assert found.winner == (Strategy() if hidden else WINNER)


def test_a_study_that_has_tried_next_to_nothing_ends_no_other(store: TraceStore) -> None:
    study(store, KEPT)
    assert of_same_task(store, study(store), 0.1, print) is None


@pytest.mark.parametrize(("hours", "taken"), [(0.1, False), (20.0, True)])
def test_a_default_that_was_kept_for_a_shorter_training_says_nothing(
    store: TraceStore, hours: float, taken: bool
) -> None:
    """Nothing pays in so few hours; a longer training may gain much."""
    kept = study(store, KEPT, trials=4, expected_hours=hours)
    found = of_same_task(store, study(store, expected_hours=20.0), 0.1, print)
    assert (found is not None) is taken
    again = why_again(kept, kept, Options(expected_hours=20.0))
    assert again == ("" if taken else "it kept the default for a training of fewer than 20 hours")
    assert why_again(kept, kept, Options(expected_hours=hours)) == ""
    slower = (Comparison(WINNER, 0.9, 0.8, 1.0, 3),)
    compared = study(store, replace(KEPT, comparisons=slower), expected_hours=hours)
    assert why_again(compared, compared, Options(expected_hours=20.0)) == ""


def test_a_winner_that_a_later_study_did_not_find_again_is_not_taken(store: TraceStore) -> None:
    """Also where that study was for a shorter training, as far as it has explored."""
    study(store, FOUND, trials=20)
    study(store, KEPT, trials=4, expected_hours=1.0)
    assert of_same_task(store, study(store, expected_hours=20.0), 0.1, print) is None


def test_more_hours_change_nothing_where_no_knob_can_matter(store: TraceStore) -> None:
    kept = study(store, KEPT, space=SearchSpace(()), expected_hours=1.0)
    assert why_again(kept, kept, Options(expected_hours=20.0)) == ""


@pytest.mark.parametrize(("speedup", "rounds", "taken"), [(1.9, 2, 0), (0.8, 2, 1), (1.9, 3, 1)])
def test_a_confirmation_that_has_hardly_begun_says_nothing(
    store: TraceStore, speedup: float, rounds: int, taken: bool
) -> None:
    """The minutes may have ended in its first rounds; a slower candidate is not measured on."""
    compared = (Comparison(WINNER, speedup, 0.5, 3.0, rounds),)
    study(store, replace(KEPT, comparisons=compared), trials=20)
    assert (of_same_task(store, study(store), 0.1, print) is not None) is bool(taken)


def test_a_default_that_is_not_the_jobs_own_is_no_find(store: TraceStore) -> None:
    """A space file may exclude the job as it is, as by a fixed fusion threshold."""
    knobs = (catalogue_knob("buckets"), catalogue_knob("cycle_time_ms"))
    space = SearchSpace(knobs, holds_job=False)
    first = study(store, replace(FOUND, winner=space.decode([1.0, 0.5])), trials=20, space=space)
    study(store, replace(KEPT, winner=space.default), trials=2, space=space)
    found = of_same_task(store, study(store, space=space), 0.1, print)
    assert found is not None and found.source == first.study_id


def test_what_was_taken_over_is_taken_over_again(store: TraceStore) -> None:
    first = study(store, FOUND, trials=20)
    taken = of_same_task(store, study(store), 0.1, print)
    assert taken is not None
    study(store, taken)
    store.delete(first.study_id)
    again = of_same_task(store, study(store), 0.1, print)
    assert again is not None and (again.winner, again.source) == (WINNER, first.study_id)
