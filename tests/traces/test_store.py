from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_autosync.errors import NotOwnerError, StoreError, TraceFormatError
from hvd_autosync.search_space import (
    SearchSpace,
    Strategy,
    Task,
    TrialResult,
    TrialStatus,
    build_space,
)
from hvd_autosync.traces import Fallback, StudyRecord, StudyStatus, TraceStore
from hvd_autosync.traces.state import StudyState

_FORK = multiprocessing.get_context("fork")
_ROOT = Path(__file__).parents[2]
_CRASHED = TrialResult(TrialStatus.CRASHED)
Create = Callable[..., StudyRecord]


@pytest.fixture
def store(path: Path) -> Iterator[TraceStore]:
    opened = TraceStore(path)
    yield opened
    opened.close()


def _everything(store: TraceStore) -> list[Any]:
    return [
        [study.to_json(), *(t.to_json() for t in store.trials(study.study_id))]
        for study in store.studies()
    ]


def _change(path: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(statement, values)
    connection.close()


def _set_owner(path: Path, study: StudyRecord, age_s: float, **changes: object) -> None:
    """Change who owns ``study``, as seen by later readers; another host is another machine."""
    changes = {**({"machine": "another"} if "host" in changes else {}), **changes}
    with sqlite3.connect(path) as connection:
        query = "SELECT owner FROM hvd_autosync_studies WHERE study_id = ?"
        owner = json.loads(connection.execute(query, [study.study_id]).fetchone()[0]) | changes
        connection.execute(
            "UPDATE hvd_autosync_studies SET owner = ?, heartbeat_s = ? WHERE study_id = ?",
            [json.dumps(owner), time.time() - age_s, study.study_id],
        )
    connection.close()


# The life of a study


def test_a_new_study_is_running_and_knows_what_it_was_given(
    store: TraceStore, create: Create
) -> None:
    study = create("the job")
    assert len(study.study_id) == 12 and int(study.study_id, 16) >= 0
    assert study.command == ("horovodrun", "-np", "4", "python", "train.py")
    assert (study.job_key, study.settings["seed"]) == ("the job", 0)
    assert (study.status, study.task, study.winner) == (StudyStatus.RUNNING, None, None)
    assert store.study(study.study_id) == study
    assert store.trials(study.study_id) == []


def test_asks_and_tells_are_read_back(store: TraceStore, finished: StudyRecord) -> None:
    default, fast, crashed, lost = store.trials(finished.study_id)
    assert [t.number for t in (default, fast, crashed, lost)] == [0, 1, 2, 3]
    assert [t.kind for t in (default, fast, crashed, lost)] == [
        "default",
        "sobol",
        "model",
        "confirm",
    ]
    assert fast.result is not None and fast.result.step_time is not None
    assert fast.result.step_time.mean_s == pytest.approx(0.1)
    assert fast.result.stderr_tail == "warning: \udcff\n"
    assert fast.strategy["fusion_threshold_bytes"] == 1 << 20
    assert crashed.result is not None and crashed.result.status is TrialStatus.CRASHED
    assert crashed.info == {"expected_s": 0.09}
    assert lost.result is None and lost.told_at is None
    assert default.told_at is not None and default.asked_at < default.told_at <= fast.asked_at


def test_a_finished_study_is_read_back_by_another_store(
    store: TraceStore, path: Path, finished: StudyRecord, task: Task, space: SearchSpace
) -> None:
    again = TraceStore(f"sqlite:///{path}").study(finished.study_id)
    assert again.status is StudyStatus.FINISHED
    assert (again.space, again.outcome) == (space, {"reason": "a gain of 2.0"})
    assert again.winner == store.trials(finished.study_id)[1].strategy
    assert again.task is not None and again.task.to_json() == task.to_json()


def test_a_space_without_a_task_is_enough(
    store: TraceStore, create: Create, space: SearchSpace
) -> None:
    study_id = create().study_id
    store.describe_task(study_id, None, space)
    assert (store.study(study_id).space, store.study(study_id).task) == (space, None)


def test_a_trial_is_told_once(store: TraceStore, create: Create) -> None:
    study_id = create().study_id
    number = store.ask(study_id, Strategy(), "default", {})
    store.tell(study_id, number, TrialResult(TrialStatus.HUNG))
    with pytest.raises(StoreError, match=f"trial 0 of study {study_id} has a result already"):
        store.tell(study_id, number, _CRASHED)
    with pytest.raises(StoreError, match=r"trial 1 .* was never asked for"):
        store.tell(study_id, 1, _CRASHED)
    (trial,) = store.trials(study_id)
    assert trial.result is not None and trial.result.status is TrialStatus.HUNG


def test_an_ended_study_never_changes(
    store: TraceStore, finished: StudyRecord, space: SearchSpace
) -> None:
    before = _everything(store)
    study_id = finished.study_id
    for change in (
        lambda: store.ask(study_id, Strategy(), "model", {}),
        lambda: store.tell(study_id, 3, _CRASHED),
        lambda: store.describe_task(study_id, None, space),
        lambda: store.finish(study_id, StudyStatus.FAILED, {}, None),
        lambda: store.heartbeat(study_id),
    ):
        with pytest.raises(StoreError, match=study_id):
            change()
    assert _everything(store) == before


def test_drift_of_a_training_before_the_last_trials_is_forgotten(
    store: TraceStore, create: Create
) -> None:
    """As after Ctrl-C, when the same command concludes the study later."""
    study = create("the job")
    store.keep_drift(study.study_id, ["steps have become slower"])
    store.keep_fallback(study.study_id, Fallback(Strategy({"local_steps": 4}), 64, "a reason"))
    store.finish(study.study_id, StudyStatus.FINISHED, {"reason": "it won"}, Strategy())
    ended = store.study(study.study_id)
    assert (ended.drift, len(ended.fallbacks)) == ((), 1)


def test_running_is_not_an_end(store: TraceStore, create: Create) -> None:
    study_id = create().study_id
    with pytest.raises(StoreError, match="running"):
        store.finish(study_id, StudyStatus.RUNNING, {}, None)


def test_a_value_that_is_not_json_changes_nothing(store: TraceStore, create: Create) -> None:
    study_id = create().study_id
    with pytest.raises(StoreError, match="as JSON"):
        store.ask(study_id, Strategy(), "model", {"expected_s": float("nan")})
    with pytest.raises(StoreError, match="as JSON"):
        store.finish(study_id, StudyStatus.FINISHED, {"gain": float("inf")}, None)
    assert store.trials(study_id) == []
    assert store.study(study_id).status is StudyStatus.RUNNING


# Finding studies


def test_a_study_is_found_by_prefix_and_as_the_last(store: TraceStore, create: Create) -> None:
    first, second = create(), create()
    assert store.study(first.study_id[:8]) == first
    assert store.study("last") == second
    assert [s.study_id for s in store.studies()] == [second.study_id, first.study_id]


def test_the_state_of_a_study_changes_with_all_that_is_new_in_it(
    store: TraceStore, path: Path, create: Create, space: SearchSpace
) -> None:
    other, study_id = create().study_id, create().study_id
    seen = [store.state(study_id)]
    assert seen == [StudyState(StudyStatus.RUNNING, described=False, asked=0, told=0)]

    def ask(study_id: str) -> None:
        store.ask(study_id, Strategy(), "default", {})

    for change in (
        lambda: ask(study_id),
        lambda: store.tell(study_id, 0, _CRASHED),
        lambda: store.describe_task(study_id, None, space),
        lambda: ask(study_id),
        lambda: store.finish(study_id, StudyStatus.FAILED, {}, None),
    ):
        change()
        seen.append(store.state(study_id))
        assert seen[-1] != seen[-2]
        store.heartbeat(other)
        ask(other)
        assert store.state(study_id) == seen[-1]
    assert seen[-1] == StudyState(StudyStatus.FAILED, described=True, asked=2, told=1)
    with pytest.raises(StoreError, match="has no study 'nothing'"):
        store.state("nothing")
    _change(path, "UPDATE hvd_autosync_studies SET status = 'asleep'")
    with pytest.raises(TraceFormatError, match=f"{study_id} is damaged"):
        store.state(study_id)


def test_an_unknown_study_is_named_with_what_to_do(store: TraceStore, create: Create) -> None:
    with pytest.raises(StoreError, match="no study yet"):
        store.study("last")
    create()
    for unknown in ("", "nothing", "%", "_" * 12):
        with pytest.raises(StoreError, match="traces list") as caught:
            store.study(unknown)
        assert repr(unknown) in caught.value.message
    for call in (store.trials, store.delete, lambda id: store.ask(id, Strategy(), "model", {})):
        with pytest.raises(StoreError, match="'0123456789ab'"):
            call("0123456789ab")


def test_an_ambiguous_prefix_lists_the_candidates(
    store: TraceStore, path: Path, create: Create
) -> None:
    for number in range(10):
        study = create()
        _change(
            path,
            "UPDATE hvd_autosync_studies SET study_id = ? WHERE study_id = ?",
            f"abc{number:09x}",
            study.study_id,
        )
    with pytest.raises(StoreError, match="'abc' matches several") as caught:
        store.study("abc")
    assert "abc000000009" in caught.value.hint and caught.value.hint.endswith("....")
    assert store.study("abc000000003").study_id == "abc000000003"


def test_the_last_study_is_one_that_did_not_fail(store: TraceStore, create: Create) -> None:
    first = create().study_id
    store.finish(first, StudyStatus.FAILED, {}, None)
    assert store.study("last").study_id == first
    good = create().study_id
    for _ in range(2):
        store.finish(create().study_id, StudyStatus.FAILED, {}, None)
    assert store.study("last").study_id == good
    assert store.full_id("last", or_failed=True) not in (first, good)


def test_find_finished_wants_the_job_and_the_newest(store: TraceStore, create: Create) -> None:
    ids = {}
    for name, job, status in (
        ("old", "job", StudyStatus.FINISHED),
        ("new", "job", StudyStatus.FINISHED),
        ("failed", "job", StudyStatus.FAILED),
        ("other", "other", StudyStatus.FINISHED),
        ("no winner", "job", StudyStatus.FINISHED),
    ):
        ids[name] = create(job).study_id
        store.finish(ids[name], status, {}, None if name == "no winner" else Strategy())
    create("job")
    found = store.find_finished("job")
    assert found is not None and found.study_id == ids["new"]
    assert store.find_finished("job of nobody") is None


def test_finished_of_task_wants_task_and_space(
    store: TraceStore, finished: StudyRecord, create: Create, task: Task, space: SearchSpace
) -> None:
    running = create().study_id
    store.describe_task(running, task, space)
    (found,) = store.finished_of_task(task.fingerprint, space.key)
    assert found.study_id == finished.study_id
    wider = build_space(task.model, task.resources)
    assert store.finished_of_task(task.fingerprint, wider.key) == []
    assert store.finished_of_task("0" * 12, space.key) == []


def test_a_deleted_study_is_gone_with_its_trials(
    store: TraceStore, path: Path, finished: StudyRecord, create: Create
) -> None:
    kept = create()
    store.delete(finished.study_id)
    assert store.studies() == [kept]
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM hvd_autosync_trials").fetchone() == (0,)


def test_a_study_that_another_process_runs_is_not_deleted(
    store: TraceStore, path: Path, create: Create
) -> None:
    study = create()
    _set_owner(path, study, 0, host="elsewhere", pid=77)
    with pytest.raises(StoreError, match="process 77 on elsewhere"):
        store.delete(study.study_id)
    _set_owner(path, study, 200)
    store.delete(study.study_id)
    assert store.studies() == []


def test_damaged_content_is_reported_as_such(
    store: TraceStore, path: Path, finished: StudyRecord
) -> None:
    for column, damage in (("winner", "{"), ("winner", '{"a": []}'), ("space", "3")):
        _change(path, f"UPDATE hvd_autosync_studies SET {column} = ?", damage)
        with pytest.raises(TraceFormatError, match="damaged"):
            store.studies()
    _change(path, "UPDATE hvd_autosync_trials SET result = '{}'")
    _change(path, "UPDATE hvd_autosync_studies SET winner = NULL, space = NULL")
    with pytest.raises(TraceFormatError, match=finished.study_id):
        store.trials("last")


def test_studies_of_one_job_or_state(store: TraceStore, create: Create) -> None:
    first, other, ended = create(), create("other"), create()
    store.finish(ended.study_id, StudyStatus.FAILED, {}, None)
    assert store.ids() == [ended.study_id, other.study_id, first.study_id]
    assert [s.study_id for s in store.studies(job_key="job")] == [ended.study_id, first.study_id]
    assert store.studies(status=StudyStatus.RUNNING) == [other, first]
    assert store.studies(job_key="job", status=StudyStatus.RUNNING) == [first]


def test_a_damaged_study_does_not_hide_the_others(
    store: TraceStore, create: Create, add_damaged: Callable[[TraceStore], str]
) -> None:
    study, damaged = create(), add_damaged(store)
    assert store.ids() == [damaged, study.study_id]
    assert store.studies(job_key="job") == store.studies(skip_damaged=True) == [study]
    with pytest.raises(TraceFormatError, match=damaged):
        store.studies()


def test_a_damaged_study_of_the_same_task_is_left_out(
    store: TraceStore, path: Path, finished: StudyRecord, create: Create, task: Task
) -> None:
    newer = create("another").study_id
    assert finished.space is not None
    store.describe_task(newer, task, finished.space)
    store.finish(newer, StudyStatus.FINISHED, {}, Strategy())
    _change(path, "UPDATE hvd_autosync_studies SET settings = '{' WHERE study_id = ?", newer)
    (found,) = store.finished_of_task(task.fingerprint, finished.space.key)
    assert found.study_id == finished.study_id


@pytest.mark.parametrize("column", ["settings", "task", "owner"])
def test_text_that_is_not_json_is_named_with_its_study_and_can_be_deleted(
    store: TraceStore, path: Path, create: Create, column: str
) -> None:
    study_id = create().study_id
    _change(path, f"UPDATE hvd_autosync_studies SET {column} = '{{'")
    reads = store.interrupted if column == "owner" else lambda: store.study(study_id)
    with pytest.raises(TraceFormatError, match=f"{study_id} is damaged.*{column} is not") as caught:
        reads()
    assert f"traces delete {study_id}" in caught.value.hint
    store.delete(study_id)
    assert store.studies() == []


def test_a_trial_with_text_that_is_not_json_names_its_study(
    store: TraceStore, path: Path, finished: StudyRecord
) -> None:
    _change(path, "UPDATE hvd_autosync_trials SET info = '{'")
    with pytest.raises(TraceFormatError, match=f"{finished.study_id} is damaged.*info is not JSON"):
        store.trials(finished.study_id)


def test_a_field_of_a_newer_version_is_no_damage(
    store: TraceStore, path: Path, finished: StudyRecord
) -> None:
    newer = '{"status": "completed", "energy_j": 12.0}'
    _change(path, "UPDATE hvd_autosync_trials SET result = ?", newer)
    with pytest.raises(TraceFormatError, match=f"{finished.study_id} was .* newer") as caught:
        store.trials(finished.study_id)
    assert "'energy_j'" in caught.value.message and "Upgrade" in caught.value.hint
    assert "delete" not in str(caught.value)


def test_trials_are_found_by_the_end_of_their_reason(
    store: TraceStore, path: Path, create: Create
) -> None:
    wanted = TrialResult(TrialStatus.CRASHED, 'rank 1 said "100%_" in this trial')
    other = TrialResult(TrialStatus.CRASHED, "in this trial it failed", stderr_tail="in this trial")
    first, second, damaged = create("a"), create("b"), create("c")
    for study, results in ((first, [other, wanted]), (second, [other]), (damaged, [wanted])):
        for result in results:
            store.tell(study.study_id, store.ask(study.study_id, Strategy(), "model", {}), result)
    store.ask(second.study_id, Strategy(), "model", {})
    _change(path, "UPDATE hvd_autosync_studies SET settings = '{' WHERE job_key = 'c'")
    ((study, (trial,)),) = store.trials_by_reason("in this trial")
    assert (study.study_id, trial.number, trial.result) == (first.study_id, 1, wanted)
    assert store.trials_by_reason("%_") == []


# Owners


def test_a_living_owner_keeps_its_study(store: TraceStore, path: Path, create: Create) -> None:
    study = create()
    assert store.claim_resumable("job") is None
    _set_owner(path, study, 100, host="elsewhere")
    assert store.claim_resumable("job") is None


@pytest.mark.parametrize(
    ("owner", "problem"),
    [
        ({"host": "a", "machine": "", "pid": "7", "started": ""}, "pid: '7' is wrong"),
        ({"host": "a"}, "missing required field `machine`"),
        ([], "Owner: \\[\\] is wrong"),
    ],
)
def test_a_damaged_owner_is_reported_and_the_study_can_be_deleted(
    store: TraceStore, path: Path, create: Create, owner: Any, problem: str
) -> None:
    study = create()
    _change(path, "UPDATE hvd_autosync_studies SET owner = ?", json.dumps(owner))
    for look_up in (store.interrupted, lambda: store.claim_resumable("job")):
        with pytest.raises(TraceFormatError, match=f"{study.study_id} is damaged.*{problem}"):
            look_up()
    store.delete(study.study_id)
    assert store.studies() == []


def test_the_newest_orphan_of_the_job_is_claimed_once(
    store: TraceStore, path: Path, create: Create
) -> None:
    older, newer, alive, other = create(), create(), create(), create("other")
    for orphan in (older, newer, other):
        _set_owner(path, orphan, 0, started="long ago")
    assert store.interrupted() == {older.study_id, newer.study_id, other.study_id}
    claimed = store.claim_resumable("job")
    assert claimed is not None and claimed.study_id == newer.study_id
    store.heartbeat(newer.study_id)
    claimed = store.claim_resumable("job")
    assert claimed is not None and claimed.study_id == older.study_id
    assert store.claim_resumable("job") is None
    assert store.study(alive.study_id) == alive


def test_heartbeats_keep_a_study_and_stop_counting_after_120_s(
    store: TraceStore, path: Path, create: Create
) -> None:
    study = create()
    _set_owner(path, study, 500)
    before = time.time()
    store.heartbeat(study.study_id)
    with sqlite3.connect(path) as connection:
        (beat,) = connection.execute("SELECT heartbeat_s FROM hvd_autosync_studies").fetchone()
    assert before <= beat <= time.time()
    _set_owner(path, study, 121, host="elsewhere")
    with pytest.raises(StoreError, match="does not belong"):
        store.heartbeat(study.study_id)
    assert store.claim_resumable("job") is not None


def test_a_heartbeat_does_not_wait_for_another_writer(
    store: TraceStore, path: Path, create: Create
) -> None:
    study = create()
    _set_owner(path, study, 50)
    query = "SELECT heartbeat_s FROM hvd_autosync_studies"
    writer = sqlite3.connect(path, isolation_level=None)
    before = writer.execute(query).fetchone()
    writer.execute("BEGIN IMMEDIATE")
    try:
        store.heartbeat(study.study_id)  # would wait for 30 s, and then be an error
    finally:
        writer.execute("ROLLBACK")
    assert writer.execute(query).fetchone() == before
    store.heartbeat(study.study_id)
    assert writer.execute(query).fetchone() > before
    writer.close()


@pytest.mark.parametrize("problem", ["full", "gone"])
def test_a_heartbeat_survives_a_store_that_fails(
    store: TraceStore, path: Path, create: Create, problem: str
) -> None:
    study = create()
    aside = path.with_name("aside.db")
    query = "SELECT heartbeat_s FROM hvd_autosync_studies"
    before = time.time()
    if problem == "full":
        _change(
            path,
            "CREATE TRIGGER full BEFORE UPDATE ON hvd_autosync_studies "
            "BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END",
        )
    else:
        store.close()
        for each in path.parent.glob(f"{path.name}*"):
            each.rename(f"{aside}{each.name.removeprefix(path.name)}")
        path.mkdir()  # so that SQLite makes no new one
    with pytest.raises(StoreError):
        store.ask(study.study_id, Strategy(), "default", {})
    store.heartbeat(study.study_id)
    if problem == "full":
        _change(path, "DROP TRIGGER full")
    else:
        path.rmdir()
        for each in path.parent.glob(f"{aside.name}*"):
            each.rename(f"{path}{each.name.removeprefix(aside.name)}")
    _set_owner(path, study, 500)
    store.heartbeat(study.study_id)
    with sqlite3.connect(path) as connection:
        (beat,) = connection.execute(query).fetchone()
    connection.close()
    assert before <= beat <= time.time()


def test_a_driver_changes_no_study_that_another_one_has_taken_over(
    store: TraceStore, path: Path, create: Create, space: SearchSpace
) -> None:
    study = create()
    study_id = study.study_id
    store.ask(study_id, Strategy(), "default", {})
    _set_owner(path, study, 10, host="elsewhere", pid=4321)
    before = _everything(store)
    for change in (
        lambda: store.ask(study_id, Strategy(), "model", {}),
        lambda: store.tell(study_id, 0, _CRASHED),
        lambda: store.describe_task(study_id, None, space),
        lambda: store.finish(study_id, StudyStatus.FAILED, {}, None),
        lambda: store.heartbeat(study_id),
    ):
        with pytest.raises(NotOwnerError, match=f"{study_id}.* 4321 on elsewhere") as caught:
            change()
        assert "hvd-autosync watch" in caught.value.hint
    assert _everything(store) == before
    assert store.claim_resumable("job") is None, "the other driver has kept it"
    store.keep_drift(study_id, ["a training reports what it has seen"])


def test_a_study_whose_other_driver_has_died_is_this_ones_once_it_is_changed(
    store: TraceStore, path: Path, create: Create
) -> None:
    study = create()
    _set_owner(path, study, 500, host="elsewhere")
    assert store.interrupted() == {study.study_id}
    number = store.ask(study.study_id, Strategy(), "default", {})
    assert store.interrupted() == frozenset()
    assert store.claim_resumable("job") is None, "a third driver would measure beside this one"
    store.heartbeat(study.study_id)
    store.tell(study.study_id, number, _CRASHED)


def test_a_fork_owns_a_study_for_the_process_that_has_opened_the_store(
    store: TraceStore, path: Path, create: Create
) -> None:
    study = create()
    _set_owner(path, study, 500, host="elsewhere")
    fork = _FORK.Process(target=store.ask, args=(study.study_id, Strategy(), "default", {}))
    fork.start()
    fork.join()
    assert fork.exitcode == 0
    store.heartbeat(study.study_id)


def test_ended_studies_are_not_resumed(store: TraceStore, create: Create) -> None:
    store.finish(create().study_id, StudyStatus.FAILED, {}, None)
    assert store.claim_resumable("job") is None


# Several processes

_DRIVER = """
import sys
from hvd_autosync.search_space import RankReport, Strategy, TrialResult, TrialStatus
from hvd_autosync.traces import TraceStore
store = TraceStore(sys.argv[1])
study_id = store.create_study(job_key="job", command=[], settings={}, versions={}).study_id
result = TrialResult(TrialStatus.COMPLETED, ranks=(RankReport(0, "a", (0.1,) * 50),))
while True:
    number = store.ask(study_id, Strategy(), "model", {})
    print(number, flush=True)
    store.tell(study_id, number, result)
"""


@pytest.mark.parametrize(("wal", "rounds"), [(True, 2), (False, 1)])
def test_a_driver_killed_at_any_moment_loses_at_most_the_trial_in_flight(
    path: Path, wal: bool, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_autosync.traces.location.Location.allows_wal", wal)
    store = TraceStore(path)
    for delay_s in (0.004, 0.0)[:rounds]:
        driver = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, str(path)], stdout=subprocess.PIPE, cwd=_ROOT
        )
        assert driver.stdout is not None
        while int(driver.stdout.readline()) < 3:
            pass
        assert store.claim_resumable("job") is None, "its driver is alive"
        time.sleep(delay_s)
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
        asked = [3, *map(int, driver.stdout.read().split())][-1]

        study = store.claim_resumable("job")
        assert study is not None
        trials = store.trials(study.study_id)
        assert [t.number for t in trials] == list(range(len(trials)))
        assert len(trials) > asked, "what was asked had been committed"
        assert all(t.result is not None for t in trials[:-1])
        number = store.ask(study.study_id, Strategy(), "model", {})
        assert number == len(trials)
        store.tell(study.study_id, number, _CRASHED)
        store.finish(study.study_id, StudyStatus.FINISHED, {}, None)
        with sqlite3.connect(path) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    store.close()


