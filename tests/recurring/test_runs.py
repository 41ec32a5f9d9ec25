"""Recurring jobs: input, output and stored record of a run."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import tuning_key
from hvd_autosync.engine.training import OnFallback, RunOutcome, RunReport, TrainingContext
from hvd_autosync.errors import ConfigurationError, StoreError
from hvd_autosync.launch.job import Job
from hvd_autosync.recurring import runs as recurring_runs
from hvd_autosync.recurring.runs import outcomes_of, plan_run, record_of, run_recurring, strategy_at
from hvd_autosync.search_space import Host, SearchSpace, Strategy, catalogue_knob
from hvd_autosync.search_space.catalogue import is_exact
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import StudyStatus, TraceStore

pytest.importorskip("horovod", reason="Horovod is not installed: make setup builds it")

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_recurring.py"
JOB = Job(("-np", "2"), ("python", "train.py", "--token", "abc"), (Host("localhost", 2),))


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(recurring=True, search="binary", store=str(tmp_path / "traces.db"))


class Trainings:
    """In place of real trainings: answers with what was prepared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *ended: RunOutcome) -> None:
        self.strategies: list[Strategy] = []
        self._ended = list(ended)
        monkeypatch.setattr(recurring_runs, "run_training", self._run)

    def _run(
        self,
        job: Job,
        strategy: Strategy,
        context: TrainingContext,
        *,
        recurring: bool,
        on_fallback: OnFallback | None,
    ) -> RunOutcome:
        assert recurring and context.expected_step_s == 0
        self.strategies.append(strategy)
        ended = self._ended.pop(0)
        if ended.report is not None and ended.report.fell_back and on_fallback is not None:
            on_fallback(64, "the loss has risen")
        return ended


def came_to(metric: float, samples: int = 960) -> RunOutcome:
    return RunOutcome(0, report=RunReport(metric, 0.5, samples, 60, without_barrier=True))


