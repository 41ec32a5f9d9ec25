"""Tuning from Python: what is refused before anything starts, and real tunings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hvd_autosync
from hvd_autosync.api import notebook
from hvd_autosync.api.results import Study
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.reporting.widget import WidgetProgress
from hvd_autosync.search_space import SearchSpace, catalogue_knob
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord, TraceStore, TrialRecord

EXAMPLE = Path(__file__).parents[2] / "examples" / "synthetic_benchmark.py"
SMALL = "--model vgg --width 4 --depth 2 --size 8 --batch-size 2 --steps 100000"
QUICK: dict[str, Any] = {"trials": 3, "steps": 8, "warmup": 2, "options": ["--gloo"]}
KeepLinks = Callable[[Path, list[str]], None]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"np": 0}, "invalid value 0 for np"),
        ({"np": 2, "trails": 3}, "no argument 'trails'"),
        ({"np": 2, "trials": 0}, "invalid value '0'"),
        ({"np": 2, "allow": ["everything"]}, "invalid value 'everything'"),
        ({"np": 2, "tune_only": True}, "no argument 'tune_only'"),
        ({"np": 2, "recurring": True}, "no argument 'recurring'"),
        ({"np": 2, "mode": "auto"}, "invalid value 'auto' for mode"),
        ({"np": 2, "command": ""}, "the command is empty"),
        ({"np": 2, "args": (1,)}, "args and kwargs need a function"),
        ({"np": 2, "hosts": "a:1"}, "slots"),
        ({"np": 2, "store": "sqlite://"}, "a store in memory is lost; name a file"),
        ({"np": 2, "options": ["--no-such-option"]}, "horovodrun rejects this line"),
        ({"np": 2, "options": ["-np", "8"]}, "contradict the argument np: -np 8"),
        ({"np": 2, "hosts": "a:2", "options": ["-H", "c:2"]}, "contradict the argument hosts"),
        ({"np": 2, "trials": 3, "options": ["--autosync-trials", "9"]}, "the argument trials"),
        ({"np": True}, "invalid value True for np"),
        ({"np": 2, "command": 'python "train.py'}, "Close its quotes"),
        ({"np": 2, "command": b"python train.py"}, "invalid value b'python train.py' for command"),
        ({"np": 2, "command": ["python", None]}, "invalid value .* for command"),
        ({"np": 2, "command": "python train.py a\0b"}, "invalid value .* for command"),
        ({"np": 2, "hosts": ["a:2"]}, "invalid value .* for hosts"),
        ({"np": 2, "hosts": ""}, "invalid value '' for hosts"),
        ({"np": 2, "options": "--gloo"}, "invalid value '--gloo' for options"),
        ({"np": 2, "options": None}, "invalid value None for options"),
        ({"np": 2, "options": ["-p", 22]}, "invalid value .* for options"),
        ({"np": 2, "command": print, "args": "abc"}, "invalid value 'abc' for args"),
        ({"np": 2, "command": print, "kwargs": {1: 2}}, "invalid value .* for kwargs"),
        ({"np": 2, "on_trial_end": 5}, "invalid value 5 for on_trial_end"),
        ({"np": 2, "trials": [3]}, "invalid value .* for trials"),
        ({"np": 2, "store": 5}, "invalid value 5 for store"),
        ({"np": 2, "command": print, "trials": 0}, "invalid value '0'"),
        ({"np": 2, "store": "a\0b"}, "must be a path or a URL"),
        ({"np": 2, "space": ""}, "invalid value '' for --autosync-space: must be a path"),
    ],
)
def test_wrong_arguments_start_nothing(
    arguments: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    given = {"command": "python train.py", "store": str(tmp_path / "t.db"), **arguments}
    with pytest.raises(ConfigurationError, match=said):
        hvd_autosync.tune(**given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", ["launched", "live"])
def test_a_lossy_value_needs_its_group(mode: str, tmp_path: Path) -> None:
    space = tmp_path / "space.toml"
    space.write_text('[knobs.large_codec]\nfixed = "int8"\n')
    store = str(tmp_path / "t.db")
    with pytest.raises(ConfigurationError, match="the default of large_codec") as caught:
        hvd_autosync.tune(
            [sys.executable, EXAMPLE], np=2, space=space, store=store, mode=mode, options=["--gloo"]
        )
    assert "--autosync-allow codec" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [("HVD_AUTOSYNC_REPLAY", "last"), ("HVD_AUTOSYNC_MODE", "live"), ("HVD_AUTOSYNC_DISABLE", "1")],
)
def test_a_variable_for_something_else_than_tuning_is_refused(
    name: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=name):
        hvd_autosync.tune("python train.py", np=2, store=str(tmp_path / "t.db"))


@pytest.mark.parametrize("display", ["widget", "widget that fails", "no widget"])
@pytest.mark.parametrize("concludes", [False, True])
def test_a_notebook_shows_the_result_of_every_study(
    concludes: bool,
    display: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    location, space = str(tmp_path / "t.db"), SearchSpace((catalogue_knob("buckets"),))
    made = Study.create(space, store=location)
    trial = made.ask()
    assert trial is not None
    made.tell(trial, [0.1] * 20)
    conclusion = Conclusion(space.default, "nothing was faster", "all trials were used", 0.1)
    made.finish(conclusion)

    class Widget(WidgetProgress):
        def __init__(self, again: str) -> None:
            pass

        def on_study_end(self, study: AskTellStudy, conclusion: Conclusion) -> None:
            if display == "widget that fails":
                raise RuntimeError("the page is gone")

        def close(self) -> None:
            pass

    def tuned(job: Any, options: Any, listener: Any) -> StudyRecord:
        if concludes:  # else it is found in the store, and no study begins
            listener.on_study_end(made, conclusion)
        return made.record

    monkeypatch.setattr(notebook, "_in_notebook", lambda: True)
    if display == "no widget":
        monkeypatch.setitem(sys.modules, "ipywidgets", None)
    else:
        monkeypatch.setattr(notebook, "WidgetProgress", Widget)
    monkeypatch.setattr(notebook, "tune_job", tuned)
    words = [sys.executable, str(EXAMPLE)]
    study = hvd_autosync.tune(words, np=2, store=location, options=["--gloo"])
    said = capsys.readouterr().err
    assert ("ipywidgets is not installed" in said) is (display == "no widget")
    assert (f"hvd-autosync: {study}" in said) is not (concludes and display == "widget")


@pytest.mark.cluster
@pytest.mark.slow
def test_a_command_is_tuned_and_watched_and_goes_on_after_a_stop(
    tmp_path: Path, capfd: Any, keep_links: KeepLinks
) -> None:
    """In the same process, which lives on: a notebook's kernel."""
    store, seen = str(tmp_path / "t.db"), list[tuple[int, str]]()
    keep_links(tmp_path / "t.db", ["-np", "2", "--gloo", sys.executable, str(EXAMPLE)])

    def watch(study: Study, trial: TrialRecord) -> None:
        seen.append((len(study.history), trial.kind))
        assert study.space.knobs and study.best is not None, "from the first trial on"
        if len(seen) == 2:
            raise KeyboardInterrupt

    command = f"{sys.executable} {EXAMPLE} {SMALL}"
    with pytest.raises(KeyboardInterrupt):
        hvd_autosync.tune(command, np=2, store=store, on_trial_end=watch, **QUICK)
    (stopped,) = TraceStore(store).studies()
    study = hvd_autosync.tune(command, np=2, store=store, on_trial_end=watch, **QUICK)
    assert study.study_id == stopped.study_id and study.conclusion is not None
    assert [count for count, _ in seen] == [*range(1, len(study.history) + 1)]
    assert seen[0][1] == "default" and len(study.trials) == len(seen)
    assert study.best.strategy == study.record.winner
    said = capfd.readouterr().err
    assert "study" in said, "progress where there is no notebook"
    answer = said.splitlines()[-1]
    again = hvd_autosync.tune(command, np=2, store=store, **QUICK)
    assert again.study_id == study.study_id, "it was tuned before"
    assert capfd.readouterr().err.splitlines()[-1] == answer == f"hvd-autosync: {study}"


def train(width: int, steps: int = 1000) -> None:
    """A job that is a function, as in a notebook."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(width, width)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
    )
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, width)).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.cluster
@pytest.mark.slow
def test_a_function_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_links: KeepLinks
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    keep_links(tmp_path / "t.db", ["-np", "2", "--gloo", sys.executable, "a.py"])
    study = hvd_autosync.tune(train, np=2, args=(64,), store=str(tmp_path / "t.db"), **QUICK)
    assert study.conclusion is not None
    assert study.record.task is not None
    assert study.record.task.model.parameters[0].shape == (64, 64)
