"""Where the trials of a job run, as far as that is known before it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.engine import mode
from hvd_autosync.engine.mode import check_what_is_read, only_trains, why_launched
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import settings_of, tuning_key
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host, SearchSpace, Strategy
from hvd_autosync.traces import StudyStatus, TraceStore

JOB = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),))


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(store=str(tmp_path / "traces.db"), mode="auto")


def test_nothing_is_against_live_trials(options: Options) -> None:
    assert why_launched(JOB, options) is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"allow": ("codec",)}, "lossy knobs (codec) cannot be tuned live"),
        ({"keep_trial_files": "kept"}, "--autosync-keep-trial-files has no meaning"),
        ({"runner": "cold"}, "--autosync-runner cold"),
        ({"reuse": "never", "store": "postgresql://me:secret@host/traces"}, "a password"),
        ({"reuse": "never", "store": "postgresql://host/traces?password=secret"}, "a password"),
        ({"reuse": "never", "store": "postgresql://host/t?sslpassword=secret"}, "a password"),
        ({"reuse": "never", "store": "postgresql://host/t?options=-cx%3Dsecret"}, "a password"),
    ],
)
def test_options_that_need_launched_trials(
    options: Options, given: dict[str, Any], reason: str
) -> None:
    assert reason in (why_launched(JOB, replace(options, **given)) or "")


@pytest.mark.parametrize("given", [{"tune_only": True}, {"reuse": "only"}])
def test_where_no_training_is_tuned_nothing_is_said(
    options: Options, given: dict[str, Any]
) -> None:
    assert why_launched(JOB, replace(options, **given)) == ""


def test_jobs_that_need_launched_trials(options: Options) -> None:
    alone = replace(JOB, hosts=(Host("localhost", 1),))
    assert "single rank" in (why_launched(alone, options) or "")
    elsewhere = replace(JOB, hosts=(Host("192.0.2.1", 1), Host("localhost", 1)))
    assert "192.0.2.1" in (why_launched(elsewhere, options) or "")
    last = replace(JOB, hosts=(Host("localhost", 1), Host("192.0.2.1", 1)))
    assert why_launched(last, options) is None


@pytest.mark.parametrize(("knob", "launched"), [("cycle_time_ms", True), ("buckets", False)])
def test_a_space_file_may_be_about_what_horovod_reads_at_its_start(
    options: Options, tmp_path: Path, knob: str, launched: bool
) -> None:
    (tmp_path / "space.toml").write_text(f"[knobs.{knob}]\nhigh = 4\n")
    reason = why_launched(JOB, replace(options, space=str(tmp_path / "space.toml")))
    assert (knob in reason) if launched and reason else reason is None


@pytest.mark.parametrize(
    ("table", "launched"),
    [
        ('fixed = "hierarchical"', True),
        ('choices = ["hierarchical"]', True),
        ('choices = ["allreduce", "hierarchical"]', False),
        ('fixed = "sharded"', False),
    ],
)
def test_a_space_file_may_leave_nothing_but_process_sets(
    options: Options, tmp_path: Path, table: str, launched: bool
) -> None:
    (tmp_path / "space.toml").write_text(f"[knobs.large_exchange]\n{table}\n")
    reason = why_launched(JOB, replace(options, space=str(tmp_path / "space.toml")))
    assert ("process sets" in (reason or "")) is launched


ELASTIC = replace(JOB, options=("-np", "1", "--min-np", "1"), hosts=(Host("192.0.2.1", 1),))


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("cache_capacity]\nfixed = 0", "cache_capacity"),
        ('large_exchange]\nfixed = "sharded"', "lose states"),
        ('large_exchange]\nfixed = "hierarchical"', "process sets"),
        ('large_exchange]\nfixed = "hierarchical_factors"', "equally many ranks on each host"),
        ('order]\nchoices = ["arrival", "priority"]', "lose steps"),
        ("buckets]\nhigh = 4", ""),
    ],
)
def test_what_an_elastic_job_cannot_have_is_refused(
    options: Options, tmp_path: Path, table: str, why: str
) -> None:
    (tmp_path / "space.toml").write_text(f"[knobs.{table}\n")
    asked = replace(options, mode="live", space=str(tmp_path / "space.toml"))
    if why:
        with pytest.raises(ConfigurationError, match=why):
            check_what_is_read(ELASTIC, asked)
    else:
        check_what_is_read(ELASTIC, asked)


@pytest.mark.parametrize("job", [JOB, ELASTIC], ids=["fixed", "elastic"])
def test_a_job_that_is_tuned_live_does_not_show_the_password_of_its_store(
    job: Job, options: Options
) -> None:
    asked = replace(options, mode="live", store="postgresql://me:secret@database/traces")
    with pytest.raises(ConfigurationError, match="has a password") as refused:
        check_what_is_read(job, asked)
    assert "secret" not in str(refused.value)


def test_a_damaged_study_of_another_job_changes_nothing(
    options: Options, add_damaged: Callable[[TraceStore], str]
) -> None:
    store = TraceStore(options.store)
    add_damaged(store)
    assert why_launched(JOB, options) is None
    key = tuning_key(JOB, options, {})
    study = store.create_study(job_key=key, command=(), settings={}, versions={})
    store.finish(study.study_id, StudyStatus.FINISHED, {"reason": "tried"}, Strategy())
    assert only_trains(JOB, options)


@pytest.mark.parametrize("began", ["launched", "live"])
def test_an_interrupted_study_goes_on_as_it_began(options: Options, began: str) -> None:
    store = TraceStore(options.store)
    study = store.create_study(
        job_key=tuning_key(JOB, options, {}),
        command=("python", "train.py"),
        settings=settings_of(replace(options, mode=began)).to_json(),
        versions={},
    )
    assert why_launched(JOB, options) is None, "it is under way elsewhere"
    store.let_go(study.study_id)
    reason = why_launched(JOB, options)
    assert reason is None if began == "live" else study.study_id in (reason or "")
    assert why_launched(JOB, replace(options, reuse="never")) is None, "it is not resumed then"


def test_a_job_that_was_tuned_before_runs_under_its_winner(options: Options) -> None:
    store = TraceStore(options.store)
    study = store.create_study(
        job_key=tuning_key(JOB, options, {}),
        command=("python", "train.py"),
        settings={},
        versions={},
    )
    store.describe_task(study.study_id, None, SearchSpace(()))
    store.finish(study.study_id, StudyStatus.FINISHED, {"reason": "tried"}, Strategy())
    assert why_launched(JOB, options) == ""
    assert only_trains(JOB, options)
    elsewhere = replace(JOB, hosts=(Host("192.0.2.1", 2),))
    assert not only_trains(elsewhere, replace(options, store="/proc/traces.db"))
    for reuse, trains in (("never", False), ("only", True)):
        assert only_trains(JOB, replace(options, reuse=reuse)) is trains
    assert why_launched(JOB, replace(options, reuse="never")) is None
    store.keep_drift(study.study_id, ["steps became slower"])
    assert why_launched(JOB, options) is None, "it is tuned again"
    assert not only_trains(JOB, options)


def test_the_store_is_opened_once_and_closed(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []

    class Watched(TraceStore):
        def __init__(self, location: str | None, **given: bool) -> None:
            super().__init__(location, **given)
            events.append("opened")

        def close(self) -> None:
            super().close()
            events.append("closed")

    monkeypatch.setattr(mode, "TraceStore", Watched)
    assert why_launched(JOB, options) is None
    assert events == ["opened", "closed"]


def test_a_training_that_will_be_tuned_has_a_store(options: Options) -> None:
    assert options.store is not None
    live, file = replace(options, mode="live"), Path(options.store)
    assert why_launched(JOB, options) is None
    check_what_is_read(JOB, live, create=False)
    assert not file.exists()
    check_what_is_read(JOB, live)
    assert file.exists(), "so that it is known before the training begins that it can be written"
