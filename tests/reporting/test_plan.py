from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from hvd_autosync.engine.options import Options
from hvd_autosync.errors import ConfigurationError, StoreError, TraceFormatError
from hvd_autosync.launch.job import Job
from hvd_autosync.reporting import plan as plan_module
from hvd_autosync.reporting.plan import print_plan
from hvd_autosync.search_space import HorovodBuild, Host
from hvd_autosync.traces import StudyStatus

JOB = Job(("-np", "4"), ("python", "train.py"), (Host("a", 2), Host("b", 2)))


@pytest.fixture(autouse=True)
def build(monkeypatch: pytest.MonkeyPatch) -> None:
    made = HorovodBuild("0.28.1", gloo=True, mpi=True)
    monkeypatch.setattr(plan_module, "horovod_build", lambda: made)


def printed(job: Job, store: Any, **options: Any) -> str:
    console = Console(width=140, markup=False, highlight=False)
    with console.capture() as captured:
        print_plan(job, Options(store=store.name, **options), console)
    return captured.get()


def test_an_unknown_job_has_sure_possible_and_absent_knobs(store: Any) -> None:
    text = printed(JOB, store)
    sure, rest = text.split("Knobs that depend on the result of the default trial")
    possible, absent = rest.split("Not in this job:")
    assert "controller" in sure and "cycle_time_ms" in sure and "cache_capacity" in sure
    assert "0, 1024, 4096" in sure  # the default trial may show a model of many tensors
    assert "buckets" in possible and "hierarchical_allgather" in possible
    assert "  num_nccl_streams (applies: NCCL; GPUs)" in absent
    assert "  rest_codec (applies: --autosync-allow codec" in absent


def test_held_knobs_are_shown_as_such(store: Any) -> None:
    job = Job(JOB.options, JOB.command, JOB.hosts, "mpi", (("cache_capacity", 0),))
    text = printed(job, store)
    assert "fixed at 0" in text and "fixed at mpi" in text


