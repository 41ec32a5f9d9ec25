"""What a tuning tells its trials, and when it searches at all."""

import math
import sqlite3
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from hvd_autosync.engine import tuning
from hvd_autosync.engine.compatibility import why_again
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import load_restrictions, settings_of, tuning_key
from hvd_autosync.engine.tuning import TuningInterrupted, _classes, tune
from hvd_autosync.errors import ConfigurationError, DefaultTrialError, ShortJobError, StoreError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.reporting.widget import StopRequested
from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    ModelProfile,
    ParameterProfile,
    Resources,
    SearchSpace,
    Strategy,
    Task,
    TrialResult,
    TrialStatus,
    catalogue_knob,
)
from hvd_autosync.search_space.trial import RankReport, TrialSpec
from hvd_autosync.study.confirm import Comparison
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Conclusion, StudySettings, Trial
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import Fallback, StudyStatus, TraceStore, outage
from hvd_autosync.util.versions import versions

LARGE = ParameterProfile("large.weight", (512, 512), "float32")
TASK = Task(
    ModelProfile((LARGE, ParameterProfile("bias", (512,), "float32"))),
    Resources((Host("a", 2),), "cpu", HorovodBuild("0.28.1", gloo=True, mpi=False)),
)


@pytest.mark.parametrize(
    "values", [{}, {"cycle_time_ms": 5.0}, {"buckets": 0, "large_exchange": "allreduce"}]
)
def test_a_strategy_that_leaves_the_exchange_to_horovod_needs_no_classes(values: dict) -> None:
    assert _classes(TASK, Strategy(values)) == {}


def test_a_strategy_with_exchanges_knows_the_classes() -> None:
    strategy = Strategy({"large_slices": 2})
    assert _classes(TASK, strategy) == {"large": ("large.weight",)}
    assert _classes(None, strategy) == {}


class Launched(Exception):
    """A trial would have been run."""


def test_a_winner_whose_steps_became_slower_is_searched_again(tmp_path: Path) -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"))
    store = TraceStore(options.store)
    key = tuning_key(job, options, {})
    first = store.create_study(job_key=key, command=(), settings={}, versions={})
    winner = Strategy({"cycle_time_ms": 5.0})
    store.finish(first.study_id, StudyStatus.FINISHED, {"reason": "it won"}, winner)
    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = Launched
    assert tune(job, options, listener, runner=runner).study_id == first.study_id
    (notice,) = (call.args[0] for call in listener.on_notice.mock_calls)
    assert first.study_id in notice and "--autosync-reuse never" in notice

    store.keep_drift(first.study_id, ["steps have become slower: 9 ms"])
    assert store.study(first.study_id).winner == winner
    with pytest.raises(Launched):
        tune(job, options, listener, runner=runner)
    (running,) = (s for s in store.studies() if s.study_id != first.study_id)
    assert running.settings["trials"] == 8 < options.trials and running.settings["retune"]
    (notice,) = (call.args[0] for call in listener.on_notice.mock_calls[1:2])
    assert first.study_id in notice and "steps have become slower: 9 ms" in notice

    only = Options(store=options.store, reuse="only")
    assert tune(job, only, listener, runner=runner).study_id == first.study_id


def test_other_versions_of_a_result_are_named_where_it_is_used(tmp_path: Path) -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options, listener = Options(store=str(tmp_path / "traces.db")), MagicMock()
    store = TraceStore(options.store)
    first = store.create_study(
        job_key=tuning_key(job, options, {}), command=(), settings={}, versions={"torch": "0.1"}
    )
    winner = Strategy({"cycle_time_ms": 5.0})
    store.finish(first.study_id, StudyStatus.FINISHED, {"reason": "it won"}, winner)
    assert tune(job, options, listener).study_id == first.study_id
    (notice,) = (call.args[0] for call in listener.on_notice.mock_calls)
    assert f"study {first.study_id}; torch was 0.1, here it is " in notice


def ended_by_the_guard(
    store: TraceStore, key: str, *, proven: Strategy | None = None, retune: bool = False
) -> str:
    """A finished study whose winner was left in a training; its id."""
    first = store.create_study(job_key=key, command=(), settings={"retune": retune}, versions={})
    space = SearchSpace((catalogue_knob("cycle_time_ms"), catalogue_knob("local_steps")))
    store.describe_task(first.study_id, TASK, space)
    winner = Strategy({"local_steps": 4})
    compared = tuple(
        Comparison(each, 1.5, 1.2, 1.8, 3) for each in (winner, proven) if each is not None
    )
    found = Conclusion(winner, "it won", "", 0.1, compared).to_json()
    store.finish(first.study_id, StudyStatus.FINISHED, found, winner)
    said = Fallback(winner, 1234, "the loss has risen to 9 from 2")
    store.keep_fallback(first.study_id, said)
    (kept,) = store.study(first.study_id).fallbacks
    assert replace(kept, at="") == said and kept.at
    return first.study_id


