"""The live stage: a training begins under the winner of launched trials, and is tuned live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.commands import live_stage as commands
from hvd_autosync.engine.live_job import live_options
from hvd_autosync.engine.live_stage import (
    has_live_stage,
    judged_study,
    keep_drift,
    live_study,
    task_and_space_under,
    why_kept,
)
from hvd_autosync.engine.mode import known_study, why_launched
from hvd_autosync.engine.options import Options, options_environment
from hvd_autosync.engine.study_options import tuning_key
from hvd_autosync.engine.training import Beginning, RunOutcome
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.job import Job
from hvd_autosync.runtime.driver.environment import worker_environment
from hvd_autosync.search_space import Host, Strategy, TrialSpec, catalogue_knob
from hvd_autosync.search_space.knobs import CategoricalKnob, Value
from hvd_autosync.study.fallbacks import excluded_strategies
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore
from hvd_autosync.util.variables import JUDGED_VARIABLE

JOB = Job(("-np", "2"), ("python", "train.py"), (Host("a", 1), Host("b", 1)))
HERE = replace(JOB, hosts=(Host("localhost", 2),))
#: Makes the finished study of launched trials of the job, with a winner, in the store.
Judge = Callable[[dict[str, Value]], StudyRecord]
CODED = {"large_codec": "fp16", "cycle_time_ms": 2.0}


def live(options: Options) -> Options:
    return replace(options, mode="live")


@pytest.mark.parametrize(
    ("given", "staged"),
    [
        ({}, True),
        ({"reuse": "never"}, True),
        ({"allow": ()}, False),
        ({"mode": "launched"}, False),
        ({"tune_only": True}, False),
        ({"runner": "cold"}, False),
        ({"keep_trial_files": "kept"}, False),
    ],
)
def test_lossy_groups_alone_leave_a_live_stage(
    options: Options, given: dict[str, Any], staged: bool
) -> None:
    assert has_live_stage(HERE, replace(options, **given)) is staged


def test_what_else_needs_launched_trials_is_the_reason(options: Options) -> None:
    assert "lossy knobs (codec)" in (why_launched(HERE, options) or "")
    assert "cold" in (why_launched(HERE, replace(options, runner="cold")) or "")
    alone = replace(HERE, hosts=(Host("localhost", 1),))
    assert not has_live_stage(alone, options)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        (CODED, ""),
        ({"large_codec": "topk", "large_ratio": 0.1}, ""),
        ({"local_steps": 4}, "local_steps=4 is lossy and no codec"),
        ({"order": "priority"}, "order=priority is lossy and no codec"),
    ],
)
def test_only_codecs_are_held(
    options: Options, judged: Judge, changed: dict[str, Value], why: str
) -> None:
    assert why_kept(judged(changed)) == why


def test_what_needs_process_sets_is_kept(options: Options, judged: Judge) -> None:
    record = judged({})
    split = replace(record, winner=Strategy({"large_exchange": "hierarchical"}))
    assert "process sets" in why_kept(split)
    assert why_kept(replace(record, space=None))


def test_what_determines_the_model_is_held_and_the_winner_is_the_default(
    options: Options, judged: Judge
) -> None:
    record = judged(CODED)
    rules = {*catalogue_knob("bucket_rule").choices}
    task, space = task_and_space_under(record, {"cycle_time_ms"}, {"bucket_rule": rules})
    assert task == record.task
    assert space.default == record.winner and space.holds_job
    assert not space.has_lossy
    free = {k.name for k in space.knobs if k.from_unit(0.0) != k.from_unit(1.0)}
    assert {"buckets", "large_slices"} <= free and "bucket_rule" not in free
    assert not free & {"cycle_time_ms", "large_codec", "rest_codec", "local_steps", "order"}
    assert space.complete(Strategy()) == record.winner
    assert space.lossy_part(space.default) == record.space.lossy_part(space.default)


def test_no_exchange_switches_a_held_codec_off(judged: Judge) -> None:
    for changed, exchanges in ((CODED, {"allreduce"}), ({}, {"allreduce", "sharded"})):
        _, space = task_and_space_under(judged(changed), (), {})
        knob = space["large_exchange"]
        assert isinstance(knob, CategoricalKnob) and exchanges == {*knob.choices}


def test_under_codecs_of_whole_buckets_the_buckets_are_held(
    options: Options, judged: Judge
) -> None:
    record = judged({"large_codec": "powersgd", "buckets": 3})
    _, space = task_and_space_under(record, (), {})
    free = {k.name for k in space.knobs if k.from_unit(0.0) != k.from_unit(1.0)}
    assert free and not free & {"buckets", "large_exchange", "large_rank"}
    assert space.default["buckets"] == 3


def test_the_helper_knows_under_what_its_training_has_begun(
    options: Options, judged: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = judged(CODED)
    for name, value in options_environment(live(options)).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="lossy knobs"):
        live_options()
    assert judged_study(options) is None
    begins = record.space.complete(Strategy({"large_codec": "bf16"}))
    spec = TrialSpec("training", begins, warmup_steps=0, measured_steps=0)
    for name, value in worker_environment(spec).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(JUDGED_VARIABLE, record.study_id)
    assert live_options().allow == ("codec",)
    found = judged_study(live_options())
    assert found is not None and found.study_id == record.study_id
    assert found.winner == begins, "the guard may have ended the study's winner"


def test_an_overruled_mode_does_not_reach_the_helper(
    options: Options, judged: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable lets all jobs be tuned live, and the command line this one where it can."""
    monkeypatch.setenv("HVD_AUTOSYNC_MODE", "live")
    monkeypatch.setenv(JUDGED_VARIABLE, judged(CODED).study_id)
    assert has_live_stage(HERE, options)
    for name, value in options_environment(live(options)).items():
        monkeypatch.setenv(name, value)
    assert live_options().allow == ("codec",)


