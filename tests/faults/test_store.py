"""The store or the clock fails: a message says so, and no measurement is lost."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sqlite3
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hvd_autosync.traces import StudyStatus, TraceStore

if TYPE_CHECKING:
    from conftest import Job, Life

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

_CLOCK_JUMP = Path(__file__).parents[1] / "scripts" / "clock_jump.c"


def fails(life: Life, *words: str) -> None:
    """It ends with one of our errors that has all the words, and says nothing else of it."""
    assert life.wait() not in (0, None)
    assert "Traceback" not in life.said
    (_error,) = [line for line in life.lines if "hvd-autosync: error: " in line]
    assert all(re.search(word, life.said) for word in words), life.said


def goes_on(job: Job, kept: list[object], **keywords: int) -> None:
    """The same command finishes the study, and what was measured is still there."""
    assert kept
    last = job.start(**keywords)
    assert last.wait() == 0, last.said
    assert re.search(r"study \w+ resumes after", last.said)
    (study,) = job.store.studies()
    assert study.status is StudyStatus.FINISHED
    assert job.results()[: len(kept)] == kept


def store_with_a_study(job: Job) -> None:
    store = TraceStore(job.store_path)
    store.create_study(job_key="another", command=("python", "train.py"), settings={}, versions={})
    store.close()


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.root
@pytest.mark.wide  # what a driver does where a store cannot be written is shown by a lock, too
def test_the_disk_of_the_store_fills_up(job: Job, small_disk: Path) -> None:
    job.store_path = small_disk / "traces.db"
    job.store_option = str(job.store_path)
    job.keep_links()
    life = job.start(trials=5)
    assert life.until(lambda: life.trials >= 2), life.said
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as file:
        while life.process.poll() is None:  # SQLite's journal comes and goes meanwhile
            with contextlib.suppress(OSError):
                file.write(bytes(4096))
    fails(life, "full|disk I/O error", "Free some space")
    filler.unlink()
    kept = job.results()
    assert len(kept) >= 2
    job.await_nothing()
    goes_on(job, kept, trials=5)
    job.store.close()


def test_another_process_locks_the_store(job: Job) -> None:
    job.store_option = f"sqlite:///{job.store_path}?timeout=2"
    job.keep_links()
    life = job.start(trials=5)
    assert life.until(lambda: life.trials >= 2), life.said
    other = sqlite3.connect(job.store_path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        fails(life, "locked", "wait until it ends, or use another store")
    finally:
        other.close()
    goes_on(job, job.results(), trials=5)


@pytest.mark.wide
def test_a_lock_that_ends_in_time_goes_unnoticed(job: Job) -> None:
    life = job.start(trials=4)
    assert life.until(lambda: life.trials >= 1), life.said
    other = sqlite3.connect(job.store_path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    time.sleep(3)
    other.close()
    assert life.wait() == 0, life.said


def test_a_truncated_store_is_refused_and_left_as_it_is(job: Job) -> None:
    store_with_a_study(job)
    size = job.store_path.stat().st_size
    os.truncate(job.store_path, size // 2)
    before = digest(job.store_path)
    fails(job.start(trials=1), re.escape(str(job.store_path)), "damaged", "another store")
    assert digest(job.store_path) == before


@pytest.mark.wide
def test_a_store_that_is_truncated_meanwhile(job: Job) -> None:
    life = job.start(trials=8)
    assert life.until(lambda: life.trials >= 2), life.said
    os.truncate(job.store_path, 5000)
    for end in ("-wal", "-shm"):
        Path(f"{job.store_path}{end}").unlink(missing_ok=True)
    fails(life, re.escape(str(job.store_path)))


def test_a_newer_store_is_refused_and_left_as_it_is(job: Job) -> None:
    store_with_a_study(job)
    with sqlite3.connect(job.store_path) as connection:
        connection.execute(
            "UPDATE hvd_autosync_meta SET value = '99' WHERE name = 'schema_version'"
        )
    connection.close()
    before = digest(job.store_path)
    fails(job.start(trials=1), "newer hvd-autosync", "Upgrade")
    assert digest(job.store_path) == before


@pytest.mark.wide  # `traces/test_store.py` has two processes that ask at once
@pytest.mark.parametrize("same", [True, False], ids=["same job", "other job"])
def test_two_studies_at_once(job: Job, same: bool) -> None:
    job.keep_links()
    lives = [job.start(trials=3), job.start(*(() if same else ("--steps", "61")), trials=3)]
    assert [life.wait() for life in lives] == [0, 0], [life.said for life in lives]
    studies = job.store.studies()
    assert len(studies) == 2
    for study in studies:
        assert study.status is StudyStatus.FINISHED
        trials = job.store.trials(study.study_id)
        assert [trial.number for trial in trials] == list(range(len(trials)))
        assert all(trial.result is not None for trial in trials)


@pytest.mark.wide
def test_the_clock_jumps(job: Job, tmp_path: Path) -> None:
    """A week ahead and a year back, for the driver."""
    library, clock = tmp_path / "clock_jump.so", tmp_path / "clock"
    build = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(_CLOCK_JUMP), "-ldl"]
    subprocess.run(build, check=True)
    clock.write_text("0")
    job.environment |= {
        "LD_PRELOAD": str(library),
        "CLOCK_JUMP_FILE": str(clock),
        "CLOCK_JUMP_WORD": "--autosync-store",
    }
    life = job.start(trials=6)
    for number, days in enumerate((7, -365, 0), start=1):
        assert life.until(lambda number=number: life.trials >= number), life.said
        clock.write_text(str(days * 86_400))
    assert life.wait() == 0, life.said
    (study,) = job.store.studies()
    assert study.status is StudyStatus.FINISHED
    trials = job.store.trials(study.study_id)
    years = {trial.told_at[:4] for trial in trials if trial.told_at}
    assert len(years) > 1, "the clock did not jump"
    for trial in trials:
        assert trial.result is not None and trial.result.step_time is not None, trial
        assert 0 < trial.result.total_s < 100
        assert all(0 < step < 10 for rank in trial.result.ranks for step in rank.step_s)