def _ask_often(store: TraceStore, study_id: str, numbers: multiprocessing.Queue[int]) -> None:
    for _ in range(15):
        number = store.ask(study_id, Strategy(), "model", {"process": os.getpid()})
        store.tell(study_id, number, _CRASHED)
        numbers.put(number)


def test_two_processes_ask_at_once(store: TraceStore, create: Create) -> None:
    study_id = create().study_id
    numbers: multiprocessing.Queue[int] = _FORK.Queue()
    children = [_FORK.Process(target=_ask_often, args=(store, study_id, numbers)) for _ in range(2)]
    for child in children:
        child.start()
    got = [numbers.get(timeout=120) for _ in range(30)]
    for child in children:
        child.join()
    assert sorted(got) == list(range(30))
    trials = store.trials(study_id)
    assert len({t.info["process"] for t in trials}) == 2
    assert all(t.result is not None for t in trials)


def _claim(path: Path, start: Any, claims: multiprocessing.Queue[bool]) -> None:
    store = TraceStore(path)
    start.wait()
    claims.put(store.claim_resumable("job") is not None)
    start.wait()  # stay alive until all have tried


def test_only_one_of_several_drivers_resumes(store: TraceStore, path: Path, create: Create) -> None:
    for _ in range(3):
        study = create()
        _set_owner(path, study, 0, started="long ago")
        start, claims = _FORK.Barrier(3), _FORK.Queue()
        children = [_FORK.Process(target=_claim, args=(path, start, claims)) for _ in range(3)]
        for child in children:
            child.start()
        assert sorted(claims.get(timeout=120) for _ in range(3)) == [False, False, True]
        for child in children:
            child.join()
        store.delete(study.study_id)
