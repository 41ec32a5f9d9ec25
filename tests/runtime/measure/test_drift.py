"""Whether steps that became slower for good are noticed, and only those."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hvd_autosync.runtime.measure import drift
from hvd_autosync.runtime.measure.drift import FOR_GOOD, DriftWatch, Level
from hvd_autosync.runtime.patches.epochs import watch_epochs
from hvd_autosync.runtime.patches.evaluation import watch_evaluation
from hvd_autosync.search_space.trial import DRIFT_FILE, StepTime
from hvd_autosync.util import patches

WINDOW = 64


class Optimizer:
    """Something that is not the other."""

    process_set: object


class Training:
    """Steps of a training on a clock of its own."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 0, expected_s: float = 0.1
    ) -> None:
        monkeypatch.setattr(drift, "rank", lambda: rank)
        self.now = 0.0
        self.noise = np.random.default_rng(0)
        self.optimizer = Optimizer()
        self.watch = DriftWatch(expected_s, str(folder), clock=lambda: self.now)

    def windows(self, count: int, computing: float = 0.06, waiting: float = 0.04) -> None:
        for _ in range(count * WINDOW):
            factor = float(np.exp(self.noise.normal(0, 0.1)))
            self.now += factor * (computing + waiting)
            self.watch.waited(factor * waiting)
            self.watch.optimizer_stepped(self.optimizer)


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """The lines printed since the last call."""
    return lambda: [
        line.removeprefix("hvd-autosync: ") for line in capsys.readouterr().err.splitlines()
    ]


def numbers(said: str, pattern: str) -> list[float]:
    found = re.match(pattern, said)
    assert found is not None, said
    return [float(each) for each in found.groups()]


Said = Callable[[], list[str]]


def test_steady_steps_are_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    Training(tmp_path, monkeypatch).windows(100)
    assert said() == [] and list(tmp_path.iterdir()) == []


def test_slower_steps_are_reported_once_by_rank_0_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    training = Training(tmp_path, monkeypatch)
    training.windows(10)
    training.windows(30, waiting=0.14)
    (text,) = said()
    assert numbers(text, "steps have become slower: (.*) ms, tuning measured (.*) ms; ") == [
        pytest.approx(200, rel=0.05),
        100,
    ]
    assert "another job may use the network" in text
    assert (tmp_path / DRIFT_FILE).read_text() == text


def test_without_a_driver_no_file_is_left_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    monkeypatch.chdir(tmp_path)
    training = Training(tmp_path, monkeypatch)
    training.watch = DriftWatch(0.1, "", clock=lambda: training.now)
    training.windows(30, waiting=0.14)
    assert said() and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [1, 16])
def test_the_begins_of_epochs_are_left_out_as_by_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said, length: int
) -> None:
    """Else most rounds of local steps have an evaluation in them, and their median as well."""
    training = Training(tmp_path, monkeypatch)
    watch = training.watch = DriftWatch(0.1, "", length, lambda: training.now)
    watch_epochs(watch.epoch_begins)
    for _ in range(300):
        for step, _ in enumerate(DataLoader(range(22), batch_size=None)):
            training.now += 0.1 if step else 0.9
            watch.optimizer_stepped(training.optimizer)
    assert said() == []


def test_so_are_evaluations_of_a_script_without_loaders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """There is one in each round."""
    training, model = Training(tmp_path, monkeypatch), torch.nn.Linear(1, 1)
    watch = training.watch = DriftWatch(0.1, "", 16, lambda: training.now)
    patches.uninstall("evaluation")  # of another test
    watch_evaluation(watch.unlike_others)
    for step in range(5000):
        training.now += 0.1
        if step % 16 == 15:
            model.eval()
            training.now += 0.9
        watch.optimizer_stepped(training.optimizer)
    assert patches.uninstall("evaluation")
    assert said() == []


def test_other_ranks_leave_that_to_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    training = Training(tmp_path, monkeypatch, rank=1)
    training.windows(10)
    training.windows(30, waiting=0.14)
    assert said() == [] and list(tmp_path.iterdir()) == []


