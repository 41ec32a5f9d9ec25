"""What earlier studies know of a job that is about to run."""

from __future__ import annotations

import math
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hvd_autosync.engine.training_context import known_model, predicted_losses, training_context
from hvd_autosync.errors import TraceFormatError
from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    ModelProfile,
    ParameterProfile,
    Resources,
    Strategy,
    Task,
    TrialResult,
    TrialStatus,
    catalogue_knob,
)
from hvd_autosync.search_space.space import SearchSpace
from hvd_autosync.search_space.trial import RankReport
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import StudyStatus, TraceStore
from hvd_autosync.util.versions import versions

SPACE = SearchSpace((catalogue_knob("local_steps"),))
SLOW = Strategy({"local_steps": 4})


@pytest.fixture
def location(tmp_path: Path) -> str:
    return str(tmp_path / "traces.db")


def judged(location: str, *, admissible: bool) -> str:
    """A study whose default has a loss of 1, and ``SLOW`` twice that; its id."""
    store = TraceStore(location)
    study = store.create_study(job_key="job", command=(), settings={}, versions={})
    store.describe_task(study.study_id, None, SPACE)
    dice = random.Random(1)
    # The first one was repeated with more steps, the second one's repetition was cut short.
    lengths = [(1, 32), (1, 64), (2, 64), (2, 32)]
    defaults = [(SPACE.default, seed, steps, 1.0) for seed, steps in lengths]
    for strategy, seed, steps, loss in [*defaults, (SLOW, 1, 64, 2.0)]:
        number = store.ask(study.study_id, strategy, "quality", {"seed": seed, "steps": steps})
        losses = tuple(dice.gauss(loss, 0.01) for _ in range(steps))
        result = TrialResult(TrialStatus.COMPLETED, ranks=(RankReport(0, "a", losses=losses),))
        store.tell(study.study_id, number, result)
    outcome = Outcome.ADMITTED if admissible else Outcome.WORSE
    verdict = Verdict(SLOW, outcome, 2.0, 1.0, 0.1, "it was said so")
    conclusion = Conclusion(SPACE.default, "", "", 0.1, verdicts=(verdict,))
    store.finish(study.study_id, StudyStatus.FINISHED, conclusion.to_json(), conclusion.winner)
    return study.study_id


def test_an_unknown_strategy_keeps_up_with_the_default(location: str) -> None:
    judged(location, admissible=True)
    other = Strategy({"local_steps": 8})
    assert predicted_losses(location, {"job"}, other).levels == pytest.approx([1.0] * 2, abs=0.01)


def test_one_that_may_be_used_is_as_it_was_when_it_was_judged(location: str) -> None:
    judged(location, admissible=True)
    assert predicted_losses(location, {"job"}, SLOW).levels == pytest.approx([2.0] * 2, abs=0.01)


def test_one_that_was_refused_keeps_up_with_the_default(location: str) -> None:
    judged(location, admissible=False)
    assert predicted_losses(location, {"job"}, SLOW).levels == pytest.approx([1.0] * 2, abs=0.01)


@pytest.mark.parametrize(("every", "windows"), [(1, 2), (2, 0)])
def test_losses_of_some_steps_predict_no_windows_of_steps(
    location: str, every: int, windows: int
) -> None:
    """A report that comes after the last step is not seen."""
    store = TraceStore(location)
    study_id = store.create_study(job_key="job", command=(), settings={}, versions={}).study_id
    store.describe_task(study_id, None, SPACE)
    for seed in (1, 2):
        dice = random.Random(seed)
        losses = tuple(dice.gauss(1.0, 0.01) for _ in range(64))
        rank = RankReport(0, "a", step_s=(0.1,) * (64 * every + 1), losses=losses)
        number = store.ask(study_id, SPACE.default, "quality", {"seed": seed})
        store.tell(study_id, number, TrialResult(TrialStatus.COMPLETED, ranks=(rank,)))
    assert len(predicted_losses(location, {"job"}, SLOW).levels) == windows


def test_a_strategy_from_outside_of_the_space_is_no_error(location: str) -> None:
    judged(location, admissible=True)
    outside = Strategy({"large_codec": "topk"})
    assert predicted_losses(location, {"job"}, outside).levels == pytest.approx([1.0] * 2, abs=0.01)


