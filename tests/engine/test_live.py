"""A live study from its first trial to the training's end, with a training that is simulated."""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import OperationalError

from hvd_autosync.engine import live
from hvd_autosync.engine.failed_choices import failed_choices
from hvd_autosync.engine.live import Cost, LiveStudy, failed_trials
from hvd_autosync.engine.live_job import live_job, live_options
from hvd_autosync.engine.live_stage import live_study
from hvd_autosync.engine.mode import is_tuned
from hvd_autosync.engine.options import Options, options_environment, resolve_options
from hvd_autosync.engine.replay import verify
from hvd_autosync.engine.study_options import settings_of, tuning_key
from hvd_autosync.engine.training import TrainingContext
from hvd_autosync.engine.tuning import tune
from hvd_autosync.errors import ConfigurationError, StoreError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.live_runner import (
    LOST_IN_TRIAL,
    LiveRunner,
    RanksChanged,
    Training,
    TrainingEnded,
    TrainingLost,
)
from hvd_autosync.reporting import answer_line, ended_line
from hvd_autosync.reporting.live import cost_line
from hvd_autosync.reporting.words import span_text
from hvd_autosync.search_space import (
    Host,
    ModelProfile,
    ParameterProfile,
    RankReport,
    SearchSpace,
    Strategy,
    TrialResult,
    TrialSpec,
    TrialStatus,
    catalogue_knob,
)
from hvd_autosync.search_space.horovod_settings import launch_knobs
from hvd_autosync.search_space.knobs import CategoricalKnob, Value
from hvd_autosync.study.confirm import Comparison
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore
from hvd_autosync.util.packed_text import pack
from hvd_autosync.util.variables import JOB_VARIABLE, RESTARTED_VARIABLE

JOB = Job(("-np", "2"), ("python", "train.py"), (Host("a", 1), Host("b", 1)))
#: Makes a finished study of launched trials, whose winner has these values.
Judge = Callable[[dict[str, Value]], StudyRecord]
CODED: dict[str, Value] = {"large_codec": "fp16", "cycle_time_ms": 2.0}
MODEL = ModelProfile(
    tuple(
        ParameterProfile(f"{i}.weight", (512, 512), "float32", ready_order=i, ready_s=0.01 * i)
        for i in range(6)
    ),
    forward_s=0.02,
    backward_s=0.05,
)


class SimulatedTraining:
    """Rank 0: steps take longer under the default than in large buckets."""

    #: Those of the current test.
    made: ClassVar[list[SimulatedTraining]] = []

    def __init__(
        self, *, drifts: int = 0, dies_in: int | None = None, vanishes_in: int = 0
    ) -> None:
        self._vanishes_in = vanishes_in
        to_helper, from_helper = os.pipe(), os.pipe()
        self._write = os.fdopen(to_helper[1], "wb")
        self._sent = os.fdopen(from_helper[1], "wb")
        self.training = Training(os.fdopen(to_helper[0], "rb"), self._sent)
        self._drifts, self._dies_in, self._step = drifts, dies_in, 0
        self.received: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run, args=(from_helper[0],), daemon=True)
        self._thread.start()
        self.made.append(self)

    def hang_up(self) -> None:
        """Close both pipes, so that the threads which read them end."""
        self._sent.close()
        self._thread.join()
        self._write.close()
        self.training._reader.join()

    def _run(self, descriptor: int) -> None:
        with os.fdopen(descriptor, "rb") as lines:
            for line in lines:
                message = json.loads(line)
                self.received.append(message)
                self._react(message)

    def _react(self, message: dict[str, Any]) -> None:
        if message["type"] == "probe":
            link = {"ranks": 2, "latency_s": 1e-3, "bandwidth_bytes_per_s": 1e7}
            self._say({"type": "link", "link": link})
        elif message["type"] == "trial":
            trials = [each for each in self.received if each["type"] == "trial"]
            if self._vanishes_in == len(trials):
                self._say({"type": "reset", "vanished": True})
                return
            self._say({"type": "begun"})
            if self._dies_in == len(trials):
                self._write.close()
                return
            self._say({"type": "result", "result": self._result(message["spec"]).to_json()})
        elif message["type"] == "train":
            switched = {"step": self._step, "steps": self._step, "spent_s": 0.3 * self._step}
            self._say({"type": "switched", **switched})
            if self._drifts:
                self._drifts -= 1
                self._say({"type": "drift", "text": "steps have become slower"})
            else:
                self._say({"type": "end"})

    def _result(self, spec: dict[str, Any]) -> TrialResult:
        count = spec["warmup_steps"] + spec["measured_steps"]
        step_s = 0.1 if spec["strategy"].get("buckets") else 0.2
        steps = tuple(step_s + 0.001 * (i % 3) for i in range(count))
        self._step += count
        return TrialResult(
            TrialStatus.COMPLETED,
            ranks=tuple(RankReport(r, "ab"[r], steps, (0.0,) * count) for r in range(2)),
            warmup_steps=spec["warmup_steps"],
            setup_s=0.2,
            total_s=sum(steps),
            profile=MODEL if spec["profile"] else None,
            device="cpu",
        )

    def _say(self, message: dict[str, Any]) -> None:
        self._write.write(json.dumps(message).encode() + b"\n")
        self._write.flush()


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    while SimulatedTraining.made:
        SimulatedTraining.made.pop().hang_up()


