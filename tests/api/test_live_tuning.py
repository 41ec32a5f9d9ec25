"""Following a training that is tuned in its own steps: what the store tells, and real trainings."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import hvd_autosync
from hvd_autosync.api import live_tuning
from hvd_autosync.api.live_tuning import Follower
from hvd_autosync.api.results import Study
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import settings_of, tuning_key
from hvd_autosync.errors import ConfigurationError, LiveTuningError
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host, SearchSpace, Strategy, catalogue_knob
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Conclusion, Trial
from hvd_autosync.traces import StudyStatus, TrialRecord

ROOT = Path(__file__).parents[2]
SMALL = "--model vgg --width 4 --depth 2 --size 8 --batch-size 2 --steps 100000"
COMMAND = [sys.executable, str(ROOT / "examples" / "synthetic_benchmark.py"), *SMALL.split()]
QUICK: dict[str, Any] = {"trials": 3, "steps": 8, "warmup": 2, "options": ["--gloo"]}
JOB = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),))
SPACE = SearchSpace((catalogue_knob("buckets"),))


class Events:
    """A listener that keeps the names of events, with the numbers of trials."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def take(*arguments: Any, **_: Any) -> None:
            number = next((each.number for each in arguments if hasattr(each, "number")), -1)
            self.seen.append((name, number))

        return take


class FakeTraining:
    """A training whose steps are those of a function, which is called between two looks."""

    def __init__(self) -> None:
        self.status: int | None = None
        self.refusal = ""
        self.output = Path("x.log")

    def last_lines(self) -> str:
        return "its last line"


def follower(
    folder: Path, *between: Callable[[FakeTraining], object], **given: Any
) -> tuple[Follower, FakeTraining, Events]:
    """A follower of a training that does one thing between every two looks."""
    training, left, events = FakeTraining(), [*between], Events()
    options = Options(store=str(folder / "t.db"), mode="live", **given)
    return (
        Follower(JOB, options, events, sleep=lambda _: left.pop(0)(training)),  # type: ignore[arg-type]
        training,
        events,
    )


def study_of(folder: Path) -> AskTellStudy:
    options = Options(store=str(folder / "t.db"), mode="live")
    settings, key = settings_of(options), tuning_key(JOB, options, {})
    return AskTellStudy.create(
        SPACE, store=options.store, settings=settings, job_key=key, command=JOB.display()
    )


def end(status: int, refusal: str = "") -> Callable[[FakeTraining], None]:
    def do(training: FakeTraining) -> None:
        training.status, training.refusal = status, refusal

    return do


def test_what_happens_in_the_store_is_told_in_order(tmp_path: Path) -> None:
    made: list[AskTellStudy] = []
    asked: list[Trial | None] = []

    def begin(_: object) -> None:
        made.append(study_of(tmp_path))
        asked.append(made[0].ask())

    def go_on(_: object) -> None:
        assert asked[-1] is not None
        made[0].tell(asked[-1], [0.1] * 12)
        if len(asked) < 3:
            asked.append(made[0].ask())

    def conclude(_: object) -> None:
        made[0].finish(Conclusion(Strategy(), "no gain", "enough", 0.1, ()))

    watched, training, events = follower(tmp_path, begin, go_on, go_on, go_on, conclude)
    record = watched.until_concluded(training)  # type: ignore[arg-type]
    assert record.status is StudyStatus.FINISHED and record.study_id == made[0].study_id
    told = [each for each in events.seen if each[0] != "on_trial_progress"]
    assert told == [
        ("on_study_start", -1),
        ("on_ask_start", -1),
        ("on_trial_start", 0),
        ("on_trial_end", 0),
        ("on_ask_start", -1),
        ("on_trial_start", 1),
        ("on_trial_end", 1),
        ("on_ask_start", -1),
        ("on_trial_start", 2),
        ("on_trial_end", 2),
        ("on_ask_start", -1),
        ("on_study_end", -1),
    ]
    assert ("on_trial_progress", 1) in events.seen, "a Stop button is looked at there"


def test_an_earlier_study_that_is_resumed_is_followed_and_others_are_not(tmp_path: Path) -> None:
    running, interrupted = study_of(tmp_path), study_of(tmp_path)
    trial = interrupted.ask()
    assert trial is not None
    interrupted.tell(trial, [0.1] * 12)
    interrupted.store.let_go(interrupted.study_id)

    def resume(_: object) -> None:
        assert interrupted.store.claim_resumable(interrupted.record.job_key) is not None

    watched, training, events = follower(tmp_path, resume, end(0))
    record = watched.until_concluded(training)  # type: ignore[arg-type]
    assert record.study_id == interrupted.study_id != running.study_id
    assert record.status is StudyStatus.RUNNING, "the training has ended before its tuning"
    assert [name for name, _ in events.seen] == ["on_study_start", "on_ask_start"]


