"""Transfer through the store: which studies are learned from, and what of them."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvd_autosync.cost import CostModel
from hvd_autosync.learner import Observation, Problem, Suggestion
from hvd_autosync.search_space import (
    Link,
    Links,
    ModelProfile,
    Resources,
    SearchSpace,
    Strategy,
    Task,
    TrialResult,
    TrialStatus,
    build_space,
)
from hvd_autosync.study.related_studies import load_sources, related_studies
from hvd_autosync.study.source_fits import with_known_fits
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.traces import StudyStatus, TraceStore


@pytest.fixture
def task(model: ModelProfile, slow_network: Resources) -> Task:
    return Task(model, slow_network)


def slower(task: Task, factor: float) -> Task:
    """The task on a network that is slower by a factor."""
    links = task.resources.links
    assert links.overall is not None and links.across is not None
    overall, across = (
        Link(link.ranks, link.latency_s, link.bandwidth_bytes_per_s / factor)
        for link in (links.overall, links.across)
    )
    return replace(
        task, resources=replace(task.resources, links=Links(overall, links.within, across))
    )


def space_of(task: Task) -> SearchSpace:
    return build_space(task.model, task.resources, held={"controller": "gloo"})


def tuned(store: TraceStore, task: Task, trials: int = 6, transfer: bool = True) -> AskTellStudy:
    """A study of ``task``: the cost model's step times, more for long cycles, and some noise."""
    settings = StudySettings(trials=trials, transfer=transfer)
    study = AskTellStudy.create(space_of(task), store=store, settings=settings, task=task)
    rng = np.random.default_rng(0)
    cost = CostModel(task.model, task.resources)
    while (trial := study.ask()) is not None:
        step_s = float(cost.predict([trial.strategy])[0])
        step_s *= float(trial.strategy.get("cycle_time_ms", 1.0)) ** 0.2
        study.tell(trial, [step_s * math.exp(rng.normal(0, 0.01)) for _ in range(20)])
    return study


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    return TraceStore(tmp_path / "traces.db")


def test_the_most_similar_come_first_and_one_per_task(store: TraceStore, task: Task) -> None:
    networks = [1.0, 10.0, 10.0, 1e-3]  # the third is the second again, the last is not alike
    studies = [tuned(store, slower(task, factor), 2, transfer=False) for factor in networks]
    AskTellStudy.create(space_of(task), store=store, task=task)  # still running
    found = related_studies(store, task)
    assert [study_id for study_id, _ in found] == [studies[0].study_id, studies[2].study_id]
    assert found[0][1] == 1.0 > found[1][1]


def test_the_study_that_judged_a_training_comes_first(store: TraceStore, task: Task) -> None:
    """Though another of its task and space is larger, and it has few trials itself."""
    judged, larger, other = (
        tuned(store, each, trials, transfer=False).study_id
        for each, trials in ((task, 1), (task, 4), (slower(task, 10.0), 3))
    )
    found = [study_id for study_id, _ in related_studies(store, task, judged)]
    assert found == [judged, larger, other]
    assert judged not in dict(related_studies(store, task))


def test_each_space_of_a_task_has_a_study_to_learn_from(store: TraceStore, task: Task) -> None:
    """Two per task at most, those with most trials, so that other tasks are used too."""
    exact = tuned(store, task, 3, transfer=False)
    others = []
    for allow, trials in ((("codec",), 3), (("order",), 2)):
        space = build_space(task.model, task.resources, allow=allow)
        settings = StudySettings(trials=trials, transfer=False)
        other = AskTellStudy.create(space, store=store, task=task, settings=settings)
        while (trial := other.ask()) is not None:
            other.tell(trial, [0.1] * 20)
        others.append(other.study_id)
    found = {study_id for study_id, _ in related_studies(store, task)}
    assert len(found) == 2 and found < {exact.study_id, *others}
    elsewhere = tuned(store, slower(task, 10.0), 3, transfer=False)
    assert elsewhere.study_id in dict(related_studies(store, task))