def study_of(
    simulated: SimulatedTraining, options: Options, **given: Any
) -> tuple[LiveStudy, list[tuple[StudyRecord, Cost]]]:
    switches: list[tuple[StudyRecord, Cost]] = []
    study = LiveStudy(
        simulated.training,
        JOB,
        options,
        MagicMock(),
        launch_knobs(reinitializes=False),
        lambda *each: switches.append(each),
        **given,
    )
    return study, switches


def ends_when_not_tuned_again(study: LiveStudy, simulated: SimulatedTraining) -> list[str]:
    """Let a training end once it is said not to be tuned again; all notices, as they come."""
    notices: list[str] = []

    def on_notice(text: str) -> None:
        notices.append(text)
        if "not tuned again" in text:
            simulated._say({"type": "end"})  # which it waits for

    study._listener.on_notice.side_effect = on_notice  # type: ignore[attr-defined]
    return notices


def options(folder: Path, **given: Any) -> Options:
    return Options(store=str(folder / "traces.db"), mode="live", trials=4, **given)


def numeric_options(folder: Path, reuse: str) -> Options:
    """Options with a space file under which knobs that have choices are fixed."""
    space = folder / "space.toml"
    space.write_text(
        '[knobs.bucket_rule]\nfixed = "ordered"\n[knobs.large_exchange]\nfixed = "allreduce"\n'
    )
    return options(folder, reuse=reuse, space=str(space))