def test_the_space_file_counts(store: Any, tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text("[knobs.cycle_time_ms]\nlow = 2\nhigh = 9\n")
    assert "2 ms to 9 ms" in printed(JOB, store, space=str(file))


def test_gpus_are_assumed_where_the_build_could_use_them(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = HorovodBuild("0.28.1", gloo=True, mpi=True, nccl=True)
    monkeypatch.setattr(plan_module, "horovod_build", lambda: made)
    possible = printed(JOB, store).split("depend on the result of the default trial")[1]
    assert "num_nccl_streams" in possible


def test_the_plan_has_its_limits(store: Any) -> None:
    text = " ".join(printed(JOB, store, trials=7, minutes=5.0, tune_only=True).split())
    assert "up to 7 trials or 5 minutes in all" in text
    assert "10 warm-up steps and 40 measured steps (fewer if steps are long)" in text
    assert "3 to 16 rounds, each with a trial of the default; then stop" in text
    assert f"stored in {store.name}" in text


def test_live_trials_have_fewer_warm_up_steps(store: Any) -> None:
    here = Job(JOB.options, JOB.command, (Host("localhost", 4),))
    text = " ".join(printed(here, store, mode="live").split())
    assert "3 warm-up steps and 40 measured steps" in text
    assert "2 warm-up steps" in " ".join(printed(here, store, mode="live", warmup=2).split())


def test_live_trials_have_the_knobs_that_they_can_change(store: Any) -> None:
    here = Job(JOB.options, JOB.command, (Host("localhost", 4),))
    for mode, live in (("launched", False), ("live", True), ("auto", True)):
        text = " ".join(printed(here, store, mode=mode).split())
        assert ("Trials are steps of the training itself" in text) is live
        assert ("cycle_time_ms" in text.split("Not in this job:")[0]) is not live
    launched = printed(here, store, mode="auto", runner="cold")
    assert "cycle_time_ms" in launched.split("Not in this job:")[0]


def test_an_elastic_job_has_no_knob_that_its_own_trials_cannot_change(store: Any) -> None:
    elastic = Job(("-np", "2", "--min-np", "2"), JOB.command, (Host("a", 2), Host("b", 2)))
    text = printed(elastic, store, mode="live")
    knobs, plan = text.split("Not in this job:")
    assert "cache_capacity" not in knobs and "cycle_time_ms" not in knobs and "buckets" in knobs
    for choice in ("sharded", "priority", "hierarchical,"):
        assert choice not in knobs
    assert "whenever its ranks change, tuning starts over" in " ".join(plan.split())


def test_a_job_that_was_tuned_has_its_exact_space(store: Any, author: Any) -> None:
    from hvd_autosync.engine.study_options import tuning_key

    key = tuning_key(JOB, Options(store=store.name), {})
    study = store.create_study(job_key=key, command=(), settings={}, versions={})
    store.describe_task(study.study_id, author.task, author.space)
    store.finish(study.study_id, StudyStatus.FINISHED, {}, author.space.default)
    text = printed(JOB, store)
    assert f"The search space of this job (study {study.study_id})" in text
    assert "0 to 20" in text  # as many groups as this model has tensors
    assert "reuse the winner of study" in " ".join(text.split())
    assert "then run the job" in " ".join(printed(JOB, store, reuse="never").split())


def test_a_job_that_will_be_tuned_again_does_not_reuse(store: Any, author: Any) -> None:
    from hvd_autosync.engine.study_options import tuning_key

    key = tuning_key(JOB, Options(store=store.name), {})
    study = store.create_study(job_key=key, command=(), settings={}, versions={})
    store.describe_task(study.study_id, author.task, author.space)
    store.finish(study.study_id, StudyStatus.FINISHED, {}, author.space.default)
    assert "reuse the winner" in " ".join(printed(JOB, store, reuse="only").split())
    store.keep_drift(study.study_id, ["steps have become 1.4 times as long"])
    text = " ".join(printed(JOB, store).split())
    why = "because steps have become 1.4 times as long: measure the default strategy"
    assert f"tune again after study {study.study_id}, {why}" in text
    assert "up to 8 trials in all" in text
    assert "up to 5 trials in all" in " ".join(printed(JOB, store, trials=5).split())
    assert "reuse the winner" not in text
    assert f"The search space of this job (study {study.study_id})" in text
    assert "reuse the winner" in " ".join(printed(JOB, store, reuse="only").split())
    assert "tune again" not in " ".join(printed(JOB, store, reuse="never").split())


def test_a_job_that_reuses_nothing_does_not_read_the_last_conclusion(
    store: Any, author: Any
) -> None:
    from hvd_autosync.engine.study_options import tuning_key

    key = tuning_key(JOB, Options(store=store.name), {})
    study = store.create_study(job_key=key, command=(), settings={}, versions={})
    store.describe_task(study.study_id, author.task, author.space)
    store.finish(study.study_id, StudyStatus.FINISHED, {"winner": 5}, author.space.default)
    with pytest.raises(TraceFormatError, match=study.study_id):
        printed(JOB, store)
    text = " ".join(printed(JOB, store, reuse="never").split())
    assert "The plan: measure the default strategy" in text


@pytest.mark.parametrize("mode", ["launched", "live", "auto"])
@pytest.mark.parametrize("elastic", [False, True])
def test_a_dry_run_creates_no_store(mode: str, elastic: bool, tmp_path: Path) -> None:
    numbers = ("--min-np", "2") if elastic else ()
    here = Job((*JOB.options, *numbers), JOB.command, (Host("localhost", 4),))
    missing = SimpleNamespace(name=str(tmp_path / "missing.db"))
    text = " ".join(printed(here, missing, mode=mode).split())
    assert "The plan: measure the default strategy" in text
    assert "The trace is stored in" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", ["launched", "live", "auto"])
def test_a_dry_run_says_that_the_store_cannot_be_created(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Job(JOB.options, JOB.command, (Host("localhost", 4),))
    for name in ("/proc/missing.db", str(tmp_path)):
        with pytest.raises(StoreError, match=f"cannot use {name} as a trace store") as caught:
            printed(here, SimpleNamespace(name=name), mode=mode)
        assert "Name a file in a folder that you may write to" in caught.value.hint
    monkeypatch.setattr(plan_module, "remote_hosts", lambda job: [*job.hosts])
    if mode == "live":  # the helper of rank 0 creates it on that host
        printed(here, SimpleNamespace(name="/proc/missing.db"), mode=mode)


def test_there_is_no_plan_where_nothing_can_be_reused(store: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"no finished study of this job, and .* is .only"):
        printed(JOB, store, reuse="only")
    # An elastic job is not refused, nor one whose store may be that of another host.
    elastic = Job(("-np", "2", "--min-np", "2"), JOB.command, (Host("localhost", 4),))
    for job in (elastic, JOB):
        text = " ".join(printed(job, store, reuse="only", mode="live").split())
        plan = "The plan: use an earlier result if the host of rank 0 has one; else the training"
        assert text.endswith(f"{plan} goes on untuned."), "there are no trials, and no trace"


def test_after_launched_trials_of_lossy_knobs_exact_ones_are_tuned_live(
    store: Any, author: Any
) -> None:
    from hvd_autosync.engine.study_options import tuning_key

    here, staged = Job(JOB.options, JOB.command, (Host("localhost", 2),)), "begins under it"
    assert staged in " ".join(printed(here, store, allow=("codec",)).split())
    unless = "with as many trials and minutes again, unless that has lossy knobs other than codecs"
    assert unless in " ".join(printed(here, store, allow=("codec",), minutes=5.0).split())
    assert staged not in " ".join(printed(here, store).split())
    assert staged not in " ".join(printed(here, store, allow=("codec",), mode="launched").split())
    options = Options(store=store.name, allow=("codec",))
    winner = author.space.default
    ids = []
    for begins in (None, winner):
        key = tuning_key(here, options, {}, begins)
        study = store.create_study(job_key=key, command=(), settings={}, versions={})
        store.describe_task(study.study_id, author.task, author.space)
        store.finish(study.study_id, StudyStatus.FINISHED, {}, winner)
        ids.append(study.study_id)
        text = " ".join(printed(here, store, allow=("codec",)).split())
        assert f"reuse the winner of study {ids[0]}" in text
        assert (staged in text) is (begins is None) and "unless" not in text, "it is known"
    assert f"by study {ids[1]}" in text


@pytest.mark.parametrize("line", ["fixed = 4096", "choices = [1024, 4096]"])
def test_a_space_file_for_a_large_model_is_shown(store: Any, tmp_path: Path, line: str) -> None:
    file = tmp_path / "space.toml"
    file.write_text(f"[knobs.cache_capacity]\n{line}\n")
    assert "4096" in printed(JOB, store, space=str(file))