def test_a_rank_that_computes_more_slowly_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    training = Training(tmp_path, monkeypatch, rank=3)
    training.windows(10)
    training.windows(30, computing=0.15, waiting=0.0)
    (text,) = said()
    assert numbers(text, "rank 3 on .*: (.*) ms per step without waiting, (.*) ms at") == [
        pytest.approx(150, rel=0.05),
        pytest.approx(60, rel=0.05),
    ]
    assert list(tmp_path.iterdir()) == []


def test_what_makes_no_step_slower_is_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    training = Training(tmp_path, monkeypatch)
    training.windows(10, computing=0.001, waiting=0.1)
    training.windows(30, computing=0.003, waiting=0.1)
    assert said() == []


def test_who_waits_more_is_not_the_slow_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Though it computes more slowly while it waits."""
    training = Training(tmp_path, monkeypatch, rank=1)
    training.windows(10)
    training.windows(30, computing=0.08, waiting=0.14)
    assert said() == []


def test_rank_0_knows_its_own_slowness(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    training = Training(tmp_path, monkeypatch)
    training.windows(10)
    training.windows(30, computing=0.16)
    own, steps = said()
    assert own.startswith("rank 0 on ") and steps.startswith("steps have become slower")


def test_what_passes_is_not_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    training = Training(tmp_path, monkeypatch)
    for _ in range(6):
        training.windows(FOR_GOOD - 1, waiting=0.4)
        training.windows(1)
    assert said() == []


def test_a_training_that_is_slow_from_its_beginning_is_compared_with_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    Training(tmp_path, monkeypatch, expected_s=0.05).windows(20)
    (text,) = said()
    assert "tuning measured 50 ms" in text


def test_windows_last_long_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Quick steps: a window of a millisecond would say nothing."""
    training = Training(tmp_path, monkeypatch, expected_s=1e-5)
    training.windows(60, computing=1e-3, waiting=1e-3)  # 8 s in all
    assert said() == []


def test_slower_steps_are_reported_without_the_drivers_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    Training(tmp_path / "elsewhere", monkeypatch).windows(30, waiting=0.14)
    assert said()[0].startswith("steps have become slower")


def test_the_time_of_a_step_is_that_of_its_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """Three local steps in four are as quick as ever; the average takes longer."""
    training = Training(tmp_path, monkeypatch)
    training.watch = DriftWatch(0.1, str(tmp_path), 4, lambda: training.now)
    for step in range(60 * WINDOW):
        average = 0.16 if step < 20 * WINDOW else 0.56
        training.now += 0.06 + (average if step % 4 == 3 else 0.0)
        training.watch.waited(average if step % 4 == 3 else 0.0)
        training.watch.optimizer_stepped(training.optimizer)
    (text,) = said()
    assert numbers(text, "steps have become slower: (.*) ms, tuning measured (.*) ms; ") == [
        pytest.approx(200, rel=0.01),
        100,
    ]


def test_marks_alone_count_once_there_are_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    training = Training(tmp_path, monkeypatch, expected_s=0.5)
    for _ in range(20 * WINDOW):
        for _ in range(4):
            training.now += 0.25
            training.watch.optimizer_stepped(training.optimizer)
        training.watch.mark()
    (text,) = said()
    assert text.startswith("steps have become slower: 1000 ms, tuning measured 500 ms")


def test_steps_of_a_second_optimizer_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    training, second = Training(tmp_path, monkeypatch, expected_s=0.5), Optimizer()
    for _ in range(20 * WINDOW):
        training.now += 1.0
        training.watch.optimizer_stepped(training.optimizer)
        training.watch.optimizer_stepped(second)
    (text,) = said()
    assert text.startswith("steps have become slower: 1000 ms")