@pytest.mark.parametrize("adds_levels", [False, True])
def test_what_needs_process_sets_is_tried_where_horovod_can_have_them(
    adds_levels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = MagicMock(side_effect=TrainingEnded("the training has ended"))
    monkeypatch.setattr(live, "tune", tune)
    study, _ = study_of(SimulatedTraining(), options(tmp_path), adds_levels=adds_levels)
    with pytest.raises(TrainingEnded):
        study.run()
    left_out = tune.call_args.kwargs["unwanted"]
    for name in ("embedding", "large", "rest"):
        assert left_out[f"{name}_exchange"] == (set() if adds_levels else {"hierarchical"})
    assert not study._listener.on_notice.called  # type: ignore[attr-defined]


def test_what_ranks_have_vanished_in_is_in_the_store_and_no_further_choice_is_made(
    tmp_path: Path,
) -> None:
    simulated = SimulatedTraining(vanishes_in=2)
    study, _ = study_of(simulated, options(tmp_path))
    with pytest.raises(RanksChanged):
        study.run()
    store = TraceStore(str(tmp_path / "traces.db"))
    (record,) = store.studies()
    assert record.status is StudyStatus.RUNNING
    default, vanished = (trial.result for trial in store.trials(record.study_id))
    assert default is not None and default.status is TrialStatus.COMPLETED
    assert vanished is not None and vanished.status is TrialStatus.CRASHED
    assert not live.failed_choices(store)


def test_a_training_goes_on_under_what_its_own_steps_have_shown(tmp_path: Path) -> None:
    simulated = SimulatedTraining()
    study, switches = study_of(simulated, options(tmp_path))
    with pytest.raises(TrainingEnded):
        study.run()
    ((record, cost),) = switches
    conclusion = Conclusion.of(record)
    assert conclusion is not None and conclusion.best is not None
    assert conclusion.best.speedup == pytest.approx(2, rel=0.1)
    last = simulated.received[-1]
    assert (last["type"], last["strategy"]) == ("train", dict(record.winner or {}))
    assert record.settings["mode"] == "live"
    tried = {
        name for m in simulated.received if m["type"] == "trial" for name in m["spec"]["strategy"]
    }
    assert not tried & launch_knobs(reinitializes=False)
    assert f"since step {cost.step} it is" in cost_line(record, cost)
    store = TraceStore(str(tmp_path / "traces.db"))
    checks = [*verify(store, record, store.trials(record.study_id))]
    assert checks and all(each.same for each in checks), "its decisions can be made again"


@pytest.mark.parametrize("confirms", [False, True])
def test_a_tuning_that_is_ended_early_leaves_the_training(tmp_path: Path, confirms: bool) -> None:
    simulated, ended = SimulatedTraining(), list[tuple[AskTellStudy, StudyRecord | None]]()
    store = TraceStore(str(tmp_path / "traces.db"))

    def ends() -> bool:
        studies = store.studies()
        if not studies:
            return False
        study = AskTellStudy(store, studies[0])
        return study.proven is not None if confirms else bool(study.history)

    study, switches = study_of(
        simulated, options(tmp_path), ends=ends, on_end=lambda *each: ended.append(each)
    )
    with pytest.raises(TrainingEnded):
        study.run()
    ((seen, earlier),) = ended
    assert earlier is None
    assert switches == [] and seen.record.status is StudyStatus.RUNNING
    assert store.interrupted() == {seen.study_id}, "the next run of the job resumes it"
    last = simulated.received[-1]
    assert (last["type"], last["strategy"]) == ("train", dict(seen.proven or {}))
    assert (seen.proven is not None) == confirms
    what = "the confirmed strategy" if confirms else "no strategy is confirmed yet"
    assert what in ended_line(seen)


def test_a_training_goes_on_under_the_confirmed_strategy_after_an_outage_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulated, refusals = SimulatedTraining(), list[OperationalError]()
    begun = list[AskTellStudy]()
    connect = Engine.connect

    def connect_or_refuse(engine: Engine) -> Connection:
        if refusals:
            raise refusals.pop()
        return connect(engine)

    def ends() -> bool:
        if not begun or begun[0].proven is None:
            return False
        monkeypatch.setattr(begun[0].store._database, "_waits", True)  # as on a server
        refused = OperationalError("connect", {}, ConnectionError("connection refused"))
        # The study is let go, and then read: both find no server if they do not wait.
        refusals.extend([refused] * 2)
        return True

    monkeypatch.setattr(Engine, "connect", connect_or_refuse)
    study, switches = study_of(simulated, options(tmp_path), ends=ends)
    listener: MagicMock = study._listener  # type: ignore[assignment]
    listener.on_study_start.side_effect = lambda each, resumed: begun.append(each)
    with pytest.raises(TrainingEnded):
        study.run()
    assert switches == [] and refusals == []
    last = simulated.received[-1]
    assert begun[0].proven
    assert (last["type"], last["strategy"]) == ("train", dict(begun[0].proven))
    assert TraceStore(options(tmp_path).store).interrupted() == {begun[0].study_id}


def test_a_training_whose_tuning_was_ended_is_not_tuned_again(tmp_path: Path) -> None:
    simulated = SimulatedTraining(drifts=1)
    study, switches = study_of(simulated, options(tmp_path), ends=lambda: bool(switches))
    ends_when_not_tuned_again(study, simulated)
    with pytest.raises(TrainingEnded):
        study.run()
    ((record, _),) = switches
    last = simulated.received[-1]
    assert (last["type"], last["strategy"]) == ("train", dict(record.winner or {}))
    assert record.winner, "so it is another than the default"
    assert TraceStore(str(tmp_path / "traces.db")).study(record.study_id).drift, "for the next run"


def test_the_end_of_a_second_tuning_leaves_the_result_of_the_first(tmp_path: Path) -> None:
    simulated, ended = SimulatedTraining(drifts=1), list[tuple[AskTellStudy, StudyRecord | None]]()
    store = TraceStore(str(tmp_path / "traces.db"))
    study, switches = study_of(
        simulated,
        options(tmp_path),
        ends=lambda: len(store.studies()) > 1,
        on_end=lambda *each: ended.append(each),
    )
    with pytest.raises(TrainingEnded):
        study.run()
    (((first, _),), ((second, earlier),)) = switches, ended
    assert earlier == first and second.study_id != first.study_id
    trained = [each["strategy"] for each in simulated.received if each["type"] == "train"]
    assert trained == [dict(first.winner or {})] * 2 and first.winner
    assert f"keeps the result of study {first.study_id}" in ended_line(second, earlier)


def test_a_second_tuning_that_fails_leaves_the_result_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it has begun to measure the default, and knows another strategy that is faster."""
    simulated, runners = SimulatedTraining(drifts=1), list[LiveRunner]()

    def tune_once(*args: Any, runner: LiveRunner, **given: Any) -> StudyRecord:
        runners.append(runner)
        if len(runners) == 1:
            return tune(*args, runner=runner, **given)
        for buckets in (0, 3):
            runner.run(TrialSpec("one", Strategy({"buckets": buckets})), Limits(), lambda _: None)
        raise StoreError("the store is full", hint="Free some space.")

    monkeypatch.setattr(live, "tune", tune_once)
    study, switches = study_of(simulated, options(tmp_path))
    with pytest.raises(StoreError, match="the store is full"):
        study.run()
    simulated.training.stop("the store is full")
    while simulated.received[-1]["type"] != "stop":
        time.sleep(0.001)
    ((first, _),) = switches
    switch = next(i for i, each in enumerate(simulated.received) if each["type"] == "train")
    after = simulated.received[switch + 1 :]
    assert [each["type"] for each in after] == ["trial", "use"] * 2 + ["use", "stop"]
    winner = dict(first.winner or {})
    assert winner.get("buckets")
    assert all(each["best"]["strategy"] == winner for each in after if each["type"] == "trial")
    assert all(each["strategy"] == winner for each in after if each["type"] == "use")


@pytest.mark.parametrize(
    ("reuse", "failed", "kept"),
    [
        ("auto", {"buckets": 4}, {"buckets": 3}),
        ("auto", {"buckets": 3}, {}),
        ("never", {"buckets": 4}, {}),
    ],
    ids=["kept", "failed", "never"],
)
def test_a_training_that_is_started_again_after_drift_keeps_the_earlier_winner(
    tmp_path: Path,
    reuse: str,
    failed: dict[str, Value],
    kept: dict[str, Value],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless that was the strategy of the trial in which it has failed, or nothing is reused."""
    chosen = options(tmp_path, reuse=reuse)
    known = launched_winner(chosen, Strategy({"buckets": 3}))
    store = TraceStore(chosen.store)
    store.keep_drift(known.study_id, ["steps have become slower"])
    again = store.create_study(job_key="again", command=(), settings={}, versions={}).study_id
    lost = TrialResult(TrialStatus.CRASHED, f"the training ended {LOST_IN_TRIAL}")
    store.tell(again, store.ask(again, Strategy(failed), "search", {}), lost)
    monkeypatch.setenv("HVD_AUTOSYNC_RESTARTED", again)
    simulated = SimulatedTraining(dies_in=2)
    study, _ = study_of(simulated, chosen)
    with pytest.raises(TrainingLost):
        study.run()
    first, second = (each for each in simulated.received if each["type"] == "trial")
    (use,) = (each for each in simulated.received if each["type"] == "use")
    assert first["best"]["strategy"] == second["best"]["strategy"] == use["strategy"] == kept


def test_trials_that_are_faster_than_the_default_cost_no_time(tmp_path: Path) -> None:
    study, switches = study_of(SimulatedTraining(), options(tmp_path))
    with pytest.raises(TrainingEnded):
        study.run()
    ((record, _),) = switches
    conclusion = Conclusion.of(record)
    assert conclusion is not None
    cost = Cost(step=100, steps=100, spent_s=0.5 * 100 * conclusion.default_s)
    line = cost_line(record, cost)
    assert line.startswith("tuning cost the training no time: its 100 steps took ")
    assert f"under the default they take {span_text(100 * conclusion.default_s)}" in line


@pytest.mark.parametrize(
    ("reuse", "restarted"), [("auto", False), ("auto", True), ("never", False), ("never", True)]
)
def test_drift_opens_the_search_again(
    tmp_path: Path, reuse: str, restarted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short one after the earlier study, or one from the beginning where nothing is reused."""
    chosen = numeric_options(tmp_path, reuse)
    store = TraceStore(chosen.store)
    if restarted:
        with pytest.raises(TrainingLost):
            study_of(SimulatedTraining(dies_in=2), chosen)[0].run()
        (lost,) = store.studies()
        store.let_go(lost.study_id)
        monkeypatch.setenv(RESTARTED_VARIABLE, lost.study_id)
    simulated = SimulatedTraining(drifts=1)
    study, switches = study_of(simulated, chosen)
    with pytest.raises(TrainingEnded):
        study.run()
    first, second = (record for record, _ in switches)
    assert not restarted or first.study_id == lost.study_id, "it is resumed"
    assert store.study(first.study_id).drift == ("steps have become slower",)
    assert second.study_id != first.study_id
    assert second.settings["retune"] is (reuse == "auto")
    conclusion = Conclusion.of(second)
    assert conclusion is not None and not conclusion.source


def test_drift_opens_no_search_where_results_are_only_reused(tmp_path: Path) -> None:
    """It would take over the same result each time."""
    chosen = options(tmp_path, reuse="only")
    known = launched_winner(chosen, Strategy({"buckets": 3}))
    simulated = SimulatedTraining(drifts=1)
    study, switches = study_of(simulated, chosen)
    notices = ends_when_not_tuned_again(study, simulated)
    with pytest.raises(TrainingEnded):
        study.run()
    assert [record.study_id for record, _ in switches] == [known.study_id]
    assert sum("not tuned again" in text for text in notices) == 1
    assert TraceStore(chosen.store).study(known.study_id).drift, "for a run that may tune"


def test_drift_in_a_live_stage_lets_its_codecs_be_judged_again(
    tmp_path: Path, judged: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, record = options(tmp_path, allow=("codec",)), judged(CODED)
    store = TraceStore(chosen.store)
    settings = {"judged_by": record.study_id, "retune": True}
    found = store.create_study(job_key="live", command=(), settings=settings, versions={})
    tune = MagicMock(side_effect=[found, TrainingEnded("the training has ended")])
    monkeypatch.setattr(live, "tune", tune)
    monkeypatch.setattr(live, "training_context", lambda *_: TrainingContext())
    study, _ = study_of(SimulatedTraining(drifts=1), chosen, judged=record)
    with pytest.raises(TrainingEnded):
        study.run()
    assert store.study(record.study_id).drift == ("steps have become slower",)
    assert store.study(found.study_id).drift, "and the training was tuned again at once"
    assert tune.call_count == 2


def test_a_training_that_drifts_for_ever_is_not_tuned_for_ever(tmp_path: Path) -> None:
    simulated = SimulatedTraining(drifts=4)
    study, switches = study_of(simulated, options(tmp_path))
    said: list[str] = []

    def on_notice(text: str) -> None:
        if "is not again" in text:
            said.append(text)
            simulated._say({"type": "end"})  # which it waits for

    study._listener.on_notice.side_effect = on_notice  # type: ignore[attr-defined]
    with pytest.raises(TrainingEnded):
        study.run()
    assert said == ["the training was tuned 4 times, and is not again"]
    assert len(switches) == 4
    assert is_tuned(JOB, options(tmp_path)), "the next run of the job does not begin with trials"


def test_a_strategy_in_whose_trial_the_training_fails_is_known(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    study, _ = study_of(SimulatedTraining(dies_in=2), chosen)
    with pytest.raises(TrainingLost):
        study.run()
    (record,) = TraceStore(chosen.store).studies()
    assert record.status is StudyStatus.RUNNING, "the next run resumes it"
    assert record.job_key == tuning_key(JOB, chosen, {})
    trials = TraceStore(chosen.store).trials(record.study_id)
    assert trials[1].result is not None
    assert trials[1].result.reason.endswith(LOST_IN_TRIAL)
    lost = {(record.study_id, 1): trials[1]}
    assert failed_trials(JOB, chosen) == lost
    TraceStore(chosen.store).finish(record.study_id, StudyStatus.FINISHED, {}, None)
    assert failed_trials(JOB, chosen) == lost, "it may be the last trial"


@pytest.mark.parametrize("reuse", ["auto", "never"])
def test_a_training_that_is_started_again_does_not_fail_in_the_same_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reuse: str
) -> None:
    """Also where all knobs of the trial that differ are numbers, which no later job leaves out."""
    chosen = numeric_options(tmp_path, reuse)
    store = TraceStore(chosen.store)
    with pytest.raises(TrainingLost):
        study_of(SimulatedTraining(dies_in=2), chosen)[0].run()
    (record,) = store.studies()
    store.let_go(record.study_id)
    _, lost = store.trials(record.study_id)
    assert not failed_choices(store, {record.job_key}), "else it would be known by these"
    monkeypatch.setenv(RESTARTED_VARIABLE, record.study_id)
    simulated = SimulatedTraining()
    with pytest.raises(TrainingEnded):
        study_of(simulated, chosen)[0].run()
    (same,) = store.studies()
    assert (same.study_id, same.status) == (record.study_id, StudyStatus.FINISHED)
    tried = [each["spec"]["strategy"] for each in simulated.received if each["type"] == "trial"]
    assert tried and dict(lost.strategy) not in tried
    # What follows in this training uses its own result, and that of no other.
    with pytest.raises(TrainingEnded):
        study_of(SimulatedTraining(), chosen)[0].run()
    assert len(store.studies()) == 1
    monkeypatch.delenv(RESTARTED_VARIABLE)
    with pytest.raises(TrainingEnded):
        study_of(SimulatedTraining(), chosen)[0].run()
    assert len(store.studies()) == (1 if reuse == "auto" else 2)


def test_a_study_that_is_resumed_goes_on_under_the_best_that_it_has_measured(
    tmp_path: Path,
) -> None:
    chosen = options(tmp_path)
    with pytest.raises(RanksChanged):
        study_of(SimulatedTraining(vanishes_in=3), chosen)[0].run()
    store = TraceStore(chosen.store)
    (record,) = store.studies()
    store.let_go(record.study_id)
    default, fast, _ = (trial.strategy for trial in store.trials(record.study_id))
    assert fast.get("buckets") and not default.get("buckets")
    simulated = SimulatedTraining()
    with pytest.raises(TrainingEnded):
        study_of(simulated, chosen)[0].run()
    assert store.studies()[0].study_id == record.study_id
    first = next(each for each in simulated.received if each["type"] == "trial")
    assert first["best"]["strategy"] == dict(fast)


@pytest.mark.parametrize(
    ("name", "resumed"), [("buckets", True), ("cycle_time_ms", False), ("large_exchange", False)]
)
def test_an_interrupted_study_with_what_is_not_tried_now_is_not_resumed(
    name: str, resumed: bool, tmp_path: Path
) -> None:
    """Its other trials would fail the training, or measure what they do not change."""
    chosen = options(tmp_path)
    store = TraceStore(chosen.store)
    settings = settings_of(chosen).to_json()
    key = tuning_key(JOB, chosen, {})
    before = store.create_study(job_key=key, command=(), settings=settings, versions={})
    store.describe_task(before.study_id, None, SearchSpace((catalogue_knob(name),)))
    store.let_go(before.study_id)
    study, _ = study_of(SimulatedTraining(dies_in=1), chosen)
    with pytest.raises(TrainingLost):
        study.run()
    notices = [call.args[0] for call in study._listener.on_notice.call_args_list]  # type: ignore[attr-defined]
    assert any(f"not tried any more ({name})" in each for each in notices) is not resumed
    newest = store.studies()[0]
    assert (newest.study_id == before.study_id) is resumed
    assert store.study(before.study_id).status is (
        StudyStatus.RUNNING if resumed else StudyStatus.FAILED
    )


def launched_winner(options: Options, winner: Strategy) -> StudyRecord:
    """A finished study of the job by launched trials, in the store."""
    store = TraceStore(options.store)
    settings = settings_of(replace(options, mode="launched")).to_json()
    key = tuning_key(JOB, options, {})
    study = store.create_study(job_key=key, command=(), settings=settings, versions={})
    names = ("controller", "cycle_time_ms", "buckets", "large_exchange")
    store.describe_task(study.study_id, None, SearchSpace(tuple(map(catalogue_knob, names))))
    compared = (Comparison(winner, 4.0, 3.9, 4.1, 3),)
    found = Conclusion(winner, "it won", "", 0.2, compared).to_json()
    store.finish(study.study_id, StudyStatus.FINISHED, found, winner)
    return store.study(study.study_id)


@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ({"cycle_time_ms": 5.0}, "needs cycle_time_ms=5.0 from the start"),
        (
            {"large_exchange": "hierarchical"},
            "has large_exchange=hierarchical, which is not tried live",
        ),
        ({}, ""),
    ],
)
def test_a_winner_that_needs_another_start_is_not_taken_over(
    tmp_path: Path, changed: dict[str, Value], needed: str
) -> None:
    """Without it steps are slower than under that winner, which would look like drift."""
    chosen = options(tmp_path)
    unchanged = {name: catalogue_knob(name).default for name in ("controller", "cycle_time_ms")}
    winner = Strategy({**unchanged, "buckets": 3, **changed})
    known = launched_winner(chosen, winner)
    simulated = SimulatedTraining()
    study, switches = study_of(simulated, chosen)
    with pytest.raises(TrainingEnded):
        study.run()
    ((record, _),) = switches
    assert (record.study_id == known.study_id) is not bool(needed)
    last = simulated.received[-1]
    assert last["strategy"] == dict(record.winner or {})
    assert last["expected_step_s"] == pytest.approx(0.1 if needed else 0.05, rel=0.1)
    notices = [call.args[0] for call in study._listener.on_notice.call_args_list]  # type: ignore[attr-defined]
    if needed:
        assert not set(last["strategy"]) & launch_knobs(reinitializes=False)
        assert StudySettings.from_json(record.settings).trials == chosen.trials
        assert any(f"its winner {needed}" in each for each in notices)
        only = replace(chosen, store=str(tmp_path / "only.db"), reuse="only")
        launched_winner(only, winner)
        with pytest.raises(ConfigurationError, match=needed):
            study_of(SimulatedTraining(), only)[0].run()
    else:
        assert not [each for each in simulated.received if each["type"] == "trial"]


def test_a_training_that_only_reuses_says_once_what_it_runs_under(tmp_path: Path) -> None:
    """Its steps may drift, and again: no other result would be found."""
    chosen = options(tmp_path, reuse="only")
    unchanged = {name: catalogue_knob(name).default for name in ("controller", "cycle_time_ms")}
    known = launched_winner(chosen, Strategy({**unchanged, "buckets": 3}))
    simulated = SimulatedTraining(drifts=2)
    study, switches = study_of(simulated, chosen)
    notices = ends_when_not_tuned_again(study, simulated)
    with pytest.raises(TrainingEnded):
        study.run()
    ((record, _),) = switches
    assert record.study_id == known.study_id
    assert len(notices) == 2 and "this job was tuned before" in notices[0]
    assert notices[1].endswith(
        "because --autosync-reuse is 'only'; to tune it, run the job with auto"
    )
    assert TraceStore(chosen.store).study(known.study_id).drift, "for that run"


def fail_in_trial(store: TraceStore, job_key: str, choice: str, mode: str = "live") -> None:
    """Let a training fail in the trial of this exchange."""
    settings = settings_of(Options(mode=mode)).to_json()
    failed = store.create_study(
        job_key=job_key, command=("python", "other.py"), settings=settings, versions={}
    )
    strategy = Strategy({"buckets": 3, "large_exchange": choice})
    number = store.ask(failed.study_id, strategy, "model", {})
    lost = TrialResult(TrialStatus.CRASHED, f"the training ended {LOST_IN_TRIAL}")
    store.tell(failed.study_id, number, lost)


@pytest.mark.parametrize(
    ("jobs", "left_out"),
    [
        (["another"], False),
        (["another", "another"], False),
        (["another", "a third"], True),
        (["own"], True),
        (["own, with codecs"], True),
    ],
)
def test_what_has_failed_in_one_other_job_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: list[str], left_out: bool
) -> None:
    """The script of that job may have failed by itself, at the same step each time."""
    tune = MagicMock(side_effect=TrainingEnded("the training has ended"))
    monkeypatch.setattr(live, "tune", tune)
    chosen = options(tmp_path)
    with_codecs = replace(chosen, allow=("codec",))
    keys = {
        "own": tuning_key(JOB, chosen, {}),
        "own, with codecs": tuning_key(JOB, with_codecs, {}),
    }
    for job in jobs:
        fail_in_trial(TraceStore(chosen.store), keys.get(job, job), "sharded")
    study, _ = study_of(SimulatedTraining(), chosen)
    with pytest.raises(TrainingEnded):
        study.run()
    assert ("sharded" in tune.call_args.kwargs["unwanted"]["large_exchange"]) is left_out
    notices = [call.args[0] for call in study._listener.on_notice.call_args_list]  # type: ignore[attr-defined]
    assert any("large_exchange=sharded" in each for each in notices) is left_out


def test_kinds_of_strategies_that_have_failed_live_are_not_tried_so_again(tmp_path: Path) -> None:
    chosen = options(tmp_path)
    store = TraceStore(chosen.store)
    fail_in_trial(store, "another", "sharded")
    fail_in_trial(store, "a third", "sharded")
    fail_in_trial(store, "another", "factors", mode="launched")
    fail_in_trial(store, "a third", "factors", mode="launched")
    assert failed_choices(store) == {"large_exchange": {"sharded"}}
    simulated = SimulatedTraining(drifts=1)
    study, switches = study_of(simulated, chosen)
    with pytest.raises(TrainingEnded):
        study.run()
    spaces = [record.space for record, _ in switches]
    assert len(spaces) == 2
    for space in filter(None, spaces):
        knob = space["large_exchange"]
        assert isinstance(knob, CategoricalKnob)
        assert "sharded" not in knob.choices and "allreduce" in knob.choices
    notices = [call.args[0] for call in study._listener.on_notice.call_args_list]  # type: ignore[attr-defined]
    (told,) = (each for each in notices if "failed in such a trial" in each)
    assert "large_exchange=sharded" in told


def test_damaged_studies_and_trials_of_other_jobs_are_left_out(
    tmp_path: Path, add_damaged: Callable[[TraceStore], str]
) -> None:
    chosen = options(tmp_path)
    store = TraceStore(chosen.store)
    add_damaged(store)
    settings = settings_of(replace(chosen, mode="live")).to_json()
    other = store.create_study(job_key="another", command=(), settings=settings, versions={})
    store.ask(other.study_id, Strategy(), "model", {})
    with sqlite3.connect(store.name) as connection:
        connection.execute("UPDATE hvd_autosync_trials SET info = '{'")
    connection.close()
    assert failed_choices(store) == {}
    assert failed_trials(JOB, chosen) == {}


def test_the_job_of_the_flag_is_that_of_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = {"hosts": ["a", "a", "b"], "command": ["python", "train.py"]}
    assert live_job(begin).hosts == (Host("a", 2), Host("b", 1))
    spread = {**begin, "hosts": ["a", "b", "a"]}
    assert live_job(spread).hosts == (Host("a", 2), Host("b", 1)), "not in order of rank"
    back = {**begin, "hosts": ["b", "a", "a"]}
    assert live_job(back).hosts[0].name == "b"
    assert live_job({**back, "elastic": True}).hosts == live_job({**begin, "elastic": True}).hosts
    monkeypatch.setenv("HOROVOD_CONTROLLER", "gloo")
    assert live_job(begin).controller == "gloo"
    monkeypatch.setenv(JOB_VARIABLE, pack(json.dumps(JOB.to_json())))
    assert live_job(begin) == JOB


def test_the_helper_knows_the_script_that_the_flag_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that begins after a reset of an elastic job, when the script was edited."""
    script = tmp_path / "train.py"
    script.write_text("one")
    job = replace(JOB, command=("python", str(script)), digests=())
    monkeypatch.setenv(JOB_VARIABLE, pack(json.dumps(job.to_json())))
    script.write_text("two")
    begin = {"hosts": ["a", "b"], "command": ["python", str(script)], "elastic": True}
    assert live_job(begin).key == job.key != replace(job, digests=()).key


def test_the_home_folder_is_the_same_for_flag_and_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    section = {"store": "~/traces.db", "space": "~/space.toml"}
    of_flag = resolve_options(argparse.Namespace(), {}, section)
    assert of_flag.space == str(tmp_path / "space.toml")
    for name, value in options_environment(of_flag, {}).items():
        monkeypatch.setenv(name, value)
    of_helper = live_options()
    assert (of_helper.store, of_helper.space) == (of_flag.store, of_flag.space)
    nobody = "~nobody-has-this-name/traces.db"
    assert resolve_options(argparse.Namespace(), {}, {"store": nobody}).store == nobody


def test_options_reach_the_helper_as_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = Options(store="traces.db", trials=7, minutes=2.5, mode="live", transfer="never")
    for name, value in options_environment(given).items():
        monkeypatch.setenv(name, value)
    assert live_options() == Options(
        store=str(tmp_path / "traces.db"), trials=7, minutes=2.5, mode="live", transfer="never"
    )
    for name, value in options_environment(Options(seed=3)).items():
        monkeypatch.setenv(name, value)
    assert live_options() == Options(seed=3, mode="live"), "what the environment says is overruled"
    monkeypatch.setenv("HVD_AUTOSYNC_ALLOW", "codec")
    with pytest.raises(ConfigurationError, match="cannot be tuned live"):
        live_options()


def test_a_live_stage_keeps_the_codec_and_is_compared_with_its_beginning(
    tmp_path: Path, judged: Judge
) -> None:
    chosen, record = options(tmp_path, allow=("codec",)), judged(CODED)
    assert live_study(JOB, chosen, record) is None
    simulated = SimulatedTraining()
    study, switches = study_of(simulated, chosen, judged=record)
    with pytest.raises(TrainingEnded):
        study.run()
    ((found, _),) = switches
    assert found.settings["judged_by"] == record.study_id
    assert found.winner is not None and found.space is not None and record.winner is not None
    assert found.winner["buckets"]
    assert all(found.winner[name] == value for name, value in CODED.items())
    trials = [m["spec"]["strategy"] for m in simulated.received if m["type"] == "trial"]
    assert trials[0] == {}, "the training as it has begun"
    assert all(each["large_codec"] == "fp16" for each in trials[1:])
    answer = answer_line(found)
    assert f"faster than the winner of study {record.study_id}" in answer
    assert "buckets=" in answer and "codec" not in answer
    store = TraceStore(chosen.store)
    assert found.job_key not in (record.job_key, tuning_key(JOB, replace(chosen, allow=()), {}))
    checks = list(verify(store, found, store.trials(found.study_id)))
    assert all(check.same for check in checks), checks
    known = live_study(JOB, chosen, record)
    assert known is not None and known.study_id == found.study_id
    assert live_study(JOB, replace(chosen, reuse="never"), record) is None
    other = judged({"large_codec": "bf16"})
    assert live_study(JOB, chosen, other) is None, "its held knobs identify it"


def test_an_interrupted_live_stage_is_resumed(tmp_path: Path, judged: Judge) -> None:
    chosen, record = options(tmp_path, allow=("codec",)), judged(CODED)
    study, _ = study_of(SimulatedTraining(dies_in=1), chosen, judged=record)
    with pytest.raises(TrainingLost):
        study.run()
    store = TraceStore(chosen.store)
    (begun,) = (s for s in store.studies() if s.study_id != record.study_id)
    store.let_go(begun.study_id)
    study, switches = study_of(SimulatedTraining(), chosen, judged=record)
    with pytest.raises(TrainingEnded):
        study.run()
    assert [found.study_id for found, _ in switches] == [begun.study_id]


def test_a_held_codec_is_not_what_has_failed(tmp_path: Path, judged: Judge) -> None:
    chosen, record = options(tmp_path, allow=("codec",)), judged(CODED)
    study, _ = study_of(SimulatedTraining(dies_in=2), chosen, judged=record)
    with pytest.raises(TrainingLost):
        study.run()
    store = TraceStore(chosen.store)
    assert "large_codec" not in failed_choices(store)
    (begun,) = (s for s in store.studies() if s.study_id != record.study_id)
    lost = store.trials(begun.study_id)[1].result
    assert lost is not None and lost.reason.endswith(LOST_IN_TRIAL)


def test_the_default_of_a_live_stage_is_as_the_training_has_begun(
    tmp_path: Path, judged: Judge
) -> None:
    """If the training fails under it, that is no failure of a strategy."""
    chosen, record = options(tmp_path, allow=("codec",)), judged(CODED)
    study, _ = study_of(SimulatedTraining(dies_in=1), chosen, judged=record)
    with pytest.raises(TrainingLost):
        study.run()
    store = TraceStore(chosen.store)
    (begun,) = (s for s in store.studies() if s.study_id != record.study_id)
    (first,) = store.trials(begun.study_id)
    assert first.result is None
