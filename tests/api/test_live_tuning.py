"""Trainings that are tuned in their own steps, from Python: what starts none, and real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import psutil
import pytest

import hvd_autosync
from hvd_autosync.api import live_tuning
from hvd_autosync.api.live_tuning import tune_live
from hvd_autosync.api.results import Study
from hvd_autosync.api.training import Training
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.study_options import settings_of, tuning_key
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.job import Job
from hvd_autosync.reporting.progress import GuardedProgress
from hvd_autosync.reporting.widget import StopRequested
from hvd_autosync.search_space import Host, SearchSpace, Strategy, catalogue_knob
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyStatus, TrialRecord

ROOT = Path(__file__).parents[2]
SMALL = "--model vgg --width 4 --depth 2 --size 8 --batch-size 2 --steps 100000"
COMMAND = [sys.executable, str(ROOT / "examples" / "synthetic_benchmark.py"), *SMALL.split()]
QUICK: dict[str, Any] = {"trials": 3, "steps": 8, "warmup": 2, "options": ["--gloo"]}
JOB = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),))
SPACE = SearchSpace((catalogue_knob("buckets"),))


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


class Started:
    """Trainings that are started are of this class."""

    all: ClassVar[list[Started]] = []

    def __init__(self, job: Job, options: Options, known: str = "") -> None:
        self.all.append(self)
        self.job, self.options, self.known = job, options, known
        self.output, self.status, self.tuning_ended, self.study_id = Path("x"), None, "", known
        self.did: list[str] = []
        if not known:
            self.study_id = self.make(options, job).study_id

    @staticmethod
    def make(options: Options, job: Job) -> AskTellStudy:
        """Let the tuning end at once."""
        return finished(options, job)

    def stop(self) -> None:
        self.did.append("stop")

    def end_tuning(self) -> None:
        self.did.append("end tuning")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Started]:
    monkeypatch.setattr(live_tuning, "Training", Started)
    monkeypatch.setattr(Started, "all", [])
    return Started.all


def study_of(options: Options, job: Job) -> AskTellStudy:
    settings, key = settings_of(options), tuning_key(job, options, {})
    return AskTellStudy.create(SPACE, store=options.store, settings=settings, job_key=key)


def finished(options: Options, job: Job) -> AskTellStudy:
    study = study_of(options, job)
    study.finish(Conclusion(Strategy(), "no gain", "enough", 0.1, ()))
    return study


@pytest.mark.parametrize("kept", ["", "its winner has local steps"])
def test_after_lossy_knobs_were_judged_the_result_is_what_the_training_follows(
    kept: str, tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of its live stage, unless the winner of the launched trials is kept."""
    options = Options(store=str(tmp_path / "t.db"), allow=("codec",), mode="live")
    judged, stage = (
        finished(options, JOB).record,
        finished(options, replace(JOB, options=())).record,
    )
    monkeypatch.setattr(live_tuning, "known_study", lambda *_: judged)
    monkeypatch.setattr(live_tuning, "live_study", lambda *_: stage)
    monkeypatch.setattr(live_tuning, "why_kept", lambda _: kept)
    record, training = tune_live(JOB, options, MagicMock())
    assert record == (judged if kept else stage)
    assert (training.study_id, started) == (record.study_id, [training])