def test_a_training_that_is_started_again_has_another_study(tmp_path: Path) -> None:
    made: list[AskTellStudy] = []

    def begin(_: object) -> None:
        made.append(study_of(tmp_path))

    def fail(_: object) -> None:
        made[0].store.finish(made[0].study_id, StudyStatus.FAILED, {"reason": "it failed"}, None)

    watched, training, events = follower(tmp_path, begin, fail, begin, end(0))
    record = watched.until_concluded(training)  # type: ignore[arg-type]
    assert record.study_id == made[1].study_id
    assert [name for name, _ in events.seen].count("on_study_start") == 2


def test_a_study_that_failed_is_returned_while_its_training_goes_on(tmp_path: Path) -> None:
    def begin(_: object) -> None:
        study = study_of(tmp_path)
        study.store.finish(study.study_id, StudyStatus.FAILED, {"reason": "it failed"}, None)

    nothing = [lambda _: None] * 20
    watched, training, _ = follower(tmp_path, begin, *nothing)
    assert watched.until_concluded(training).status is StudyStatus.FAILED  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ended", "said"),
    [(end(3), "status 3 .*\n.*last line"), (end(0, "it has Adasum"), "because it has Adasum")],
)
def test_a_training_without_a_study_is_an_error(
    tmp_path: Path, ended: Callable[[FakeTraining], None], said: str
) -> None:
    watched, training, _ = follower(tmp_path, ended)
    with pytest.raises(LiveTuningError, match=said):
        watched.until_concluded(training)  # type: ignore[arg-type]


def test_what_was_tuned_before_is_returned_at_once(tmp_path: Path) -> None:
    study = study_of(tmp_path)
    study.finish(Conclusion(Strategy(), "no gain", "enough", 0.1, ()))
    watched, training, events = follower(tmp_path)
    assert watched.until_concluded(training).study_id == study.study_id  # type: ignore[arg-type]
    assert events.seen == [("on_notice", -1)]
    watched, training, _ = follower(tmp_path, end(0), reuse="never")
    with pytest.raises(LiveTuningError):
        watched.until_concluded(training)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"mode": "alive"}, "invalid value 'alive' for mode"),
        ({"mode": "live", "allow": ["codec"]}, "lossy knobs"),
        ({"mode": "live", "runner": "cold"}, "says how trials are launched"),
        ({"mode": "live", "np": 1}, "a single rank"),
    ],
)
def test_what_cannot_be_tuned_so_starts_nothing(
    settings: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_tuning, "Training", SimpleNamespace)
    given = {"np": 2, "store": str(tmp_path / "t.db"), **settings}
    with pytest.raises(ConfigurationError, match=said):
        hvd_autosync.tune(COMMAND, **given)


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.mark.cluster
@pytest.mark.slow
def test_a_training_goes_on_under_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    seen: list[int] = []

    def watch(study: Study, trial: TrialRecord) -> None:
        seen.append(trial.number)

    store = str(tmp_path / "t.db")
    study = hvd_autosync.tune(COMMAND, np=2, mode="live", store=store, on_trial_end=watch, **QUICK)
    assert study.conclusion is not None and study.training is not None
    assert seen == [*range(len(study.history))]
    assert study.record.settings["mode"] == "live"
    training = study.training
    assert training.status is None and training.wait(0.1) is None
    assert "<Training running" in repr(training)
    assert training.output.stat().st_mode & 0o77 == 0, "it may print secrets"
    assert training.stop() == 143 == training.status
    assert f"study {study.study_id} ended after" in training.output.read_text()
    assert _children() == []
    again = hvd_autosync.tune(COMMAND, np=2, mode="live", store=store, **QUICK)
    assert again.study_id == study.study_id and again.training is not None
    assert again.training.status is None, "it trains under what was found before"
    again.training.stop()
    assert _children() == []


@pytest.mark.cluster
@pytest.mark.slow
def test_an_interrupt_ends_the_tuning_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    def interrupt(study: Study, trial: TrialRecord) -> None:
        signal.raise_signal(signal.SIGINT)

    study = hvd_autosync.tune(
        COMMAND, np=2, mode="live", store=str(tmp_path / "t.db"), on_trial_end=interrupt, **QUICK
    )
    training = study.training
    assert training is not None and study.record.status is StudyStatus.RUNNING
    said = "tuning was ended after"
    deadline = time.monotonic() + 300
    while said not in training.output.read_text():
        assert time.monotonic() < deadline and training.status is None, training.last_lines()
        time.sleep(0.1)
    assert training.status is None
    training.stop()
    assert _children() == []


OF_A_KERNEL = """
import sys, hvd_autosync
study = hvd_autosync.tune({command!r}, np=2, mode="live", store={store!r}, **{quick!r})
print("TUNED", flush=True)
sys.stdin.read()
"""


@pytest.mark.cluster
@pytest.mark.slow
def test_a_training_ends_with_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    code = OF_A_KERNEL.format(command=COMMAND, store=str(tmp_path / "t.db"), quick=QUICK)
    kernel = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert kernel.stdout is not None
    assert kernel.stdout.readline() == "TUNED\n"
    training = psutil.Process(kernel.pid).children(recursive=True)
    assert len(training) > 2
    kernel.kill()
    kernel.communicate()
    _, alive = psutil.wait_procs(training, timeout=60)
    assert alive == [], alive
