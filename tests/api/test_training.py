"""The training beside a notebook: its status, its notes, and that it is not lost."""

from __future__ import annotations

import gc
import signal
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_autosync.api import training
from hvd_autosync.api.results import Study
from hvd_autosync.api.training import Training, training_of
from hvd_autosync.engine.options import Options
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.util.variables import STUDY_NOTE, TUNING_ENDED_NOTE

JOB = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),))
#: Waits for the end of the process that has started it.
WAITS = "import os; os.read(0, 1)"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """The code that drivers run."""
    code = [WAITS]
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(training, "run_main", lambda *_: [sys.executable, "-c", *code])
    monkeypatch.setattr(training, "_RUNNING", [])
    yield code
    for each in training._RUNNING:
        each.stop()


def noted(started: Training, name: str, text: str) -> None:
    Path(started._folder.name, name).write_text(text)


def test_what_a_signal_ended_has_the_status_of_horovodrun(driver: list[str]) -> None:
    started = Training(JOB, Options())
    assert started.status is None and "<Training running" in repr(started)
    assert started.stop() == 143 == started.status
    driver[:] = ["import os; os.kill(os.getpid(), 9)"]
    started = Training(JOB, Options())
    assert started.wait() == 137 == started.status
    assert "ended with status 137" in repr(started)


def test_output_that_was_deleted_hides_no_status(driver: list[str]) -> None:
    driver[:] = ["print('one', flush=True)"]
    started = Training(JOB, Options())
    assert started.wait() == 0 and started.last_lines() == "one"
    started.output.unlink()
    assert "was deleted" in started.last_lines()


def test_a_running_training_is_kept_that_nobody_holds(driver: list[str]) -> None:
    class Experiment:
        pass

    experiment = Experiment()
    experiment.me, experiment.started = experiment, Training(JOB, Options())  # type: ignore[attr-defined]
    folder = Path(experiment.started._folder.name)  # type: ignore[attr-defined]
    kept = weakref.ref(experiment.started)  # type: ignore[attr-defined]
    del experiment
    gc.collect()
    still = kept()
    assert folder.exists() and still is not None and still.status is None
    still.stop()
    del still
    Training(JOB, Options())
    gc.collect()
    assert kept() is None and not folder.exists(), "what has ended is not kept"


def test_a_study_knows_its_training(driver: list[str], tmp_path: Path) -> None:
    store = str(tmp_path / "t.db")
    study = AskTellStudy.create(store=store)
    assert Study.load(study.study_id, store).training is None
    started = Training(JOB, Options())
    assert started.study_id == started.tuning_ended == started.refusal == ""
    noted(started, STUDY_NOTE, study.study_id)
    noted(started, TUNING_ENDED_NOTE, "why")
    assert (started.study_id, started.tuning_ended) == (study.study_id, "why")
    assert Study.load(study.study_id, store).training is started is training_of(study.study_id)
    again = Training(JOB, Options(), known=study.study_id)
    assert Study.load(study.study_id, store).training is again, "the last one"


def test_an_interrupt_leaves_no_training_that_nobody_has(
    driver: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: str) -> list[str]:
        signal.raise_signal(signal.SIGINT)
        return [sys.executable, "-c", WAITS]

    monkeypatch.setattr(training, "run_main", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Training(JOB, Options())
    (started,) = training._RUNNING
    assert started.status is not None


def test_without_a_folder_nothing_is_started(
    driver: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/none")
    with pytest.raises(ConfigurationError, match="/proc/none"):
        Training(JOB, Options())
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("XDG_DATA_HOME", "/proc/none")
    with pytest.raises(ConfigurationError, match="/proc/none"):
        Training(JOB, Options())
    assert training._RUNNING == []