@pytest.mark.parametrize("value", ["live", "launched", "auto"])
def test_the_argument_is_what_counts_as_the_mode(
    value: str, tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_AUTOSYNC_MODE", value)
    study = hvd_autosync.tune(COMMAND, np=2, mode="live", store=str(tmp_path / "t.db"))
    assert [study.training] == started and started[0].options.mode == "live"


def test_tuning_alone_is_not_live(
    tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVD_AUTOSYNC_TUNE_ONLY", "1")
    with pytest.raises(ConfigurationError, match="HVD_AUTOSYNC_TUNE_ONLY"):
        hvd_autosync.tune(COMMAND, np=2, mode="live", store=str(tmp_path / "t.db"))
    assert started == []


def running(options: Options, job: Job) -> AskTellStudy:
    study = study_of(options, job)
    trial = study.ask()
    assert trial is not None
    study.tell(trial, [0.1] * 12)
    return study


@pytest.mark.parametrize("event", ["on_study_start", "on_trial_start", "on_trial_end"])
@pytest.mark.parametrize(
    "error", [StopRequested("its id"), KeyboardInterrupt(), ValueError("MLflow is down")]
)
def test_what_ends_the_tuning_leaves_the_training(
    event: str,
    error: BaseException,
    tmp_path: Path,
    started: list[Started],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Started, "make", staticmethod(running))
    listener = MagicMock()
    getattr(listener, event).side_effect = error
    options = Options(store=str(tmp_path / "t.db"))
    if isinstance(error, KeyboardInterrupt):
        record, training = tune_live(JOB, options, listener)
        assert (record.study_id, training) == (started[0].study_id, started[0])
    else:
        with pytest.raises(ValueError, match="MLflow is down"):
            tune_live(JOB, options, listener)
    assert started[0].did == ["end tuning"]
    said = listener.on_notice.call_args.args[0]
    assert f"Study.load('{started[0].study_id}').training" in said, "it is not lost"
    assert "the training goes on" in said and "study.training.stop(), then the same call" in said


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError()])
def test_before_its_study_a_training_ends_with_the_call(
    error: BaseException, tmp_path: Path, started: list[Started]
) -> None:
    listener = MagicMock()
    listener.on_notice.side_effect = error
    with pytest.raises(type(error)):
        tune_live(JOB, Options(store=str(tmp_path / "t.db")), listener)
    assert started[0].did == ["stop"]