def test_steps_of_some_ranks_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """As of an optimizer of a process set, which steps first and more often."""
    training, of_some = Training(tmp_path, monkeypatch, expected_s=1.0), Optimizer()
    of_some.process_set = object()
    for _ in range(20 * WINDOW):
        for _ in range(2):
            training.now += 0.5
            training.watch.optimizer_stepped(of_some)
        training.watch.optimizer_stepped(training.optimizer)
    assert said() == []


@pytest.mark.parametrize("lengths", [[0.05] * 3 + [0.25], [0.2, 0.2, 0.01]])
def test_steps_of_several_lengths_are_no_news_until_they_become_slower(
    lengths: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """As of an alternation of batches; tuning has measured the mean of all."""
    training = Training(tmp_path, monkeypatch)
    measured_s = StepTime.from_steps(lengths * 10).mean_s
    training.watch = DriftWatch(measured_s, "", clock=lambda: training.now)
    for factor in (1.0, 1.5):
        assert said() == []
        for _ in range(20 * WINDOW):
            for length in lengths:
                training.now += factor * length
                training.watch.optimizer_stepped(training.optimizer)
    _, text = said()  # the rank computes more slowly, too
    assert numbers(text, "steps have become slower: (.*) ms, tuning measured (.*) ms; ") == [
        pytest.approx(1.5e3 * measured_s, rel=0.05),
        pytest.approx(1e3 * measured_s, rel=0.05),
    ]


def test_long_steps_that_trials_left_out_are_no_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """As the first of each epoch. A training that begins under a result watches all steps."""
    training = Training(tmp_path, monkeypatch)
    for factor in (1.0, 1.5):
        assert said() == []
        for step in range(20 * WINDOW):
            training.now += factor * (0.4 if step % 5 == 0 else 0.1)
            training.watch.optimizer_stepped(training.optimizer)
    _, text = said()  # the rank computes more slowly, too
    assert text.startswith("steps have become slower")


def test_steps_that_trials_leave_out_are_left_out_unless_they_are_the_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    training = Training(tmp_path, monkeypatch)
    training.watch = DriftWatch(0.1, "", clock=lambda: training.now, counts=False)
    for every in (5, 1):
        assert said() == []
        for step in range(20 * WINDOW):
            unlike = step % every == 0
            training.now += 0.4 if unlike else 0.1
            training.watch.end_step(typical=not unlike)
    _, text = said()
    assert text.startswith("steps have become slower: 400 ms")


def test_faster_steps_are_reported_once_and_no_rank_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    """As on a network that was busy while the job was tuned; the processors are slower, too."""
    training, drifted = Training(tmp_path, monkeypatch), list[str]()
    training.watch = DriftWatch(0.1, "", clock=lambda: training.now, on_drift=drifted.append)
    training.windows(5, computing=0.03, waiting=0.03)
    training.windows(15, computing=0.04, waiting=0.02)
    (text,) = said()
    assert drifted == [text]
    assert numbers(text, "steps have become faster: (.*) ms, tuning measured (.*) ms; ") == [
        pytest.approx(60, rel=0.05),
        100,
    ]


def levels(values: Iterable[float], expected: float | None = None) -> list[float]:
    level = Level(expected)
    return [moved for value in values if (moved := level.moved(value)) is not None]


def test_levels() -> None:
    assert levels([9.0] + [1.0] * 4 + [1.3] * 7) == []
    assert levels([9.0] + [1.0] * 4 + [1.3] * 8) == [1.3]
    assert levels([1.3] * 8, expected=1.0) == []
    assert levels([1.3] * 9, expected=1.0) == [1.3]
    assert levels([0.79] * 8 + [0.81] * 9, expected=1.0) == []
    assert levels([0.79] * 9, expected=1.0) == [0.79]


def test_a_level_does_not_grow_with_the_training() -> None:
    level, sizes = Level(), []
    for _ in range(2):
        for _ in range(1000):
            level.moved(0.1)
        sizes.append(len(pickle.dumps(level)))
    assert sizes[0] == sizes[1], "bytes after 1,000 and 2,000 windows"