def test_a_winner_that_the_guard_has_ended_does_not_win_again(tmp_path: Path) -> None:
    """The next best that was proven is taken; where there is none it is searched without it."""
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    runner = MagicMock()
    runner.run.side_effect = Launched
    next_best = Strategy({"cycle_time_ms": 5.0})
    for name, proven, retune, reuse, expected in (
        ("next", next_best, False, "auto", next_best),
        ("only", None, False, "only", Strategy({})),
        ("twice", None, True, "auto", Strategy({})),
        ("search", None, False, "auto", None),
    ):
        options = Options(store=str(tmp_path / f"{name}.db"), reuse=reuse)
        store, listener = TraceStore(options.store), MagicMock()
        key = tuning_key(job, options, {})
        study_id = ended_by_the_guard(store, key, proven=proven, retune=retune)
        if expected is None:
            with pytest.raises(Launched):
                tune(job, options, listener, runner=runner)
            (running,) = (s for s in store.studies() if s.study_id != study_id)
            settings = StudySettings.from_json(running.settings)
            assert settings.excluded == (Strategy({"local_steps": 4}),)
            assert settings.retune and settings.trials == 8
        else:
            found = tune(job, options, listener, runner=runner)
            assert found.study_id == study_id and found.space is not None
            assert found.winner == (expected or found.space.default)
            conclusion = Conclusion.of(found)
            assert conclusion is not None and (conclusion.best is not None) == bool(expected)
        (notice, *_) = (call.args[0] for call in listener.on_notice.mock_calls)
        assert study_id in notice and "at step 1234" in notice and "risen to 9" in notice
        assert "local steps 4" in notice.replace("=", " ").replace("_", " "), notice
        assert "not used again" in notice


@pytest.mark.parametrize("given", [{"allow": ("codec", "schedule")}, {"space": "space.toml"}])
def test_what_the_guard_has_ended_is_left_whatever_groups_are_allowed(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    if "space" in given:
        (tmp_path / "space.toml").write_text("[knobs.buckets]\nhigh = 4\n")
        given = {"space": str(tmp_path / "space.toml")}
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"), allow=("schedule",))
    store, runner = TraceStore(options.store), MagicMock()
    runner.run.side_effect = Launched
    study_id = ended_by_the_guard(store, tuning_key(job, options, {}))
    now, listener = replace(options, **given), MagicMock()
    restrictions = load_restrictions(now.space, now.allow)
    other = store.create_study(
        job_key=tuning_key(job, now, restrictions), command=(), settings={}, versions={}
    )
    conclusion = Conclusion(Strategy({"local_steps": 4}), "it won", "", 0.1, ()).to_json()
    store.describe_task(other.study_id, TASK, store.study(study_id).space)
    store.finish(other.study_id, StudyStatus.FINISHED, conclusion, Strategy({"local_steps": 4}))
    with pytest.raises(Launched):
        tune(job, now, listener, runner=runner)
    (notice, *_) = (call.args[0] for call in listener.on_notice.mock_calls)
    assert f"study {other.study_id}: the loss guard has ended its lossy knobs" in notice
    (running,) = (s for s in store.studies() if s.study_id not in (study_id, other.study_id))
    settings = StudySettings.from_json(running.settings)
    assert settings.excluded == (Strategy({"local_steps": 4}),)


@pytest.mark.parametrize("has_epochs", [True, False])
def test_where_no_epoch_was_seen_local_steps_are_not_tuned(
    tmp_path: Path, has_epochs: bool
) -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"), allow=("schedule",))
    steps, model = (
        RankReport(0, "a", step_s=(0.1,) * 40),
        replace(TASK.model, has_epochs=has_epochs),
    )
    default = TrialResult(TrialStatus.COMPLETED, ranks=(steps,), profile=model)
    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = [default, default, Launched]  # the first probes the links
    with pytest.raises(Launched):
        tune(job, options, listener, runner=runner)
    (study,) = TraceStore(options.store).studies()
    assert study.space is not None
    assert any(knob.name == "local_steps" for knob in study.space.knobs) is has_epochs
    said = [call.args[0] for call in listener.on_notice.mock_calls]
    assert any("warm-up; use a torch.utils.data" in each for each in said) != has_epochs


@pytest.mark.parametrize("fixed", ["local_steps]\nfixed = 2", "buckets]\nhigh = 4"])
def test_a_lossy_default_of_a_space_file_is_told(tmp_path: Path, fixed: str) -> None:
    (tmp_path / "space.toml").write_text(f"[knobs.{fixed}\n")
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(
        store=str(tmp_path / "traces.db"), allow=("schedule",), space=str(tmp_path / "space.toml")
    )
    steps = RankReport(0, "a", step_s=(0.1,) * 40)
    default = TrialResult(TrialStatus.COMPLETED, ranks=(steps,), profile=TASK.model)
    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = [default, default, Launched]  # the first probes the links
    with pytest.raises(Launched):
        tune(job, options, listener, runner=runner)
    notices = " ".join(call.args[0] for call in listener.on_notice.mock_calls)
    assert ("makes a lossy strategy the default" in notices) is fixed.startswith("local_steps")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (TrialStatus.CRASHED, "fails with the defaults that the space file leaves, .*buckets=4"),
        (TrialStatus.CUT_SHORT, "the limit of 9 minutes was reached"),
    ],
)
def test_a_restricted_default_without_a_step_time_says_why(
    tmp_path: Path, status: TrialStatus, said: str
) -> None:
    """Where the minutes were too few, the space file is not at fault."""
    (tmp_path / "space.toml").write_text("[knobs.buckets]\nlow = 4\n")
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(
        store=str(tmp_path / "traces.db"), space=str(tmp_path / "space.toml"), minutes=9.0
    )
    steps = RankReport(0, "a", step_s=(0.1,) * 40)
    model = ModelProfile(tuple(replace(LARGE, name=f"{i}", ready_order=i) for i in range(9)))
    default = TrialResult(TrialStatus.COMPLETED, ranks=(steps,), profile=model)
    runner = MagicMock()
    # The first probes the links, the second measures the job as it is.
    runner.run.side_effect = [default, default, TrialResult(status, "it ended")]
    with pytest.raises(DefaultTrialError, match=said) as ended:
        tune(job, options, MagicMock(), runner=runner)
    assert ("space file" in str(ended.value)) is (status is TrialStatus.CRASHED)