def finished(
    store: TraceStore, judged: StudyRecord, key: str, settings: dict[str, Any]
) -> StudyRecord:
    """Return a finished study with task, space and winner of a judged one."""
    study = store.create_study(job_key=key, command=(), settings=settings, versions={})
    assert judged.space is not None
    store.describe_task(study.study_id, judged.task, judged.space)
    store.finish(study.study_id, StudyStatus.FINISHED, judged.outcome or {}, judged.winner)
    return store.study(study.study_id)


class Trained:
    """What was trained, and how."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fixed: list[str] = []
        self.judged_by: list[str | None] = []
        self.begun: list[Beginning] = []

        def train_fixed(job: Any, options: Options, record: StudyRecord, answer: str) -> int:
            self.fixed.append(record.study_id)
            self.judged_by.append(record.settings.get("judged_by"))
            return 3

        def train_live(job: Any, options: Options, *, beginning: Beginning) -> RunOutcome:
            assert options.mode == "live"
            self.begun.append(beginning)
            beginning.on_fallback(64, "the loss has risen")
            return RunOutcome(4, drift="steps have become slower")

        monkeypatch.setattr(commands, "train_fixed", train_fixed)
        monkeypatch.setattr(commands, "train_live", train_live)


def test_a_training_after_launched_trials_is_tuned_live(
    options: Options,
    judged: Judge,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained, record = Trained(monkeypatch), judged(CODED)
    assert commands.train_on(JOB, options, record, "it won") == 4
    (beginning,) = trained.begun
    assert (beginning.strategy, beginning.judged_by) == (record.winner, record.study_id)
    assert beginning.context.classes["large"]
    said = capsys.readouterr().err
    assert "the loss guard has ended this strategy at step 64" in said
    assert "the next run tunes again" in said
    assert TraceStore(options.store).study(record.study_id).drift == ("steps have become slower",)
    assert excluded_strategies(TraceStore(options.store), [record.job_key]) == (record.winner,)
    assert commands.train_on(JOB, replace(options, reuse="only"), record, "it won") == 3
    assert trained.fixed == [record.study_id]


def test_a_training_that_was_tuned_live_starts_under_the_result(
    options: Options,
    judged: Judge,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = judged(CODED)
    _, space = task_and_space_under(record, (), {})
    store = TraceStore(options.store)
    key = tuning_key(JOB, options, {}, record.winner)
    settings = {"judged_by": "deleted"}
    found = store.create_study(
        job_key=key, command=(), settings=settings, versions={"torch": "0.1"}
    )
    store.describe_task(found.study_id, record.task, space)
    outcome = Conclusion(space.default, "it won", "", 0.2).to_json()
    store.finish(found.study_id, StudyStatus.FINISHED, outcome, space.default)
    assert live_study(JOB, replace(options, reuse="never"), record) is None
    assert live_study(JOB, options, judged({"large_codec": "bf16"})) is None, "it is another's"
    trained = Trained(monkeypatch)
    assert commands.train_on(JOB, options, record, "it won") == 3
    assert trained.fixed == [found.study_id] and not trained.begun
    assert trained.judged_by == [record.study_id], "a fallback is recorded there"
    said = capsys.readouterr().err
    assert f"(study {found.study_id})" in said and "torch was 0.1" in said


@pytest.mark.parametrize("reuse", ["auto", "never"])
def test_without_the_store_the_training_keeps_the_winner(
    options: Options,
    judged: Judge,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reuse: str,
) -> None:
    """It is lost between the trials and the training."""
    trained, record = Trained(monkeypatch), judged(CODED)
    Path(str(options.store)).write_text("no database")
    assert commands.train_on(HERE, replace(options, reuse=reuse), record, "it won") == 3
    assert trained.fixed == [record.study_id] and not trained.begun
    (line,) = capsys.readouterr().err.splitlines()
    assert "not tuned in its own steps" in line and "traces.db" in line


@pytest.mark.parametrize(
    ("launched_again", "live_again", "in_place", "kept"),
    [
        (False, False, False, "both"),
        (False, True, False, "both"),
        (True, False, False, "live"),
        (True, True, False, ""),
        (True, True, True, "live"),
    ],
)
def test_drift_after_a_live_stage_lets_codecs_be_judged_again(
    options: Options,
    judged: Judge,
    launched_again: bool,
    live_again: bool,
    in_place: bool,
    kept: str,
) -> None:
    """Once: a launched study that was itself such a judgement is not repeated."""
    store, record = TraceStore(options.store), judged(CODED)
    again = {**record.settings, "retune": launched_again}
    launched = finished(store, record, record.job_key, again)
    found = finished(store, record, "live", {"retune": live_again, "judged_by": launched.study_id})
    assert keep_drift(found, options, "slower", in_place=in_place) is bool(kept)
    assert bool(store.study(found.study_id).drift) is (kept in ("live", "both"))
    assert (known_study(JOB, options) is None) is (kept == "both")
    store.delete(launched.study_id)
    assert keep_drift(found, options, "slower", in_place=True), "without the deleted study"


def test_a_winner_that_is_no_codec_is_kept(
    options: Options,
    judged: Judge,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained, record = Trained(monkeypatch), judged({"local_steps": 4})
    assert commands.train_on(JOB, options, record, "it won") == 3
    assert trained.fixed == [record.study_id]
    (line,) = capsys.readouterr().err.splitlines()
    assert "local_steps=4" in line