def test_each_run_tries_the_next_share(
    monkeypatch: pytest.MonkeyPatch, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics = [0.9, 0.9, 0.9, 0.7, 0.7, 0.7, 0.9]
    trainings = Trainings(monkeypatch, *map(came_to, metrics))
    for _ in metrics:
        assert run_recurring(JOB, options) == 0
    assert trainings.strategies[0] == Strategy()
    shares = [each["sync_share"] for each in trainings.strategies[1:]]
    assert shares == [0.5, 0.25, 0.125, 0.1875, 0.21875, 0.25]
    assert trainings.strategies[1] == Strategy(
        {"protocol": "asp", "sync_share": 0.5, "total_samples": 960}
    )
    said = capsys.readouterr().err
    assert "which has ended: f = 0.25" in said and "found f = 0.25" in said
    kept = TraceStore(options.store).runs(JOB.key)
    assert [each.number for each in kept] == list(range(7))
    assert [each.metric for each in kept] == metrics
    assert "abc" not in " ".join(kept[0].command)


def test_a_run_is_one_of_the_script_that_it_has_run(
    monkeypatch: pytest.MonkeyPatch, options: Options, tmp_path: Path
) -> None:
    """The script may be edited while it trains."""
    script = tmp_path / "train.py"
    script.write_text("one")
    job = Job(("-np", "2"), ("python", str(script)), (Host("localhost", 2),))
    key = job.key

    def train(*args: object, **keywords: object) -> RunOutcome:
        script.write_text("two")
        return came_to(0.9)

    monkeypatch.setattr(recurring_runs, "run_training", train)
    run_recurring(job, options)
    assert {each.job_key for each in TraceStore(options.store).runs()} == {key}
    assert plan_run(replace(job, digests=()), options, TraceStore(options.store)).number == 1


def test_other_knobs_are_the_winners_of_before_and_stay(
    monkeypatch: pytest.MonkeyPatch, options: Options
) -> None:
    def tuned(cycle_time_ms: float) -> None:
        store = TraceStore(options.store)
        study = store.create_study(
            job_key=tuning_key(JOB, options, {}),
            command=(),
            settings=StudySettings().to_json(),
            versions={},
        )
        store.finish(
            study.study_id, StudyStatus.FINISHED, {}, Strategy({"cycle_time_ms": cycle_time_ms})
        )

    monkeypatch.setattr(recurring_runs, "training_context", lambda study, store: TrainingContext())
    trainings = Trainings(monkeypatch, came_to(0.9), came_to(0.9))
    tuned(5.0)
    run_recurring(JOB, options)
    tuned(7.0)
    run_recurring(JOB, options)
    assert [each["cycle_time_ms"] for each in trainings.strategies] == [5.0, 5.0]
    assert trainings.strategies[1]["sync_share"] == 0.5


@pytest.mark.parametrize("changed", ["fallback", "tolerance", "groups"])
def test_lossy_knobs_do_not_outlast_their_admission(
    monkeypatch: pytest.MonkeyPatch,
    options: Options,
    capsys: pytest.CaptureFixture[str],
    changed: str,
) -> None:
    options = replace(options, allow=("codec",), loss_tolerance=0.1)
    store, winner = TraceStore(options.store), Strategy({"buckets": 2, "rest_codec": "bf16"})
    study_id = store.create_study(
        job_key=tuning_key(JOB, options, {}),
        command=(),
        settings=StudySettings(loss_tolerance=0.1).to_json(),
        versions={},
    ).study_id
    space = SearchSpace((catalogue_knob("buckets"), catalogue_knob("rest_codec")))
    store.describe_task(study_id, None, space)
    verdict = Verdict(winner, Outcome.ADMITTED, 1.0, 1.0, 0.1, "", 0.01, 4)
    outcome = Conclusion(winner, "it won", "", 0.1, verdicts=(verdict,)).to_json()
    store.finish(study_id, StudyStatus.FINISHED, outcome, winner)
    first = RunOutcome(0, report=RunReport(0.9, 0.5, 960, 60, fell_back=changed == "fallback"))
    trainings = Trainings(monkeypatch, first, came_to(0.9))
    run_recurring(JOB, options)
    assert trainings.strategies == [winner]
    kept = [fallback.strategy for fallback in store.study(study_id).fallbacks]
    assert kept == [winner] * (changed == "fallback")
    if changed == "tolerance":
        options = replace(options, loss_tolerance=0.01)
    elif changed == "groups":
        options = replace(options, allow=())
    run_recurring(JOB, options)
    assert is_exact(strategy_at(trainings.strategies[1], 1, 0))
    said = capsys.readouterr().err
    assert "lossy knobs of the first run are left out" in said
    assert ("the loss guard has ended this strategy at step 64" in said) is (changed == "fallback")


@pytest.mark.parametrize("judged", [True, False])
def test_a_newer_study_judges_the_lossy_knobs_of_the_first_run(
    judged: bool, monkeypatch: pytest.MonkeyPatch, options: Options
) -> None:
    """Its own winner is exact; it has found the other one worse, or has not tried its codec."""
    options = replace(options, allow=("codec",), loss_tolerance=0.1)
    store, lossy = TraceStore(options.store), Strategy({"rest_codec": "bf16"})
    trainings = Trainings(monkeypatch, came_to(0.9), came_to(0.9))
    for winner, outcome in ((lossy, Outcome.ADMITTED), (Strategy({"buckets": 2}), Outcome.WORSE)):
        exact = winner != lossy
        names = ["buckets"] if exact and not judged else ["buckets", "rest_codec"]
        study_id = store.create_study(
            job_key=tuning_key(JOB, options, {}),
            command=(),
            settings=StudySettings(loss_tolerance=0.1).to_json(),
            versions={},
        ).study_id
        store.describe_task(study_id, None, SearchSpace(tuple(map(catalogue_knob, names))))
        verdicts = (Verdict(lossy, outcome, 1.0, 1.0, 0.1, "", 0.01, 4),) if len(names) > 1 else ()
        conclusion = Conclusion(winner, "it won", "", 0.1, verdicts=verdicts).to_json()
        store.finish(study_id, StudyStatus.FINISHED, conclusion, winner)
        run_recurring(JOB, options)
    assert trainings.strategies[0] == lossy
    assert strategy_at(trainings.strategies[1], 1, 0) == Strategy({"buckets": 2})


def test_a_share_that_fails_twice_is_below_the_target_and_the_status_is_ours(
    monkeypatch: pytest.MonkeyPatch, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = RunOutcome(3, report=RunReport(0.95, 0.1, 100, 5))
    Trainings(monkeypatch, came_to(0.9), fails, fails)
    run_recurring(JOB, options)
    for tried_next in ("0.5", "0.75"):
        assert run_recurring(JOB, options) == 3
        last = TraceStore(options.store).runs(JOB.key)[-1]
        assert (last.share, last.status, last.samples) == (0.5, "failed", 0)
        assert math.isnan(last.metric)
        assert f"the next run tries f = {tried_next}:" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "stopped"), [(137, False), (143, True), (1, True), (0, True)])