def test_a_damaged_study_of_another_job_hides_nothing(
    location: str, add_damaged: Callable[[TraceStore], str]
) -> None:
    study_id, store = judged(location, admissible=True), TraceStore(location)
    task = Task(
        ModelProfile((ParameterProfile("weight", (4, 4), "float32"),)),
        Resources((Host("a", 2),), "cpu", HorovodBuild("0.28.1", gloo=True, mpi=False)),
    )
    running = store.create_study(
        job_key="job", command=("python", "train.py"), settings={}, versions={}
    )
    store.describe_task(running.study_id, task, SPACE)
    add_damaged(store)
    assert predicted_losses(location, {"job"}, SLOW).levels == pytest.approx([2.0] * 2, abs=0.01)
    assert training_context(store.study(study_id), location).loss_prediction.levels
    assert known_model(location, ("python", "train.py")) == task.model


@pytest.mark.parametrize(
    "damage",
    [
        # As of an extension that is not loaded now.
        "hvd_autosync_studies SET outcome = replace(outcome, '\"local_steps\": 4', '\"own\": 4')",
        "hvd_autosync_trials SET result = '{'",
    ],
)
def test_a_damaged_study_of_the_job_hides_no_other(location: str, damage: str) -> None:
    judged(location, admissible=True)
    later, store = judged(location, admissible=True), TraceStore(location)
    with closing(sqlite3.connect(location)) as connection, connection:
        connection.execute(f"UPDATE {damage} WHERE study_id = ?", [later])
    with pytest.raises(TraceFormatError):
        assert store.trials(later) and Conclusion.of(store.study(later))
    assert predicted_losses(location, {"job"}, SLOW).levels == pytest.approx([2.0] * 2, abs=0.01)


def test_one_that_a_study_without_a_conclusion_has_admitted_is_as_it_was_judged(
    location: str,
) -> None:
    """As after Ctrl-C in the confirmation; another study, a newer one, has not judged it."""
    store = TraceStore(location)
    settings = StudySettings(loss_tolerance=0.5, quality_steps=200).to_json()
    for candidate in (SLOW, Strategy({"local_steps": 16})):
        study_id = store.create_study(
            job_key="job", command=(), settings=settings, versions={}
        ).study_id
        store.describe_task(study_id, None, SPACE)
        for seed in range(1, 5):
            for strategy, above in ((SPACE.default, 0.0), (candidate, 0.3)):
                info = {"seed": seed, "steps": 200}
                number = store.ask(study_id, strategy, "quality", info)
                dice = random.Random(seed + 10 * bool(above))
                losses = tuple(
                    1 + above + math.exp(-step / 20) + dice.gauss(0, 0.01) for step in range(200)
                )
                in_round = tuple(step for step in range(200) if above and step % 4)
                rank = RankReport(0, "a", losses=losses, in_round=in_round)
                store.tell(study_id, number, TrialResult(TrialStatus.COMPLETED, ranks=(rank,)))
    levels = predicted_losses(location, {"job"}, SLOW).levels
    assert levels[-1] == pytest.approx(1.3 + 0.4, abs=0.02), "its own losses and the tolerance"
    unknown = predicted_losses(location, {"job"}, Strategy({"local_steps": 8})).levels
    assert unknown[-1] < 1.25, "half of the tolerance is allowed to it"


def test_a_store_that_does_not_exist_knows_nothing(location: str) -> None:
    assert known_model(location, ("python", "train.py")) is None
    assert predicted_losses(location, {"job"}, SLOW).levels == ()
    assert not Path(location).exists(), "it was only read"


def test_other_jobs_know_nothing(location: str) -> None:
    judged(location, admissible=True)
    assert predicted_losses(location, {"another"}, SLOW).levels == ()


@pytest.mark.parametrize("forgotten", [False, True])
def test_who_takes_over_a_winner_takes_over_what_its_losses_were(
    location: str, forgotten: bool
) -> None:
    source, store = judged(location, admissible=True), TraceStore(location)
    study = store.create_study(job_key="edited", command=(), settings={}, versions={})
    conclusion = Conclusion(SLOW, "", "", 0.1, source=source)
    store.finish(study.study_id, StudyStatus.FINISHED, conclusion.to_json(), SLOW)
    if forgotten:
        store.delete(source)
    known = training_context(store.study(study.study_id), location)
    assert known.loss_prediction.levels == pytest.approx([] if forgotten else [2.0] * 2, abs=0.01)


def test_a_step_time_that_other_versions_had_is_not_expected(location: str) -> None:
    store = TraceStore(location)
    for versions_there, expected_s in ((versions(), 0.1), ({**versions(), "torch": "0.1"}, 0.0)):
        study = store.create_study(job_key="job", command=(), settings={}, versions=versions_there)
        conclusion = Conclusion(SPACE.default, "", "", 0.1)
        store.finish(study.study_id, StudyStatus.FINISHED, conclusion.to_json(), SPACE.default)
        known = training_context(store.study(study.study_id), location)
        assert known.expected_step_s == expected_s