def test_a_space_file_for_larger_jobs_is_no_error(tmp_path: Path) -> None:
    """What is possible for a job is known after its default trial."""
    (tmp_path / "space.toml").write_text("[knobs.buckets]\nlow = 60\n")
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"), space=str(tmp_path / "space.toml"))
    model = ModelProfile(tuple(replace(LARGE, name=f"{i}", ready_order=i) for i in range(9)))
    steps = RankReport(0, "a", step_s=(0.1,) * 40)
    default = TrialResult(TrialStatus.COMPLETED, ranks=(steps,), profile=model)
    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = [default, default, Launched]
    with pytest.raises(Launched):
        tune(job, options, listener, runner=runner)
    notices = " ".join(call.args[0] for call in listener.on_notice.mock_calls)
    assert "leaves no value of buckets that is possible for this job" in notices


def test_a_winner_that_is_taken_over_says_from_where(tmp_path: Path) -> None:
    options = Options(store=str(tmp_path / "traces.db"))
    store = TraceStore(options.store)
    steps = RankReport(0, "a", step_s=(0.1,) * 40)
    default = TrialResult(TrialStatus.COMPLETED, ranks=(steps,), profile=TASK.model)
    winner = Strategy({"cycle_time_ms": 5.0})

    def run(spec: TrialSpec, *_: object) -> TrialResult:
        if spec.strategy:
            raise Launched
        return default

    taken = []
    for script in ("train.py", "edited.py", "edited_again.py"):
        job = Job(("-np", "2"), ("python", script), (Host("a", 2),))
        runner = MagicMock()
        runner.run.side_effect = run
        with suppress(Launched):
            taken.append(tune(job, options, MagicMock(), runner=runner))
        for study in store.studies():
            if study.status is not StudyStatus.FINISHED:
                found = Conclusion(winner, "it won", "", 0.1).to_json()
                store.finish(study.study_id, StudyStatus.FINISHED, found, winner)
    first = min(store.studies(), key=lambda study: study.created_at)
    assert [study.winner for study in taken] == [winner] * 2
    assert [Conclusion.of(study).source for study in taken] == [first.study_id] * 2