def test_a_study_starts_from_what_related_ones_found(store: TraceStore, task: Task) -> None:
    first = tuned(store, slower(task, 2.0), 8)
    second = AskTellStudy.create(space_of(task), store=store, task=task)
    default = second.ask()
    assert default is not None and default.kind == "default"
    second.tell(default, [1.0] * 20)
    trial = second.ask()
    assert trial is not None and trial.kind == "model"
    info = second.history[-1].info
    assert [entry[0] for entry in info["related"]] == [first.study_id]
    assert info["priors"] == ["cost model", first.study_id]
    sources = second.problem.sources
    assert [source.study_id for source in sources] == [first.study_id]
    assert len(sources[0].observations) == len(first.history)


class OwnLearner:
    """A learner of a user's; it looks at no source."""

    name = "own"

    def suggest(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        pending: Sequence[Strategy] = (),
        *,
        seed: int,
    ) -> Suggestion:
        return Suggestion(problem.space.default.replacing(cycle_time_ms=2.0 + seed), "model")


@pytest.mark.parametrize("learner", [None, OwnLearner()])
def test_only_the_learner_that_fits_sources_keeps_their_fits(
    store: TraceStore, task: Task, learner: OwnLearner | None
) -> None:
    """For another one they would be fitted only to be kept."""
    tuned(store, slower(task, 2.0), 8)
    study = AskTellStudy.create(space_of(task), store=store, task=task, learner=learner)
    default = study.ask()
    assert default is not None
    study.tell(default, [1.0] * 20)
    trial = study.ask()
    assert trial is not None and trial.kind == "model"
    (source,) = with_known_fits(store, study.problem).sources
    assert bool(source.hyperparameters) is (learner is None)


def test_without_transfer_nothing_is_related(store: TraceStore, task: Task) -> None:
    tuned(store, slower(task, 2.0), 4)
    alone = tuned(store, task, 4, transfer=False)
    assert alone.problem.sources == ()
    assert all(trial.info.get("related", []) == [] for trial in alone.history)


def test_what_was_decided_stays_when_the_store_grows(store: TraceStore, task: Task) -> None:
    """A study that is taken up again learns from the same studies as before."""
    first = tuned(store, slower(task, 2.0), 4)
    second = AskTellStudy.create(space_of(task), store=store, task=task)
    for _ in range(2):
        trial = second.ask()
        assert trial is not None
        second.tell(trial, [1.0] * 20)
    tuned(store, slower(task, 1.5), 4)
    again = AskTellStudy(store, store.study(second.study_id))
    assert [source.study_id for source in again.problem.sources] == [first.study_id]
    one, other = second.ask(), again.ask()
    assert one is not None and other is not None and one.strategy == other.strategy


def test_a_study_that_took_its_winner_from_another_does_not_hide_it(
    store: TraceStore, task: Task
) -> None:
    rich = tuned(store, task, 5)
    poor = AskTellStudy.create(space_of(task), store=store, task=task)
    default = poor.ask()
    assert default is not None
    poor.tell(default, [0.1] * 20)
    poor.finish(Conclusion(poor.space.default, "another study found it", "", 0.1))
    assert [study_id for study_id, _ in related_studies(store, task)] == [rich.study_id]


def test_impossible_and_damaged_tasks_are_left_out(
    store: TraceStore, task: Task, tmp_path: Path
) -> None:
    known = tuned(store, task, 4)
    endless = replace(task, model=replace(task.model, forward_s=1e308, backward_s=1e308))
    strange = tuned(store, slower(task, 10.0), 4)
    for text in (json.dumps(endless.to_json()), "{damaged", '{"model": 1}'):
        with sqlite3.connect(tmp_path / "traces.db") as connection:
            connection.execute(
                "UPDATE hvd_autosync_studies SET task = ? WHERE study_id = ?",
                (text, strange.study_id),
            )
        assert known.study_id in dict(related_studies(store, task))


def test_what_is_gone_or_nonsense_is_left_out(store: TraceStore, task: Task) -> None:
    known = tuned(store, task, 4)
    failed = AskTellStudy.create(space_of(task), store=store, task=task)
    trial = failed.ask()
    assert trial is not None
    failed.tell(trial, TrialResult(TrialStatus.CRASHED))
    store.finish(failed.study_id, StudyStatus.FAILED, {"reason": "it crashed"}, None)
    assert [study_id for study_id, _ in related_studies(store, task)] == [known.study_id]
    strange = [["no such study", 0.5], [], ["x"], [1, "much"], *[[known.study_id, 7.0]] * 2]
    (source,) = load_sources(store, strange)
    assert (source.study_id, source.similarity) == (known.study_id, 1.0)