def test_stop_before_a_study_is_an_interrupt(
    tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pressed(*_: object) -> None:
        raise StopRequested("")

    monkeypatch.setattr(Started, "make", lambda *_: SimpleNamespace(study_id=""))
    monkeypatch.setattr(GuardedProgress, "on_wait", pressed)
    with pytest.raises(KeyboardInterrupt) as raised:
        hvd_autosync.tune(COMMAND, np=2, mode="live", store=str(tmp_path / "t.db"))
    assert raised.type is KeyboardInterrupt and started[0].did == ["stop"]


def test_stop_that_comes_with_the_result_ends_nothing(
    tmp_path: Path, started: list[Started]
) -> None:
    """The end of its tuning would keep the training from being tuned after drift."""
    listener = MagicMock()
    listener.on_study_end.side_effect = StopRequested("its id")
    record, _ = tune_live(JOB, Options(store=str(tmp_path / "t.db")), listener)
    assert record.status is StudyStatus.FINISHED and started[0].did == []


def test_a_second_interrupt_comes_after_the_tuning_has_ended(
    tmp_path: Path, started: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(training: Started) -> None:
        signal.raise_signal(signal.SIGINT)
        training.did.append("end tuning")

    monkeypatch.setattr(Started, "make", staticmethod(running))
    monkeypatch.setattr(Started, "end_tuning", again)
    listener = MagicMock()
    listener.on_trial_end.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        tune_live(JOB, Options(store=str(tmp_path / "t.db")), listener)
    assert started[0].did == ["end tuning"]
    assert "the training goes on" in listener.on_notice.call_args.args[0]


@pytest.mark.parametrize("hosts", ["localhost:2", "192.0.2.1:2"])
@pytest.mark.parametrize("reuse", ["auto", "only"])
def test_a_job_that_was_tuned_is_started_under_the_result(
    tmp_path: Path, started: list[Started], hosts: str, reuse: str
) -> None:
    """Also where rank 0 is on another host, which has another store."""
    name, _, slots = hosts.partition(":")
    job = replace(JOB, hosts=(Host(name, int(slots)),))
    options = Options(store=str(tmp_path / "t.db"), reuse=reuse)
    study = finished(options, job)
    listener = MagicMock()
    record, training = tune_live(job, options, listener)
    assert record.study_id == study.study_id
    assert [training] == started and started[0].known == study.study_id
    assert not listener.on_study_start.called


def test_a_job_that_was_tuned_is_tuned_again_if_that_is_wanted(
    tmp_path: Path, started: list[Started]
) -> None:
    options = Options(store=str(tmp_path / "t.db"), reuse="never")
    before = finished(options, JOB)
    record, _ = tune_live(JOB, options, MagicMock())
    assert record.study_id != before.study_id and started[0].known == ""


def test_interrupted_launched_trials_do_not_prevent_it(
    tmp_path: Path, started: list[Started]
) -> None:
    options = Options(store=str(tmp_path / "t.db"), mode="launched")
    study = study_of(options, JOB)
    study.ask()
    study.store.let_go(study.study_id)
    tune_live(JOB, options, MagicMock())
    assert [each.options.mode for each in started] == ["live"]


@pytest.mark.parametrize(
    ("job", "given", "said"),
    [
        (replace(JOB, hosts=(Host("192.0.2.1", 2),)), {}, "run on 192.0.2.1, not on this host"),
        (JOB, {"reuse": "only"}, "no finished study of this job, and reuse is 'only'"),
    ],
)
def test_what_is_known_to_fail_is_not_started(
    job: Job, given: dict[str, Any], said: str, tmp_path: Path, started: list[Started]
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        tune_live(job, Options(store=str(tmp_path / "t.db"), **given), MagicMock())
    assert started == []


def processes_of(folder: Path) -> list[psutil.Process]:
    """All other processes whose data are in this folder, whatever has become of their parents."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error):
            data = each.environ().get("XDG_DATA_HOME")
            if data == str(folder) and each.pid != os.getpid():
                found.append(each)
    return found


def wait_for(training: Training, text: str) -> None:
    """Wait until a training that goes on has printed this."""
    deadline = time.monotonic() + 300
    while text not in training.output.read_text():
        assert time.monotonic() < deadline and training.status is None, training.last_lines()
        time.sleep(0.1)
    assert training.status is None


def all_end(processes: list[psutil.Process]) -> bool:
    return psutil.wait_procs(processes, timeout=300)[1] == []


@pytest.mark.cluster
@pytest.mark.slow
def test_a_training_goes_on_under_what_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    seen: list[int] = []

    def watch(study: Study, trial: TrialRecord) -> None:
        assert study.space.knobs and study.best is not None, "from the first trial on"
        assert study.training is not None and study.training.status is None
        seen.append(trial.number)

    store = str(tmp_path / "t.db")
    study = hvd_autosync.tune(COMMAND, np=2, mode="live", store=store, on_trial_end=watch, **QUICK)
    assert study.conclusion is not None and study.training is not None
    assert seen == [*range(len(study.history))]
    assert study.record.settings["mode"] == "live"
    training = study.training
    assert training.status is None and training.wait(0.1) is None
    assert training.output.stat().st_mode & 0o77 == 0, "it may print secrets"
    assert len(processes_of(tmp_path)) >= 4, "a driver, a launcher and two ranks"
    assert training.stop() == 143 == training.status
    assert f"study {study.study_id} ended after" in training.output.read_text()
    assert all_end(processes_of(tmp_path))
    again = hvd_autosync.tune(COMMAND, np=2, mode="live", store=store, **QUICK)
    assert again.study_id == study.study_id and again.training is not training
    assert again.training is not None and again.training.status is None
    wait_for(again.training, f"using the result of study {study.study_id}")
    again.training.stop()
    assert all_end(processes_of(tmp_path))


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param("interrupt", "tuning was ended after", marks=pytest.mark.wide),
        ("kill", "the process that tunes has ended"),
    ],
)
def test_what_ends_a_tuning_leaves_its_training(
    how: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))

    def end(study: Study, trial: TrialRecord) -> None:
        if how == "interrupt":
            signal.raise_signal(signal.SIGINT)
        for each in processes_of(tmp_path):
            with suppress(psutil.Error):
                if "live_study" in " ".join(each.cmdline()):
                    each.kill()

    # So many that the tuning does not end before it is ended.
    many = {**QUICK, "trials": 300, "store": str(tmp_path / "t.db")}
    study = hvd_autosync.tune(COMMAND, np=2, mode="live", on_trial_end=end, **many)
    training = study.training
    assert training is not None and study.record.status is StudyStatus.RUNNING
    assert "the training goes on" in capsys.readouterr().err
    wait_for(training, said)
    training.stop()
    assert all_end(processes_of(tmp_path))


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
    training = [each for each in processes_of(tmp_path) if each.pid != kernel.pid]
    assert len(training) >= 4
    kernel.kill()
    kernel.communicate()
    assert all_end(training)