def test_the_default_of_a_space_file_is_measured_before_a_result_is_taken_over(
    tmp_path: Path,
) -> None:
    """Its step time may be far from that of the unchanged job, which runs first."""
    (tmp_path / "space.toml").write_text("[knobs.buckets]\nlow = 4\n")
    options = Options(store=str(tmp_path / "traces.db"), space=str(tmp_path / "space.toml"))
    store, listener = TraceStore(options.store), MagicMock()
    model = ModelProfile(tuple(replace(LARGE, name=f"{i}", ready_order=i) for i in range(9)))

    def run(spec: TrialSpec, *_: object) -> TrialResult:
        if spec.strategy and spec.strategy["buckets"] != 4:
            raise Launched
        rank = RankReport(0, "a", step_s=(0.3 if spec.strategy else 0.1,) * 40)
        return TrialResult(TrialStatus.COMPLETED, ranks=(rank,), profile=model)

    winner = Strategy()
    for script in ("train.py", "edited.py"):
        job = Job(("-np", "2"), ("python", script), (Host("a", 2),))
        runner = MagicMock()
        runner.run.side_effect = run
        with pytest.raises(Launched) if script == "train.py" else nullcontext():
            taken = tune(job, options, listener, runner=runner)
        for study in store.studies(status=StudyStatus.RUNNING):
            assert study.space is not None and not study.space.holds_job
            winner = Strategy({**study.space.default, "buckets": 6})
            found = Conclusion(winner, "it won", "", 0.3).to_json()
            store.finish(study.study_id, StudyStatus.FINISHED, found, winner)
    conclusion = Conclusion.of(taken)
    assert conclusion is not None and conclusion.source
    assert taken.winner == winner and conclusion.default_s == pytest.approx(0.3)


def test_a_damaged_conclusion_about_the_same_task_stops_no_tuning(tmp_path: Path) -> None:
    options = Options(store=str(tmp_path / "traces.db"))
    store = TraceStore(options.store)
    steps = RankReport(0, "a", step_s=(0.1,) * 40)
    default = TrialResult(TrialStatus.COMPLETED, ranks=(steps,), profile=TASK.model)

    def run(spec: TrialSpec, *_: object) -> TrialResult:
        if spec.strategy:
            raise Launched
        return default

    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = run
    winner = Strategy({"cycle_time_ms": 5.0})
    for script in ("train.py", "other.py"):
        job = Job(("-np", "2"), ("python", script), (Host("a", 2),))
        with pytest.raises(Launched):
            tune(job, options, listener, runner=runner)
        for study in store.studies(status=StudyStatus.RUNNING):
            store.finish(study.study_id, StudyStatus.FINISHED, {"winner": 3}, winner)
    first = min(store.studies(), key=lambda study: study.created_at)
    (notice,) = (call.args[0] for call in listener.on_notice.mock_calls if "damaged" in str(call))
    assert first.study_id in notice and "not reused" in notice


def test_a_lossy_winner_of_another_training_is_judged(tmp_path: Path) -> None:
    """The losses by which it was admitted are those of other data, or of another rate."""
    options = Options(store=str(tmp_path / "traces.db"), allow=("schedule",))
    store, winner = TraceStore(options.store), Strategy({"local_steps": 4})
    steps = RankReport(0, "a", step_s=(0.1,) * 40)
    default = TrialResult(TrialStatus.COMPLETED, ranks=(steps,), profile=TASK.model)

    def run(spec: TrialSpec, *_: object) -> TrialResult:
        if spec.strategy or spec.seed:
            raise Launched
        return default

    for script in ("train.py", "other.py"):
        job = Job(("-np", "2"), ("python", script), (Host("a", 2),))
        runner = MagicMock()
        runner.run.side_effect = run
        with pytest.raises(Launched):
            tune(job, options, MagicMock(), runner=runner)
        (study,) = (s for s in store.studies() if s.status is not StudyStatus.FINISHED)
        assert study.space is not None and not study.space.is_exact(winner)
        found = Conclusion(winner, "it won", "", 0.1).to_json()
        store.finish(study.study_id, StudyStatus.FINISHED, found, winner)


@pytest.mark.parametrize("reuse", ["auto", "only"])
@pytest.mark.parametrize(
    ("winner", "changed", "again"),
    [
        (Strategy({"local_steps": 4}), {"loss_tolerance": 0.01}, "a loss tolerance of 0.2"),
        (Strategy({"local_steps": 4}), {"goal": "time-to-loss"}, "the goal 'steps'"),
        (Strategy({"local_steps": 4}), {"quality_steps": 300}, "judged in trials of 200 steps"),
        (Strategy({"local_steps": 4}), {"quality_steps": 100}, ""),
        (Strategy({"local_steps": 4}), {"loss_tolerance": 0.3}, ""),
        (Strategy({"cycle_time_ms": 5.0}), {"loss_tolerance": 0.01}, ""),
        (Strategy({"cycle_time_ms": 5.0}), {"quality_steps": 300}, ""),
    ],
)
def test_a_lossy_winner_is_admitted_by_the_rule_of_now(
    tmp_path: Path, winner: Strategy, changed: dict[str, Any], again: str, reuse: str
) -> None:
    options = Options(store=str(tmp_path / "traces.db"), loss_tolerance=0.2, reuse=reuse)
    store = TraceStore(options.store)
    settings = StudySettings(loss_tolerance=0.2).to_json()
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    key = tuning_key(job, options, {})
    study_id = store.create_study(job_key=key, command=(), settings=settings, versions={}).study_id
    space = SearchSpace((catalogue_knob("cycle_time_ms"), catalogue_knob("local_steps")))
    store.describe_task(study_id, TASK, space)
    verdict = Verdict(winner, Outcome.ADMITTED, 2.0, 1.99, 0.2, "", 0.1, 4, 4)
    found = Conclusion(winner, "it won", "", 0.1, verdicts=(verdict,)).to_json()
    store.finish(study_id, StudyStatus.FINISHED, found, winner)
    known = store.study(study_id)
    assert why_again(known, known, options) == ""
    said = why_again(known, known, replace(options, **changed))
    assert again in said and bool(said) == bool(again)
    if reuse == "only":
        refused = pytest.raises(ConfigurationError, match=f"(?s){again}.*--autosync-reuse auto")
        with refused if again else nullcontext():
            tune(job, replace(options, **changed), MagicMock())


