"""Whether steps that became slower for good are noticed, and only those."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from hvd_autosync.runtime import drift
from hvd_autosync.runtime.drift import FOR_GOOD, DriftWatch, Level

WINDOW = 64


class Optimizer:
    """Something that is not the other."""


class Training:
    """Steps of a training on a clock of its own."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int = 0, expected_s: float = 0.1
    ) -> None:
        monkeypatch.setattr(drift, "rank", lambda: rank)
        self.now = 0.0
        self.noise = np.random.default_rng(0)
        self.optimizer = Optimizer()
        self.watch = DriftWatch(expected_s, str(folder), lambda: self.now)

    def windows(self, count: int, computing: float = 0.06, waiting: float = 0.04) -> None:
        for _ in range(count * WINDOW):
            factor = float(np.exp(self.noise.normal(0, 0.1)))
            self.now += factor * (computing + waiting)
            self.watch.waited(factor * waiting)
            self.watch.optimizer_stepped(self.optimizer)


def notes(folder: Path) -> list[str]:
    return [line for path in folder.iterdir() for line in path.read_text().splitlines()]


def numbers(said: str, pattern: str) -> list[float]:
    found = re.match(pattern, said)
    assert found is not None, said
    return [float(each) for each in found.groups()]


def test_steady_steps_are_no_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path, monkeypatch)
    training.windows(100)
    assert notes(tmp_path) == []


def test_more_waiting_is_said_once_by_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path, monkeypatch)
    training.windows(10)
    training.windows(30, waiting=0.14)
    (said,) = notes(tmp_path)
    assert numbers(said, "steps take (.*) ms for good, where tuning measured (.*) ms: ") == [
        pytest.approx(200, rel=0.05), 100
    ]  # fmt: skip
    assert "another job is on the network, or a host is slow" in said
    assert capsys.readouterr().err == f"hvd-autosync: {said}\n"


def test_other_ranks_leave_that_to_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path, monkeypatch, rank=1)
    training.windows(10)
    training.windows(30, waiting=0.14)
    assert notes(tmp_path) == []


def test_a_rank_that_computes_more_slowly_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch, rank=3)
    training.windows(10)
    training.windows(30, computing=0.12, waiting=0.0)
    (said,) = notes(tmp_path)
    assert numbers(said, "rank 3 on .*: (.*) ms per step outside of waiting, (.*) ms at") == [
        pytest.approx(120, rel=0.05), pytest.approx(60, rel=0.05)
    ]  # fmt: skip


def test_rank_0_knows_its_own_slowness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path, monkeypatch)
    training.windows(10)
    training.windows(30, computing=0.16)
    own, steps = notes(tmp_path)
    assert own.startswith("rank 0 on ") and steps.endswith("this host computes more slowly")


def test_what_passes_is_not_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path, monkeypatch)
    for _ in range(6):
        training.windows(FOR_GOOD - 1, waiting=0.4)
        training.windows(1)
    assert notes(tmp_path) == []


def test_a_training_that_is_slow_from_its_beginning_is_told_from_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, monkeypatch, expected_s=0.05)
    training.windows(20)
    (said,) = notes(tmp_path)
    assert "where tuning measured 50 ms" in said


def test_windows_last_long_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick steps: a window of a millisecond would say nothing."""
    training = Training(tmp_path, monkeypatch, expected_s=1e-5)
    training.windows(60, computing=1e-3, waiting=1e-3)  # 8 s in all
    assert notes(tmp_path) == []


def test_without_the_drivers_folder_it_is_said_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = Training(tmp_path / "elsewhere", monkeypatch)
    training.windows(30, waiting=0.14)
    assert "steps take" in capsys.readouterr().err


def test_marks_and_other_optimizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a second optimizer are no steps; from the first mark on only marks are."""
    training = Training(tmp_path, monkeypatch, expected_s=1.0)
    second = Optimizer()
    for _ in range(20 * WINDOW):
        training.now += 1.0
        training.watch.optimizer_stepped(training.optimizer)
        training.watch.optimizer_stepped(second)
    training.watch.mark()
    for _ in range(20 * WINDOW):
        for _ in range(4):
            training.now += 0.25
            training.watch.optimizer_stepped(training.optimizer)
        training.watch.mark()
    assert notes(tmp_path) == []


def levels(values: Iterable[float], expected: float | None = None) -> list[float]:
    level = Level(expected)
    return [moved for value in values if (moved := level.moved(value)) is not None]


def test_levels() -> None:
    assert levels([9.0] + [1.0] * 4 + [1.3] * 7) == []
    assert levels([9.0] + [1.0] * 4 + [1.3] * 8) == [1.3]
    assert levels([1.3] * 8, expected=1.0) == []
    assert levels([1.3] * 9, expected=1.0) == [1.3]