def test_a_run_that_was_stopped_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, options: Options, status: int, stopped: bool
) -> None:
    said = RunReport(0.9, 0.1, 100, 5)
    Trainings(monkeypatch, RunOutcome(status, report=said, stopped=stopped))
    assert run_recurring(JOB, options) == status
    assert TraceStore(options.store).runs(JOB.key) == []


@pytest.mark.parametrize(
    ("operation", "message"),
    [("keep_run", "could not be recorded in the store"), ("runs", "could not be planned")],
)
def test_if_the_store_fails_after_a_run_its_result_is_printed_and_its_status_returned(
    monkeypatch: pytest.MonkeyPatch,
    options: Options,
    capsys: pytest.CaptureFixture[str],
    operation: str,
    message: str,
) -> None:
    def train(*args: object, **keywords: object) -> RunOutcome:
        monkeypatch.setattr(TraceStore, operation, fail)
        return came_to(0.875)

    def fail(*args: object) -> None:
        raise StoreError("the database is locked", hint="Try again.")

    monkeypatch.setattr(recurring_runs, "run_training", train)
    assert run_recurring(JOB, options) == 0
    said = capsys.readouterr().err
    assert "metric 0.875" in said
    assert f"{message}: the database is locked. Try again." in said


def test_a_run_of_which_nothing_is_known_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainings(monkeypatch, RunOutcome(0))
    assert run_recurring(JOB, options) == 0
    assert TraceStore(options.store).runs() == []
    assert "call hvd_autosync.outcome" in capsys.readouterr().err.replace("Call", "call")


def test_without_samples_every_run_is_under_bsp_alone(
    monkeypatch: pytest.MonkeyPatch, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    trainings = Trainings(monkeypatch, *[came_to(0.9, samples=0)] * 2)
    run_recurring(JOB, options)
    run_recurring(JOB, options)
    assert trainings.strategies == [Strategy()] * 2
    assert "torch.utils.data.DataLoader" in capsys.readouterr().err
    assert [each.share for each in TraceStore(options.store).runs(JOB.key)] == [1.0, 1.0]


def test_the_training_loss_stands_for_a_metric_that_nobody_says(
    options: Options, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Trainings(monkeypatch, RunOutcome(0, report=RunReport(None, 0.25, 960, 60)))
    run_recurring(JOB, options)
    (run,) = TraceStore(options.store).runs(JOB.key)
    assert (run.metric, run.source) == (-0.25, "loss")
    assert "script reports no metric" in capsys.readouterr().err


def test_metrics_of_two_kinds_are_not_compared(options: Options) -> None:
    next_run = plan_run(JOB, options, TraceStore(options.store))
    by_loss = record_of(JOB, next_run, RunOutcome(0, report=RunReport(None, 0.25, 960, 60)), 1.0)
    by_script = record_of(JOB, next_run, came_to(0.9), 1.0)
    assert by_loss is not None and by_script is not None
    assert [each.metric for each in outcomes_of([by_loss, by_script])] == [0.9]


def test_a_share_that_was_not_tried_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    waited = RunOutcome(0, report=RunReport(0.9, 0.5, 960, 60))
    trainings = Trainings(monkeypatch, waited, waited, waited)
    for _ in range(3):
        run_recurring(JOB, options)
    assert trainings.strategies[1] == trainings.strategies[2] != Strategy()
    assert [run.share for run in TraceStore(options.store).runs(JOB.key)] == [1.0]
    assert "not counted: all of its steps were synchronous" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 3])