def test_a_lossy_winner_that_was_admitted_without_pairs_is_judged_again(tmp_path: Path) -> None:
    """Earlier versions stored no number of pairs, and whether a strategy may be used."""
    options, winner = Options(store=str(tmp_path / "traces.db")), Strategy({"local_steps": 4})
    store = TraceStore(options.store)
    verdict = Verdict(winner, Outcome.ADMITTED, 2.9, 1.99, 0.94, "", 0.9, 4)
    space, settings = SearchSpace((catalogue_knob("local_steps"),)), StudySettings().to_json()
    found = Conclusion(winner, "it won", "", 0.1, verdicts=(verdict,)).to_json()
    former = {**verdict.to_json(), "admissible": True}
    for name in ("outcome", "pairs", "bound"):
        del former[name]
    for stored, again in ((found["verdicts"][0], ""), (former, "the rule of an earlier version")):
        study_id = store.create_study(
            job_key="k", command=(), settings=settings, versions={}
        ).study_id
        store.describe_task(study_id, TASK, space)
        outcome = {**found, "verdicts": [stored]}
        store.finish(study_id, StudyStatus.FINISHED, outcome, winner)
        known = store.study(study_id)
        said = why_again(known, known, options)
        assert again in said and bool(said) == bool(again)


def test_a_lossy_winner_needs_a_verdict_on_its_own_buckets(tmp_path: Path) -> None:
    """Earlier versions let a verdict on int8 hold for every bucketing."""
    options = Options(store=str(tmp_path / "traces.db"))
    store = TraceStore(options.store)
    judged = Strategy({"large_codec": "int8"})
    verdict = Verdict(judged, Outcome.ADMITTED, 2.0, 1.99, 0.2, "", 0.1, 4, 4)
    names = ("buckets", "cycle_time_ms", "large_exchange", "large_codec")
    space = SearchSpace(tuple(map(catalogue_knob, names)))
    for knobs, again in (({"cycle_time_ms": 5.0}, ""), ({"buckets": 2}, "train another model")):
        winner = Strategy({**judged, **knobs})
        study_id = store.create_study(
            job_key="k", command=(), settings=StudySettings().to_json(), versions={}
        ).study_id
        store.describe_task(study_id, TASK, space)
        found = Conclusion(winner, "it won", "", 0.1, verdicts=(verdict,)).to_json()
        store.finish(study_id, StudyStatus.FINISHED, found, winner)
        known = store.study(study_id)
        said = why_again(known, known, options)
        assert again in said and bool(said) == bool(again)


def short(count: int) -> TrialResult:
    """What the default trial of a script of so many steps gives."""
    steps = RankReport(0, "a", step_s=(0.1,) * count)
    return TrialResult(
        TrialStatus.ENDED_EARLY,
        f"the script ended after {count} steps",
        (steps,) if count else (),
        warmup_steps=10,
        profile=TASK.model,
    )


@pytest.mark.parametrize(
    ("count", "trains", "hours", "said"),
    [
        (0, True, None, "without a single step"),
        (12, True, None, "ended after 12 steps; at least 15 are needed"),
        (12, True, 5.0, "ended after 12 steps"),
        (12, False, None, "ended after 12 steps"),
        (20, True, None, "ended by itself after 20 steps"),
        (20, True, 5.0, None),  # as it will run often
        (20, False, None, None),  # nothing but tuning is wanted
    ],
)
def test_a_job_that_ends_within_its_first_trial(
    tmp_path: Path, count: int, trains: bool, hours: float | None, said: str | None
) -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"), expected_hours=hours)
    runner = MagicMock()

    def run(spec: TrialSpec, *_: object) -> TrialResult:
        if spec.strategy:
            raise Launched
        return short(count)

    runner.run.side_effect = run
    expected = pytest.raises(ShortJobError, match=said) if said else pytest.raises(Launched)
    with expected:
        tune(job, options, MagicMock(), runner=runner, trains=trains)
    (study,) = TraceStore(options.store).studies()
    assert study.status is (StudyStatus.FAILED if said else StudyStatus.RUNNING)


