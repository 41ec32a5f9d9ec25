"""``--autosync-mode live``: what is said of a training that has ended."""

from __future__ import annotations

import itertools
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.commands import live_train
from hvd_autosync.engine import live
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import tuning_key
from hvd_autosync.engine.training import RunOutcome
from hvd_autosync.errors import SpaceError, StoreError
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host, Strategy
from hvd_autosync.traces import StudyStatus, TraceStore
from hvd_autosync.traces.records import timestamp
from hvd_autosync.util.variables import RESTARTED_VARIABLE

JOB = Job(("-np", "2"), ("true",), (Host("localhost", 2),))


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (RunOutcome(0, begun=False), True),
        (RunOutcome(0), False),
        (RunOutcome(1, begun=False, stopped=True), False),
    ],
)
def test_a_job_without_horovods_torch_is_told_so(
    ended: RunOutcome,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(live_train, "run_live_training", lambda *_, **__: ended)
    assert live_train.train_live(JOB, Options(mode="live")) is ended
    assert ("rank 0 did not import horovod.torch" in capsys.readouterr().err) is told


def test_a_job_with_a_study_was_tuned_wherever_its_notes_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container with a ``/tmp`` of its own."""
    options = Options(mode="live", store=str(tmp_path / "traces.db"))
    key = tuning_key(JOB, options, {})
    TraceStore(options.store).create_study(job_key=key, command=(), settings={}, versions={})
    monkeypatch.setattr(
        live_train, "run_live_training", lambda *_, **__: RunOutcome(0, begun=False)
    )
    live_train.train_live(JOB, options)
    assert "nothing was tuned" not in capsys.readouterr().err


def test_a_failure_of_an_earlier_run_is_not_that_of_this_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the clock of rank 0's host says."""
    later = timestamp(datetime.now(timezone.utc) + timedelta(minutes=1))
    failed = SimpleNamespace(study_id="5", strategy=Strategy({"buckets": 3}), asked_at=later)
    monkeypatch.setattr(live_train, "_RECORD_S", 0.0)
    monkeypatch.setattr(live, "failed_trials", lambda *_: {("5", 1): failed})
    monkeypatch.setattr(live_train, "run_live_training", lambda *_, **__: RunOutcome(1))
    assert live_train.train_live(JOB, Options(mode="live")).status == 1
    assert "failed in the trial" not in capsys.readouterr().err


def test_what_its_helper_reads_is_checked_before_the_training_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(live_train, "run_live_training", None)
    space = tmp_path / "space.toml"
    space.write_text("[knobs.bukets]\nfixed = 2\n")
    with pytest.raises(SpaceError, match="bukets"):
        live_train.train_live(JOB, Options(mode="live", space=str(space)))
    with pytest.raises(StoreError, match=r"/proc/traces\.db"):
        live_train.train_live(JOB, Options(mode="live", store="/proc/traces.db"))


def fail_in(monkeypatch: pytest.MonkeyPatch, failed: object) -> None:
    """Let each training fail in a trial that the store does not have before it."""
    asked = itertools.count()
    monkeypatch.setattr(
        live, "failed_trials", lambda *_: {} if next(asked) % 2 == 0 else {("5", 1): failed}
    )


@pytest.mark.parametrize(
    ("minutes", "resumed", "launches"), [(4, False, 2), (6, False, 1), (6, True, 2)]
)
def test_a_training_that_fails_in_an_early_trial_is_started_again(
    minutes: int,
    resumed: bool,
    launches: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The trial's beginning counts, however long it has hung; with checkpoints any trial does."""
    asked = timestamp(datetime.now(timezone.utc) + timedelta(minutes=minutes))
    failed = SimpleNamespace(study_id="5", strategy=Strategy({"buckets": 3}), asked_at=asked)
    ends = [RunOutcome(1, resumed=resumed), RunOutcome(0)]
    restarted = []

    def run(_: Job, variables: dict[str, str], **__: object) -> RunOutcome:
        restarted.append(variables.get(RESTARTED_VARIABLE))
        return ends.pop(0)

    fail_in(monkeypatch, failed)
    monkeypatch.setattr(live_train, "run_live_training", run)
    assert live_train.train_live(JOB, Options(mode="live")).status == 2 - launches
    assert restarted == [None, "5"][:launches], "the helper resumes that study"
    said = capsys.readouterr().err
    assert "failed in the trial of buckets=3" in said
    assert ("which is not tried again; starting the training again" in said) is (launches == 2)


@pytest.mark.parametrize(
    ("reuse", "said"), [("auto", "command again to"), ("never", "with --autosync-reuse auto to")]
)
def test_the_next_run_tunes_without_a_late_failure_if_it_reuses_the_study(
    reuse: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = timestamp(datetime.now(timezone.utc) + timedelta(minutes=6))
    failed = SimpleNamespace(study_id="5", strategy=Strategy({"buckets": 3}), asked_at=asked)
    fail_in(monkeypatch, failed)
    monkeypatch.setattr(live_train, "run_live_training", lambda *_, **__: RunOutcome(1))
    live_train.train_live(JOB, Options(mode="live", reuse=reuse))
    assert f"{said} tune without it" in capsys.readouterr().err


def test_the_next_run_is_said_to_use_an_earlier_result_if_there_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would not tune: under ``auto`` a finished study is used before one that has failed."""
    options = Options(mode="live", reuse="never", store=str(tmp_path / "traces.db"))
    store = TraceStore(options.store)
    known = store.create_study(
        job_key=tuning_key(JOB, options, {}), command=(), settings={}, versions={}
    )
    store.finish(known.study_id, StudyStatus.FINISHED, {}, Strategy())
    asked = timestamp(datetime.now(timezone.utc) + timedelta(minutes=6))
    failed = SimpleNamespace(study_id="5", strategy=Strategy({"buckets": 3}), asked_at=asked)
    fail_in(monkeypatch, failed)
    monkeypatch.setattr(live_train, "run_live_training", lambda *_, **__: RunOutcome(1))
    live_train.train_live(JOB, options)
    said = capsys.readouterr().err
    assert f"with --autosync-reuse auto to use the result of study {known.study_id}" in said
    store.keep_drift(known.study_id, ["steps have become slower"])
    live_train.train_live(JOB, options)
    assert "with --autosync-reuse auto to tune without it" in capsys.readouterr().err


def test_a_training_that_fails_in_another_trial_is_not_started_for_a_third_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = iter([3, 4])

    found: dict[tuple[str, int], SimpleNamespace] = {}

    def run(*_: object, **__: object) -> RunOutcome:
        """Fail; what has failed before is still in the store."""
        count = next(counts)
        asked = timestamp(datetime.now(timezone.utc))
        strategy = Strategy({"buckets": count})
        failed = SimpleNamespace(study_id="5", strategy=strategy, asked_at=asked)
        found["5", -count] = failed
        return RunOutcome(1)

    monkeypatch.setattr(live, "failed_trials", lambda *_: dict(found))
    monkeypatch.setattr(live_train, "run_live_training", run)
    assert live_train.train_live(JOB, Options(mode="live")).status == 1
    *_, first, second = capsys.readouterr().err.splitlines()
    assert "trial of buckets=3" in first and "starting the training again" in first
    assert "trial of buckets=4" in second and "run the same command again" in second


def test_a_store_that_is_gone_by_then_leaves_the_trainings_own_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(*_: object) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(live, "failed_trials", lose)
    monkeypatch.setattr(live_train, "run_live_training", lambda *_, **__: RunOutcome(7))
    options = Options(mode="live", store=str(tmp_path / "traces.db"))
    assert live_train.train_live(JOB, options).status == 7
    assert "the disk is gone" in capsys.readouterr().err


def test_a_space_file_that_is_gone_by_then_leaves_the_trainings_own_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = tmp_path / "space.toml"
    space.write_text("[knobs.cycle_time_ms]\nlow = 0.5\n")

    def train(*_: object, **__: object) -> RunOutcome:
        space.unlink()
        return RunOutcome(7)

    monkeypatch.setattr(live_train, "run_live_training", train)
    options = Options(mode="live", store=str(tmp_path / "traces.db"), space=str(space))
    assert live_train.train_live(JOB, options).status == 7
    assert str(space) in capsys.readouterr().err


@pytest.mark.parametrize(("study", "launches"), [("5", 2), ("6", 1), ("", 2)])
def test_the_failure_of_another_run_at_the_same_time_is_not_that_of_this_one(
    study: str, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its study is known where the ranks' notes are seen."""
    asked = timestamp(datetime.now(timezone.utc))
    failed = SimpleNamespace(study_id="5", strategy=Strategy({"buckets": 3}), asked_at=asked)
    ends = [RunOutcome(1, study=study), RunOutcome(0)]
    fail_in(monkeypatch, failed)
    monkeypatch.setattr(live_train, "_RECORD_S", 0.0)
    monkeypatch.setattr(live_train, "run_live_training", lambda *_, **__: ends.pop(0))
    live_train.train_live(JOB, Options(mode="live"))
    assert len(ends) == 2 - launches
