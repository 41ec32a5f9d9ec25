"""``horovodrun --autosync --autosync-mode launched``: which training follows the tuning."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvd_autosync.commands import tune_and_train as module
from hvd_autosync.commands.tune_and_train import tune_and_train
from hvd_autosync.engine import mode, training
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.tuning import TuningInterrupted
from hvd_autosync.errors import StoreError
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host, SearchSpace, Strategy, catalogue_knob
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.traces import TraceStore


def test_ctrl_c_starts_the_training_where_the_store_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = Options(store=str(tmp_path / "traces.db"))
    study = AskTellStudy.create(SearchSpace((catalogue_knob("buckets"),)), store=options.store)

    def gone(*_: object, **__: object) -> None:
        raise StoreError("the server does not answer", hint="Check it.")

    def interrupted(*_: object) -> None:
        monkeypatch.setattr(TraceStore, "trials", gone)
        raise TuningInterrupted(study)

    ran: list[Strategy] = []

    def run(job: Job, strategy: Strategy, *_: object, **__: object) -> SimpleNamespace:
        ran.append(strategy)
        return SimpleNamespace(status=7, stopped=False, drift="")

    monkeypatch.setattr(module, "_tuned", interrupted)
    monkeypatch.setattr(training, "run_training", run)
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),))
    assert tune_and_train(job, options) == 7
    assert ran == [Strategy()]
    said = capsys.readouterr().err
    assert "its trials cannot be read: the server does not answer" in said
    assert "the training runs unchanged" in said


def test_ctrl_c_while_an_earlier_result_is_read_starts_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    def run(*_: object, **__: object) -> None:
        pytest.fail("it trains")

    monkeypatch.setattr(module, "_tuned", interrupted)
    monkeypatch.setattr(training, "run_training", run)
    with pytest.raises(KeyboardInterrupt):
        tune_and_train(
            Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),)), Options(reuse="only")
        )


def test_ctrl_c_twice_as_the_tuning_ends_starts_no_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one may be taken for the end of what has ended by itself."""

    def pressed_twice(*_: object) -> None:
        for _ in range(2):
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(mode, "is_tuned", lambda *_: False)
    monkeypatch.setattr(module, "_tuned", pressed_twice)
    monkeypatch.setattr(module, "_run_winner", lambda *_: pytest.fail("it trains"))
    with pytest.raises(KeyboardInterrupt):
        tune_and_train(Job(("-np", "2"), ("python", "train.py"), (Host("a", 2),)), Options())