@pytest.mark.parametrize("measured", [0, 20])
def test_no_trial_runs_beyond_the_minutes(tmp_path: Path, measured: int) -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"), minutes=1.0)
    limits = []

    def run(spec: TrialSpec, limit: Limits, _: object) -> TrialResult:
        if spec.probe:
            return short(0)
        limits.append(limit.total_s)
        cut = short(10 + measured)
        return replace(cut, status=TrialStatus.CUT_SHORT, setup_s=5.0, total_s=62.0)

    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = run
    if measured:
        study = tune(job, options, listener, runner=runner)
        ((_, forecast),) = (call.args for call in listener.on_forecast.mock_calls)
        assert forecast.low_s == forecast.high_s == 0
        conclusion = Conclusion.of(study)
        assert conclusion is not None and conclusion.best is None
        assert "the limit of 1 minute leaves no time" in conclusion.stopped
    else:
        with pytest.raises(ShortJobError, match="the limit of 1 minute was reached before"):
            tune(job, options, MagicMock(), runner=runner)
    (limit_s,) = limits
    assert 0.0 < limit_s <= 60.0


def test_a_quality_trial_ends_with_the_minutes_of_quality_trials(tmp_path: Path) -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"), allow=("codec",), quality_minutes=0.5)
    store, runner = TraceStore(options.store), MagicMock()
    study = AskTellStudy.create(store=store, settings=settings_of(options))
    given = (job, options, {}, store, MagicMock(), runner, False, (), {}, lambda: False, None)
    for kind, limit_s in (("default", math.inf), ("quality", 30.0)):
        tuning._Tuning(*given)._run_trial(study, Trial(0, kind, Strategy(), 40, 1))
        _, limits, _ = runner.run.call_args.args
        assert limits.total_s == limit_s


@pytest.mark.parametrize(
    ("step_s", "given", "expected"),
    [
        (0.1, {}, (10, 40)),
        (0.5, {}, (8, 30)),
        (10.0, {}, (3, 10)),
        (10.0, {"steps": 40}, (10, 40)),
        (10.0, {"warmup": 4}, (4, 40)),
    ],
)
def test_where_steps_are_long_trials_have_fewer(
    tmp_path: Path, step_s: float, given: dict[str, int], expected: tuple[int, int]
) -> None:
    """But where the user says how many; the default's trial finds it out itself."""
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"), **given)
    asked = []

    def run(spec: TrialSpec, *_: object) -> TrialResult:
        if spec.probe:
            return short(0)
        asked.append((spec.warmup_steps, spec.measured_steps))
        assert spec.adaptive_steps is (len(asked) == 1 and not given)
        if len(asked) > 1:
            raise Launched
        steps = RankReport(0, "a", step_s=(step_s,) * sum(asked[0]))
        return TrialResult(
            TrialStatus.COMPLETED,
            ranks=(steps,),
            warmup_steps=asked[0][0],
            profile=TASK.model,
            setup_s=5.0,
            total_s=step_s * sum(asked[0]) + 4.0,
        )

    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = run
    with pytest.raises(Launched):
        tune(job, options, listener, runner=runner, trains=True)
    assert asked[0] == (given.get("warmup", 10), 40)
    assert asked[1] == expected
    ((_, forecast),) = (call.args for call in listener.on_forecast.mock_calls)
    assert forecast.trial_s == pytest.approx(4.0 + step_s * sum(expected))
    assert forecast.trials == 19 and forecast.trains
    assert forecast.low_s == pytest.approx((19 + 6) * forecast.trial_s)
    assert forecast.high_s == pytest.approx((19 + 48) * forecast.trial_s)


