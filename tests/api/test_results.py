"""The best strategy of a study, as its texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_autosync.api import results
from hvd_autosync.api.results import Study
from hvd_autosync.errors import ConfigurationError, StoreError, StudyError
from hvd_autosync.learner import Observation, Problem, Suggestion
from hvd_autosync.search_space import SearchSpace, Strategy, catalogue_knob
from hvd_autosync.study.confirm import Comparison
from hvd_autosync.study.fallbacks import without_excluded
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.traces import Fallback, StudyStatus, export_study, import_autotune_log

SPACE = SearchSpace((catalogue_knob("buckets"),))


@pytest.mark.parametrize(
    ("judged_by", "name"), [("", "default"), ("0123456789ab", "the winner of study 0123456789ab")]
)
def test_the_default_of_a_live_stage_is_named_as_what_it_is(
    tmp_path: Path, judged_by: str, name: str
) -> None:
    settings = StudySettings(mode="live", judged_by=judged_by)
    study = Study.create(SPACE, store=str(tmp_path / "t.db"), settings=settings)
    trial = study.ask()
    assert trial is not None
    study.tell(trial, [0.1] * 20)
    assert str(study.best) == f"{name}: 1.00x, 100 ms per step (not confirmed)"
    study.finish(Conclusion(SPACE.default, "nothing was faster", "all trials were used", 0.1))
    assert str(study.best) == f"{name}: no faster strategy was found"


def test_the_job_is_not_the_best_where_restrictions_exclude_it(tmp_path: Path) -> None:
    space = SearchSpace(SPACE.knobs, holds_job=False)
    study = Study.create(space, store=str(tmp_path / "t.db"))
    trial = study.ask()
    assert trial is not None and not trial.strategy
    study.tell(trial, [0.1] * 20)
    assert math.isnan(study.best.step_s) and math.isnan(study.best.speedup)
    trial = study.ask()
    assert trial is not None and trial.strategy == space.default
    study.tell(trial, [0.05] * 20)
    assert (study.best.step_s, study.best.speedup) == (pytest.approx(0.05), 1.0)


def test_a_study_without_a_space_says_why_it_has_no_best(tmp_path: Path) -> None:
    study = Study.create(store=str(tmp_path / "t.db"))
    with pytest.raises(StudyError, match="no search space yet") as wrong:
        _ = study.best
    assert wrong.value.hint.startswith("Wait until its first trial")
    study.store.finish(study.study_id, StudyStatus.FAILED, {"reason": "rank 1 was killed"}, None)
    with pytest.raises(StudyError, match="because it failed: rank 1 was killed") as wrong:
        _ = study.best
    assert "Wait" not in wrong.value.hint


def test_a_log_of_horovods_own_tuner_has_no_best(tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    log.write_text("cycle_time_ms,tensor_fusion_threshold,score\n1.0,64,103.2\n")
    store = Study.create(store=str(tmp_path / "t.db")).store
    study = Study.load(import_autotune_log(store, log), str(tmp_path / "t.db"))
    with pytest.raises(StudyError, match="a log of Horovod's own tuner") as wrong:
        _ = study.best
    assert "study.trials" in wrong.value.hint


def test_a_winner_that_the_loss_guard_has_ended_does_not_come_back(tmp_path: Path) -> None:
    made = Study.create(SPACE, store=str(tmp_path / "t.db"))
    trial = made.ask()
    assert trial is not None
    made.tell(trial, [0.1] * 20)
    first, second = (SPACE.complete({"buckets": count}) for count in (8, 4))
    comparisons = (Comparison(first, 1.5, 1.4, 1.6, 3), Comparison(second, 1.2, 1.1, 1.3, 3))
    made.finish(Conclusion(first, "it was faster", "all trials were used", 0.1, comparisons))
    made.store.keep_fallback(made.study_id, Fallback(first, 64, "the loss has risen"))
    record = without_excluded(made.store.study(made.study_id), [first])
    found = Study(made.store, record)  # as tune() returns it
    assert found.best.strategy == second and found.best.speedup == 1.2
    assert found.best.confirmed and found.record.winner == second


def test_the_best_of_a_study_that_runs_elsewhere_is_that_of_now(tmp_path: Path) -> None:
    here = Study.create(SPACE, store=str(tmp_path / "t.db"))
    trial = here.ask()
    assert trial is not None
    here.tell(trial, [0.1] * 20)
    there = Study.load(here.study_id, str(tmp_path / "t.db"))
    assert not there.best.confirmed
    here.finish(Conclusion(SPACE.default, "nothing was faster", "all trials were used", 0.1))
    assert there.best.confirmed and there.record.status is StudyStatus.FINISHED


def test_a_knob_of_the_catalogue_may_have_a_wider_range(tmp_path: Path) -> None:
    wide = replace(catalogue_knob("buckets"), high=128)  # type: ignore[call-arg]
    made = Study.create(SearchSpace((wide,)), store=str(tmp_path / "t.db"))
    trial = made.ask()
    assert trial is not None
    made.tell(trial, [0.1] * 20)
    many = Strategy({"buckets": 100})
    won = Comparison(many, 1.2, 1.1, 1.3, 3)
    made.finish(Conclusion(many, "it was faster", "all trials were used", 0.1, (won,)))
    assert made.best.strategy == many and "1.20x" in str(made.best)
    # No reader of a trace file would take it.
    with pytest.raises(StoreError, match=r"cannot be written .* buckets"):
        export_study(made.store, made.study_id, tmp_path / "study.jsonl")
    assert not (tmp_path / "study.jsonl").exists()


class Guess:
    name = "guess"

    def suggest(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        pending: Sequence[Strategy] = (),
        *,
        seed: int,
    ) -> Suggestion:
        return Suggestion(problem.space.complete({"buckets": len(observations)}), "guess")


def test_a_loaded_study_goes_on_with_a_learner_of_ones_own(tmp_path: Path) -> None:
    store = str(tmp_path / "t.db")
    study = Study.create(SPACE, store=store, learner=Guess())
    kinds = []
    for _ in range(4):
        trial = study.ask()
        assert trial is not None
        kinds.append(trial.kind)
        study.tell(trial, [0.1] * 20)
        study = Study.load(study.study_id, store, learner=Guess())
    assert kinds == ["default", "guess", "guess", "guess"]
    with pytest.raises(ConfigurationError, match="for learner"):
        Study.load(study.study_id, store, learner="ours")  # type: ignore[arg-type]


@pytest.mark.parametrize("rested", [True, False])
def test_a_loaded_study_that_has_rested_measures_its_default_again(
    rested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "has_rested", lambda trials: rested)
    store = str(tmp_path / "t.db")
    first = Study.create(SPACE, store=store)
    assert Study.load(first.study_id, store).ask() is not None, "its first trial"
    study = Study.create(SPACE, store=store)
    for loaded in (False, True):
        if loaded:
            study = Study.load(study.study_id, store)
        trial = study.ask()
        assert trial is not None and (trial.kind == "default") is (rested or not loaded)
        study.tell(trial, [0.1] * 20)
    # Also where each trial has a process of its own.
    trial = Study.load(study.study_id, store).ask()
    assert trial is not None and trial.kind != "default"


def test_a_loaded_study_repeats_its_default_again_where_that_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the end of a batch job; a trial is another one than the default only after it."""
    monkeypatch.setattr(results, "has_rested", lambda trials: True)
    study = Study.create(SPACE, store=str(tmp_path / "t.db"))
    trial = study.ask()
    assert trial is not None
    study.tell(trial, [0.1] * 20)
    kinds = []
    for _ in range(3):
        study = Study.load(study.study_id, str(tmp_path / "t.db"))
        trial = study.ask()
        assert trial is not None
        kinds.append(trial.kind)
    assert kinds == ["default"] * 3