def test_a_run_from_a_checkpoint_is_not_counted(
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    options: Options,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rest = RunReport(0.9, 0.5, 160, 10, without_barrier=True, resumed=True)
    trainings = Trainings(monkeypatch, RunOutcome(status, report=rest), came_to(0.9))
    assert run_recurring(JOB, options) == status
    assert "run 1 is not counted: it went on from a checkpoint" in capsys.readouterr().err
    run_recurring(JOB, options)
    assert trainings.strategies == [Strategy()] * 2
    (run,) = TraceStore(options.store).runs(JOB.key)
    assert run.samples == 960


@pytest.mark.parametrize(("samples", "counted"), [(960, True), (930, True), (900, False)])
def test_a_run_with_fewer_samples_than_the_work_is_not_counted(
    samples: int,
    counted: bool,
    monkeypatch: pytest.MonkeyPatch,
    options: Options,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A checkpoint may have had no state of an optimizer."""
    Trainings(monkeypatch, came_to(0.9), came_to(0.9, samples=samples))
    run_recurring(JOB, options)
    run_recurring(JOB, options)
    assert len(TraceStore(options.store).runs(JOB.key)) == 1 + counted
    said = capsys.readouterr().err
    assert ("it trained on 900 samples, and a whole run on 960" in said) is not counted
    advice = f"hvd-autosync recurring {JOB.key} --forget --store {options.store}"
    assert (advice in said) is not counted


def test_a_run_of_a_job_that_has_grown_has_the_share_that_it_has_done(
    monkeypatch: pytest.MonkeyPatch, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has switched after half of the samples before, and kept the metric: less is tried."""
    ended = [came_to(0.9), came_to(0.9, 1920), came_to(0.9, 1920)]
    trainings = Trainings(monkeypatch, *ended)
    for _ in ended:
        run_recurring(JOB, options)
    kept = TraceStore(options.store).runs(JOB.key)
    assert [each.share for each in kept] == [1.0, 0.25, 0.125]
    assert [each.get("total_samples") for each in trainings.strategies] == [None, 960, 1920]
    assert "it trained on 1920 samples instead of 960, so f was 0.25" in capsys.readouterr().err
    first, second, _ = outcomes_of(kept)
    assert first.seconds == 2 * kept[0].seconds and second.seconds == kept[1].seconds


def test_the_search_ends_though_the_data_grow(
    monkeypatch: pytest.MonkeyPatch, options: Options
) -> None:
    ended = [came_to(0.9, round(960 * 1.1**number)) for number in range(6)]
    Trainings(monkeypatch, *ended)
    for _ in ended:
        run_recurring(JOB, options)
    assert plan_run(JOB, options, TraceStore(options.store)).decision.final


def test_a_run_is_kept_though_nothing_can_be_printed(
    monkeypatch: pytest.MonkeyPatch, options: Options
) -> None:
    Trainings(monkeypatch, came_to(0.9))
    with contextlib.suppress(OSError), open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        run_recurring(JOB, options)
    assert len(TraceStore(options.store).runs(JOB.key)) == 1


def test_a_share_that_the_guard_ends_before_the_switch_is_not_tried_for_ever(
    monkeypatch: pytest.MonkeyPatch, options: Options
) -> None:
    ended = RunOutcome(0, report=RunReport(0.9, 0.5, 960, 60, fell_back=True))
    trainings = Trainings(monkeypatch, came_to(0.9), ended, ended)
    for _ in range(3):
        run_recurring(JOB, options)
    assert [each["sync_share"] for each in trainings.strategies[1:]] == [0.5, 0.75]
    kept = TraceStore(options.store).runs(JOB.key)
    assert [each.status for each in kept] == ["completed", "diverged", "diverged"]


def test_a_divergence_that_ends_early_is_counted(options: Options) -> None:
    store = TraceStore(options.store)
    whole = record_of(JOB, plan_run(JOB, options, store), came_to(0.9), 1.0)
    assert whole is not None
    store.keep_run(whole)
    run = record_of(JOB, plan_run(JOB, options, store), came_to(math.nan, samples=100), 1.0)
    assert run is not None and run.status == "diverged"


def test_a_share_under_a_lossy_codec_that_the_guard_ends_is_tried_without_it(
    options: Options,
) -> None:
    """Before the switch; after it, or without such a codec, the share itself has failed."""
    store = TraceStore(options.store)
    whole = record_of(JOB, plan_run(JOB, options, store), came_to(0.9), 1.0)
    assert whole is not None
    store.keep_run(whole)
    plan = plan_run(JOB, options, store)
    study = store.create_study(job_key="", command=(), settings={}, versions={})
    lossy = replace(plan, judged=study)
    ended = RunReport(0.9, 0.5, 960, 60, fell_back=True)
    assert record_of(JOB, lossy, RunOutcome(0, report=ended), 1.0) is None
    switched = RunOutcome(0, report=replace(ended, without_barrier=True))
    for each, outcome in ((plan, RunOutcome(0, report=ended)), (lossy, switched)):
        run = record_of(JOB, each, outcome, 1.0)
        assert run is not None and run.status == "diverged"


def test_a_metric_that_is_no_number_is_a_divergence(options: Options) -> None:
    next_run = plan_run(JOB, options, TraceStore(options.store))
    rescued = RunReport(0.95, 0.25, 960, 60, fell_back=True)
    run = record_of(JOB, next_run, RunOutcome(0, report=rescued), 1.0)
    assert run is not None and run.status == "diverged" and math.isnan(run.metric)
    run = record_of(JOB, next_run, came_to(math.nan), 1.0)
    assert run is not None and run.status == "diverged"
    store = TraceStore(options.store)
    store.keep_run(run)
    assert math.isnan(store.runs(JOB.key)[0].metric)


def test_a_dry_run_launches_nothing(
    monkeypatch: pytest.MonkeyPatch, options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainings(monkeypatch)
    assert run_recurring(JOB, replace(options, dry_run=True)) == 0
    assert "f = 1 of the work under BSP" in capsys.readouterr().err
    assert options.store is not None and not Path(options.store).exists()
    with pytest.raises(StoreError, match=r"cannot use /proc/traces\.db as a trace store"):
        run_recurring(JOB, replace(options, dry_run=True, store="/proc/traces.db"))


def test_protocol_knobs_of_a_winner_give_way() -> None:
    base = Strategy({"cycle_time_ms": 5.0, "protocol": "ssp", "staleness": 3})
    assert strategy_at(base, 1.0, 0) == Strategy({"cycle_time_ms": 5.0})
    assert strategy_at(base, 0.0, 0) == Strategy(
        {"cycle_time_ms": 5.0, "protocol": "asp", "sync_share": 0.0}
    )


def test_runs_are_forgotten(options: Options) -> None:
    store = TraceStore(options.store)
    assert store.runs("none") == [] and store.forget_runs("none") == 0
    run = record_of(JOB, plan_run(JOB, options, store), came_to(0.9), 1.0)
    assert run is not None
    assert [store.keep_run(run), store.keep_run(run)] == [0, 1]
    assert store.forget_runs(JOB.key) == 2
    assert store.runs() == []


def run_job(horovodrun: str, store: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [
        horovodrun,
        "-np",
        "2",
        "--gloo",
        "--autosync",
        "--autosync-recurring",
        "--autosync-search",
        "binary",
        "--autosync-store",
        str(store),
        sys.executable,
        str(SCRIPT),
    ]
    return subprocess.run([*command, *words], text=True, capture_output=True, timeout=280)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_real_job_says_what_it_came_to_and_goes_on(horovodrun: str, tmp_path: Path) -> None:
    """Also where the script ends without the end of Python."""
    store = tmp_path / "traces.db"
    schedules = []
    for _ in range(2):
        done = run_job(horovodrun, store, "--metric", "0.25")
        assert done.returncode == 0, done.stderr
        schedules.append(json.loads(done.stdout[done.stdout.index("{") :].splitlines()[0]))
    assert schedules == [{}, {"protocol": "asp", "sync_share": 0.5, "total_samples": 960}]
    kept = TraceStore(store).runs()
    assert [(each.share, each.metric, each.source) for each in kept] == [
        (1.0, 0.25, "script"),
        (0.5, 0.25, "script"),
    ]
    assert kept[0].samples == 960


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.wide
def test_a_real_job_that_says_nothing_is_known_by_its_loss(horovodrun: str, tmp_path: Path) -> None:
    done = run_job(horovodrun, tmp_path / "traces.db")
    assert done.returncode == 0, done.stderr
    (run,) = TraceStore(tmp_path / "traces.db").runs()
    assert run.source == "loss" and -3 < run.metric < 0 and run.samples == 960
    assert "script reports no metric" in done.stderr


def test_two_answers_to_what_a_job_runs_under_are_refused() -> None:
    from hvd_autosync.engine.job_line import parse_words, read_job

    words = ["-np", "2", "--autosync-recurring", "--autosync-target", "0.9", "python", "a.py"]
    assert read_job(parse_words(words), words)[1].target == 0.9
    wrong = ["-np", "2", "--autosync-recurring", "--autosync-replay", "last", "python", "a.py"]
    with pytest.raises((ConfigurationError, SystemExit)):
        parse_words(wrong)