def test_ctrl_c_after_the_conclusion_keeps_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while fork servers end, or under the result of another job of the same task."""
    winner = Strategy({"buckets": 4})

    def run(_: object, study: AskTellStudy) -> None:
        study.describe(SearchSpace((catalogue_knob("buckets"),)))
        study.finish(Conclusion(winner, "it won", "", 0.1, ()))
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning._Tuning, "run", run)
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"))
    assert tune(job, options, MagicMock(), runner=MagicMock()).winner == winner


def test_ctrl_c_says_which_study_it_has_ended(tmp_path: Path) -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"))
    runner = MagicMock()
    runner.run.side_effect = KeyboardInterrupt
    with pytest.raises(TuningInterrupted) as caught:
        tune(job, options, MagicMock(), runner=runner)
    store = TraceStore(options.store)
    (study,) = store.studies()
    assert caught.value.study.study_id == study.study_id
    assert study.status is StudyStatus.RUNNING
    assert store.claim_resumable(study.job_key) is not None, "it was let go"


def test_ctrl_c_does_not_wait_for_a_lost_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise OperationalError("connect", {}, ConnectionError("connection refused"))

    def wait(_: float) -> None:
        pytest.fail("it waits for the server")

    def lose_and_interrupt(*_: object) -> None:
        (study,) = listener.on_study_start.call_args.args
        monkeypatch.setattr(study.store._database, "_waits", True)  # as on a server
        monkeypatch.setattr(Engine, "connect", refuse)
        monkeypatch.setattr(outage, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
        raise KeyboardInterrupt

    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = lose_and_interrupt
    with pytest.raises(TuningInterrupted) as caught:
        tune(job, Options(store=str(tmp_path / "traces.db")), listener, runner=runner)
    with pytest.raises(StoreError, match="connection refused"):
        caught.value.study.store.trials(caught.value.study.study_id)


@pytest.mark.parametrize("end", [StopRequested("study"), RuntimeError("in on_trial_end")])
def test_what_could_not_be_let_go_is_resumed_in_the_same_process(
    end: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise OperationalError("connect", {}, ConnectionError("connection refused"))

    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"))
    runner, listener = MagicMock(), MagicMock()
    with monkeypatch.context() as outage_of_server:

        def lose_and_end(*_: object) -> None:
            outage_of_server.setattr(Engine, "connect", refuse)
            raise end

        runner.run.side_effect = lose_and_end
        with pytest.raises(type(end)):
            tune(job, options, listener, runner=runner)
    runner.run.side_effect = Launched
    # A tuning that uses another store forgets nothing of this one.
    with pytest.raises(Launched):
        tune(job, replace(options, store=str(tmp_path / "other.db")), MagicMock(), runner=runner)
    with pytest.raises(Launched):
        tune(job, options, listener, runner=runner)
    first, second = listener.on_study_start.call_args_list
    assert (first.kwargs["resumed"], second.kwargs["resumed"]) == (False, True)
    assert second.args[0].study_id == first.args[0].study_id


def test_a_damaged_study_of_another_job_stops_no_tuning(
    tmp_path: Path, add_damaged: Callable[[TraceStore], str]
) -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"))
    add_damaged(TraceStore(options.store))
    runner = MagicMock()
    runner.run.side_effect = Launched
    with pytest.raises(Launched):
        tune(job, options, MagicMock(), runner=runner)


def test_a_new_study_because_of_other_settings_is_reported(tmp_path: Path) -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = Launched
    options = Options(store=str(tmp_path / "traces.db"), trials=8)
    for each in (options, replace(options, trials=6)):
        with pytest.raises(Launched):
            tune(job, each, listener, runner=runner)
    (interrupted,) = (s for s in TraceStore(options.store).studies() if s.settings["trials"] == 8)
    (notice,) = (
        text
        for call in listener.on_notice.mock_calls
        if "starting a new study" in (text := call.args[0])
    )
    assert interrupted.study_id in notice and "trials 8, now 6" in notice


@pytest.mark.parametrize("reuse", ["auto", "never"])
def test_a_study_of_perhaps_another_training_is_not_resumed_under_reuse_never(
    tmp_path: Path, reuse: str
) -> None:
    """The model or the data may have changed, and pairs of quality trials be of two trainings."""
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"), allow=("schedule",), reuse=reuse)
    store, key = TraceStore(options.store), tuning_key(job, options, {})
    settings = settings_of(options).to_json()
    for _ in range(2):
        old = store.create_study(
            job_key=key, command=(), settings=settings, versions=versions()
        ).study_id
        for seed in (1, 2):
            info = {"seed": seed, "steps": 200}
            number = store.ask(old, Strategy(), "quality", info)
            losses = RankReport(0, "a", losses=(1.0,) * 200)
            store.tell(old, number, TrialResult(TrialStatus.COMPLETED, ranks=(losses,)))
        store.let_go(old)
    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = Launched
    with pytest.raises(Launched):
        tune(job, options, listener, runner=runner)
    states = [study.status for study in store.studies()]  # newest first
    if reuse == "auto":
        assert states == [StudyStatus.RUNNING] * 2
        return
    assert states == [StudyStatus.RUNNING, StudyStatus.FAILED, StudyStatus.FAILED]
    assert listener.on_study_start.call_args.kwargs == {"resumed": False}
    notices = [call.args[0] for call in listener.on_notice.mock_calls]
    assert old in notices[0] and "not resumed under --autosync-reuse never" in notices[0]


@pytest.mark.parametrize("moment", ["on_study_start", "making the runner"])
def test_a_study_that_is_interrupted_before_its_first_trial_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """In a kernel, which lives on and would own the study until it ends."""
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options = Options(store=str(tmp_path / "traces.db"))
    listener = MagicMock()
    monkeypatch.setattr(tuning, "AutoRunner", MagicMock(side_effect=KeyboardInterrupt))
    if moment == "on_study_start":
        listener.on_study_start.side_effect = KeyboardInterrupt
    for resumed in (False, True):
        with pytest.raises(TuningInterrupted):
            tune(job, options, listener)
        assert listener.on_study_start.call_args.kwargs == {"resumed": resumed}
    assert len(TraceStore(options.store).studies()) == 1


def test_a_result_that_a_locked_store_did_not_take_is_not_lost(tmp_path: Path) -> None:
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    file = tmp_path / "traces.db"
    options = Options(store=f"sqlite:///{file}?timeout=0.1")
    other = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
    measured = TrialResult(
        TrialStatus.COMPLETED, "", (RankReport(0, "a", (0.1,) * 30),), setup_s=1.0, total_s=4.0
    )

    runner, listener = MagicMock(), MagicMock()
    runner.run.return_value = measured
    listener.on_trial_start.side_effect = lambda *_: other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match=r"locked; the result of trial 0 is kept in ") as error:
        tune(job, options, listener, runner=runner)
    kept = Path(error.value.message.rpartition(" kept in ")[2])
    assert kept.exists()
    other.close()
    store = TraceStore(file)
    (study,) = store.studies()
    store.let_go(study.study_id)  # the store does this itself once the process has ended

    listener.on_study_start.side_effect = Launched
    with pytest.raises(Launched):
        tune(job, options, listener, runner=runner)
    (trial,) = store.trials(study.study_id)
    assert trial.result == measured and not kept.exists()
    assert "taken the result of trial 0" in listener.on_notice.mock_calls[-1].args[0]


def test_a_default_that_failed_before_its_driver_was_lost_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user may have put the job right since then."""
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options, store = Options(store=str(tmp_path / "traces.db")), TraceStore(tmp_path / "traces.db")
    failed = TrialResult(TrialStatus.CRASHED, "no such file: data.bin", exit_status=1)
    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = [failed, failed]  # the first probes the links
    with monkeypatch.context() as lost, pytest.raises(StoreError, match="lost"):
        lost.setattr(TraceStore, "finish", MagicMock(side_effect=StoreError("lost", hint="")))
        tune(job, options, listener, runner=runner)
    (study,) = store.studies()
    assert study.status is StudyStatus.RUNNING
    runner.run.side_effect = Launched
    with pytest.raises(Launched):
        tune(job, options, listener, runner=runner)
    notices = " ".join(call.args[0] for call in listener.on_notice.mock_calls)
    assert "has no step time of its default; its trials stay in the store" in notices
    assert store.study(study.study_id).status is StudyStatus.FAILED


