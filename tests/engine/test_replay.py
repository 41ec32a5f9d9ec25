"""A recorded study again: played, verified, given to other learners, taken as it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from hvd_autosync.commands.cli import app
from hvd_autosync.engine.replay import Check, distance, play, rerun, verify
from hvd_autosync.errors import ConfigurationError, StudyError
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.learner.registry import LEARNERS
from hvd_autosync.search_space import (
    SearchSpace,
    Strategy,
    TrialResult,
    TrialStatus,
    catalogue_knob,
)
from hvd_autosync.search_space.knobs import categorical_knob
from hvd_autosync.search_space.trial import RankReport
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import StudyStatus, TraceStore, export_study

SPACE = SearchSpace(tuple(map(catalogue_knob, ("cycle_time_ms", "buckets", "order"))))
TABLE = Path(__file__).parents[2] / "benchmarks" / "traces" / "vgg-100mbit-codec.jsonl.gz"


@pytest.fixture(scope="module")
def store() -> TraceStore:
    return TraceStore("sqlite://")


@pytest.fixture(scope="module")
def recorded(store: TraceStore) -> AskTellStudy:
    """A study of a simulated job, from its default to its confirmed winner."""
    study = AskTellStudy.create(SPACE, store=store, settings=StudySettings(trials=9, seed=3))
    rng = np.random.default_rng(0)
    while (trial := study.ask()) is not None:
        values = SPACE.complete(trial.strategy)
        away = abs(math.log(float(values["cycle_time_ms"]) / 10))
        mean = 0.1 * (1 + 0.1 * away) * math.exp(-0.01 * float(values["buckets"]))
        study.tell(trial, [float(s) for s in mean * np.exp(rng.normal(0, 0.02, 40))])
    return study


class Watching:
    """Records the calls of a listener."""

    def __init__(self) -> None:
        self.said: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **keywords: self.said.append((name, args))

    def of(self, name: str) -> list[Any]:
        return [args for said, args in self.said if said == name]


def test_playing_shows_every_trial_and_the_end(recorded: AskTellStudy) -> None:
    watching = Watching()
    play(recorded.record, recorded.history, watching, math.inf)  # type: ignore[arg-type]
    results = [args[2] for args in watching.of("on_trial_end")]
    assert results == [trial.result for trial in recorded.history]
    assert watching.of("on_study_end")[0][1] == recorded.conclusion
    assert not watching.of("on_trial_progress")


def test_playing_takes_the_time_that_it_took_over_the_speed(recorded: AskTellStudy) -> None:
    slept: list[float] = []
    watching = Watching()
    play(recorded.record, recorded.history, watching, 4.0, slept.append)  # type: ignore[arg-type]
    ran = [trial.result.total_s for trial in recorded.history if trial.result]
    ran = [s for s in ran if math.isfinite(s)]
    steps_s = sum(sum(trial.result.ranks[0].step_s) for trial in recorded.history if trial.result)
    asked_s = sum(trial.info_number("ask_s") for trial in recorded.history)
    assert sum(slept) == pytest.approx((max(sum(ran), steps_s) + asked_s) / 4, rel=0.05)
    progress: list[TrialProgress] = [args[2] for args in watching.of("on_trial_progress")]
    assert {each.phase for each in progress} >= {"measuring"}


def test_what_is_played_after_a_lost_trial_keeps_its_number(recorded: AskTellStudy) -> None:
    first, *others = recorded.history
    lost = replace(first, number=1, result=None, told_at=None)
    trials = [first, lost, *(replace(t, number=t.number + 1) for t in others)]
    watching = Watching()
    play(recorded.record, trials, watching, math.inf)  # type: ignore[arg-type]
    numbers = [args[1].number for args in watching.of("on_trial_end")]
    assert numbers == [t.number for t in trials if t is not lost]


@pytest.mark.parametrize("edited", [{"ask_s": -1.0}, {"ask_s": 1e300}, {"total_s": 1e300}])
def test_a_trace_that_was_edited_is_played(
    edited: dict[str, float], recorded: AskTellStudy
) -> None:
    slept: list[float] = []
    first, *others = recorded.history
    assert first.result is not None
    if "ask_s" in edited:
        first = replace(first, info={**first.info, **edited})
    else:
        first = replace(first, result=replace(first.result, **edited))
    play(recorded.record, [first, *others], Watching(), 10.0, slept.append)  # type: ignore[arg-type]
    assert slept and min(slept) >= 0 and sum(slept) < 1e6


def test_a_study_that_measured_nothing_is_not_played(store: TraceStore) -> None:
    empty = AskTellStudy.create(SPACE, store=store)
    with pytest.raises(StudyError, match="no trials to replay"):
        play(empty.record, [], Watching(), 1.0)  # type: ignore[arg-type]


def test_the_same_questions_are_asked(store: TraceStore, recorded: AskTellStudy) -> None:
    checks = list(verify(store, recorded.record, recorded.history))
    assert [check.number for check in checks] == [*range(len(recorded.history) + 1)]
    assert all(check.same for check in checks), [check for check in checks if not check.same]
    assert checks[-1].kind == "end" and checks[-1].again == recorded.record.winner


def test_another_seed_asks_others(store: TraceStore, recorded: AskTellStudy) -> None:
    other = replace(recorded.record, settings={**recorded.record.settings, "seed": 4})
    wrong = [c for c in verify(store, other, recorded.history) if not c.same]
    assert wrong and all(check.kind != "default" for check in wrong)
    assert any(check.distance > 0 for check in wrong)


def test_what_was_lost_is_not_known_to_later_questions(
    store: TraceStore, recorded: AskTellStudy
) -> None:
    """A trial in flight when its driver died: it has no result, and was asked for again."""
    trials = recorded.history
    lost = replace(trials[2], result=None, told_at=None)
    again = [replace(t, number=t.number + 1) for t in trials[2:]]
    checks = list(verify(store, recorded.record, [*trials[:2], lost, *again]))
    assert all(check.same for check in checks)


def test_a_default_that_was_lost_is_asked_for_again(
    store: TraceStore, recorded: AskTellStudy
) -> None:
    lost = replace(recorded.history[0], result=None, told_at=None)
    again = [replace(trial, number=trial.number + 1) for trial in recorded.history]
    assert all(check.same for check in verify(store, recorded.record, [lost, *again]))


def test_a_winner_that_was_taken_over_was_not_decided_by_its_own_trials(
    store: TraceStore, recorded: AskTellStudy
) -> None:
    ended = {**(recorded.record.outcome or {}), "source": "another"}
    default = recorded.history[:1]
    checks = list(verify(store, replace(recorded.record, outcome=ended), default))
    assert [check.kind for check in checks] == ["default"] and checks[0].same


@pytest.fixture(scope="module")
def judged(store: TraceStore) -> AskTellStudy:
    """A study whose only gain is a codec that ruins the loss."""
    codec = categorical_knob("compression", ("none", "fp16"), "none", help="", exact=False)
    space = SearchSpace((codec,))
    study = AskTellStudy.create(space, store=store, settings=StudySettings(trials=2))
    while (trial := study.ask()) is not None:
        coded = trial.strategy.get("compression") == "fp16"
        losses = tuple(2.0 if coded else math.exp(-step / 10) for step in range(trial.steps or 40))
        steps = tuple((0.05 if coded else 0.1) * (1 + 0.001 * (n % 3)) for n in range(40))
        report = RankReport(0, "", steps, (), losses)
        study.tell(trial, TrialResult(TrialStatus.COMPLETED, ranks=(report,)))
    return study


def test_a_conclusion_with_other_numbers_differs(
    store: TraceStore, recorded: AskTellStudy, judged: AskTellStudy
) -> None:
    def end(study: AskTellStudy, **changed: object) -> Check:
        conclusion = study.conclusion
        assert conclusion is not None
        outcome = replace(conclusion, **changed).to_json()  # type: ignore[arg-type]
        *_, last = verify(store, replace(study.record, outcome=outcome), study.history)
        assert last.kind == "end" and last.again == last.recorded
        return last

    assert end(recorded, reason="for another reason").same and end(judged).same
    assert recorded.conclusion is not None and judged.conclusion is not None
    faster = tuple(replace(each, speedup=99.0) for each in recorded.conclusion.comparisons)
    better = tuple(replace(each, loss=0.0) for each in judged.conclusion.verdicts)
    assert faster and better
    for check, other in (
        (end(recorded, default_s=9.9), "default_s"),
        (end(recorded, comparisons=faster), "comparisons"),
        (end(judged, verdicts=better), "verdicts"),
    ):
        assert not check.same and check.note == f"different {other}"


@pytest.mark.parametrize("name", ["seed", "steps"])
def test_a_quality_trial_with_another_seed_or_length_differs(
    store: TraceStore, judged: AskTellStudy, name: str
) -> None:
    changed = [
        replace(trial, info={**trial.info, name: 77}) if trial.kind == "quality" else trial
        for trial in judged.history
    ]
    first = next(check for check in verify(store, judged.record, changed) if not check.same)
    assert (first.kind, first.note) == ("quality", f"different {name}")


@pytest.mark.parametrize("default", ["default", "mine"])
def test_a_study_of_another_learner_alone_is_not_verified(
    default: str, tmp_path: Path, store: TraceStore, recorded: AskTellStudy
) -> None:
    others = TraceStore(tmp_path / "traces.db")
    study = replace(recorded.record, outcome=None, winner=None, status=StudyStatus.FAILED)
    first, *rest = recorded.history
    trials = [replace(first, kind=default), *(replace(trial, kind="mine") for trial in rest)]
    others.add([(study, trials)])
    arguments = ["replay", "last", "--verify", "--store", str(tmp_path / "traces.db")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1 and "identical" not in done.stdout
    assert "nothing could be verified" in done.stdout


def test_a_default_after_a_rest_is_no_verified_decision(
    tmp_path: Path, recorded: AskTellStudy
) -> None:
    store = TraceStore(tmp_path / "traces.db")
    study = replace(recorded.record, outcome=None, winner=None, status=StudyStatus.FAILED)
    first, second, *_ = recorded.history
    store.add([(study, [first, second, replace(first, number=2)])])
    arguments = ["replay", "last", "--verify", "--store", str(tmp_path / "traces.db")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and "2 of 2 decisions are identical" in done.stdout
    assert "1 further trial of the default followed a rest of the study" in done.stdout


def test_distance_counts_choices_and_shares_of_ranges() -> None:
    one = SPACE.default
    for knob in SPACE.knobs:
        far = SPACE.complete({knob.name: knob.from_unit(1.0)})
        assert distance(SPACE, one, far) >= 0
        assert distance(SPACE, far, far) == 0
    assert distance(SPACE, one, one) == 0


@pytest.mark.parametrize("learner", list(LEARNERS))
def test_other_learners_play_on_what_was_measured(
    store: TraceStore, recorded: AskTellStudy, learner: str
) -> None:
    if learner.startswith("optuna"):
        pytest.importorskip("optuna")
    found = rerun(store, recorded.record, recorded.history, learner, 6, 1)
    assert len(found.best_ms) == 6 and list(found.best_ms) == sorted(found.best_ms, reverse=True)
    assert 1 <= found.exact <= 6, "the default's at least"
    times = [t.result.step_time for t in recorded.history if t.result and t.kind != "confirm"]
    assert found.best_ms[-1] >= 1e3 * min(t.mean_s for t in times if t)
    again = rerun(store, recorded.record, recorded.history, learner, 6, 1)
    assert again == found


def test_an_unknown_learner_is_named(store: TraceStore, recorded: AskTellStudy) -> None:
    with pytest.raises(ConfigurationError, match=r"'hebo'.*\n?.*transfer"):
        rerun(store, recorded.record, recorded.history, "hebo", 6, 1)


def test_commands(tmp_path: Path, store: TraceStore, recorded: AskTellStudy) -> None:
    path = tmp_path / "trace.jsonl"
    export_study(store, recorded.study_id, path)
    run = CliRunner().invoke
    played = run(app, ["replay", str(path), "--speed", "max"])
    assert played.exit_code == 0, played.output
    assert "ended after" in played.stderr
    verified = run(app, ["replay", str(path), "--verify"])
    count = len(recorded.history) + 1
    assert verified.exit_code == 0, verified.output
    assert f"{count} of {count} decisions are identical" in verified.stdout
    others = run(app, ["replay", str(path), "--learner", "random,sobol", "--seeds", "1"])
    assert others.exit_code == 0 and "as recorded" in others.stdout
    for wrong in (["--speed", "0"], ["--verify", "--learner", "random"], ["--learner", "me"]):
        assert run(app, ["replay", str(path), *wrong]).exit_code != 0


def test_learners_play_at_the_speed_of_the_last_default(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "traces.db")
    study = AskTellStudy.create(SPACE, store=store)
    for kind, values, seconds in (
        ("default", {}, 0.1),
        ("sobol", {"buckets": 4}, 0.08),
        ("default", {}, 0.2),  # the study has rested
        ("sobol", {"buckets": 8}, 0.3),
    ):
        number = store.ask(study.study_id, Strategy(values), kind, {})
        result = TrialResult(TrialStatus.COMPLETED, ranks=(RankReport(0, "a", (seconds,) * 20),))
        store.tell(study.study_id, number, result)
    words = ["--learner", "random", "--seeds", "1", "--store", str(tmp_path / "traces.db")]
    done = CliRunner().invoke(app, ["replay", study.study_id, *words])
    assert done.exit_code == 0, done.output
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("as recorded")]
    assert "1.25x" in line and "2.50x" not in done.stdout


def test_a_table_of_somebody_elses_learner_says_so() -> None:
    done = CliRunner().invoke(app, ["replay", str(TABLE), "--verify"])
    assert "decisions of a learner that is not part of this program" in done.stdout


def test_a_winner_from_a_file_needs_names(tmp_path: Path) -> None:
    """Strategies of shared traces speak of classes of parameters without names."""
    from hvd_autosync.engine.compatibility import classes_for, differences
    from hvd_autosync.launch.job import Job
    from hvd_autosync.search_space import Host
    from hvd_autosync.traces.opening import open_trace

    _, study = open_trace(str(TABLE), None)
    job = Job(("-np", "4"), ("python", "train.py"), (Host("localhost", 4),), "gloo")
    with pytest.raises(ConfigurationError, match="no names of parameters"):
        classes_for(study, job, str(tmp_path / "t.db"))
    plain = replace(study, winner=Strategy({"cycle_time_ms": 2.0}))
    assert classes_for(plain, job, str(tmp_path / "t.db")) == {}
    lines = list(differences(study, job))
    assert "different layout: 2 x 1 ranks in the study, 1 x 4 ranks here" in lines