@pytest.mark.parametrize(("rested", "now_s"), [(False, 0.1), (True, 0.2), (True, None)])
def test_a_study_that_has_rested_measures_the_default_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rested: bool, now_s: float | None
) -> None:
    """Its limits, too, are those of this day; a job that fails now leaves the study resumable."""
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    options, store = Options(store=str(tmp_path / "traces.db")), TraceStore(tmp_path / "traces.db")

    def result(step_s: float) -> TrialResult:
        rank = RankReport(0, "a", (step_s,) * 30)
        return TrialResult(TrialStatus.COMPLETED, ranks=(rank,), setup_s=1.0, total_s=4.0)

    runner, listener = MagicMock(), MagicMock()
    runner.run.side_effect = [result(0.1), result(0.1), Launched]  # the first probes the links
    with pytest.raises(Launched):
        tune(job, options, listener, runner=runner)
    (study,) = store.studies()
    store.let_go(study.study_id)

    monkeypatch.setattr(tuning, "has_rested", lambda trials: rested)
    failed = TrialResult(TrialStatus.CRASHED, "no such file: data.bin", exit_status=1)
    again = [failed if now_s is None else result(now_s)] * rested
    runner.run.side_effect = [*again, Launched]
    runner.run.reset_mock()
    with pytest.raises(Launched if now_s else DefaultTrialError) as ended:
        tune(job, options, listener, runner=runner)
    if now_s is None:
        said = str(ended.value)
        assert "fails as it is" in said and "data.bin" in said and "space file" not in said
    trials = store.trials(study.study_id)
    assert [t.kind for t in trials if t.result] == ["default"] * (1 + rested)
    assert store.study(study.study_id).status is StudyStatus.RUNNING
    (_, limits, _) = runner.run.call_args_list[0].args
    assert limits.silence_s < math.inf, "a repetition may hang, too"
    if now_s is not None:
        (_, limits, _) = runner.run.call_args.args
        assert replace(limits, total_s=0) == replace(Limits.from_default(result(now_s)), total_s=0)
