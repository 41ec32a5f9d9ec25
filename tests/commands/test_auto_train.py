"""``--autosync-mode auto``: what follows what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.commands import auto_train
from hvd_autosync.engine import mode
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.training import RunOutcome
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host

JOB = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),))


class Calls:
    """What was started, with its mode."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        reason: str | None,
        ended: RunOutcome,
        *,
        may_refuse: bool = True,
    ) -> None:
        self.started: list[tuple[str, str]] = []

        def live(job: Job, options: Options, **given: Any) -> RunOutcome:
            assert given == ({"may_refuse": True} if may_refuse else {})
            self.started.append(("live", options.mode))
            return ended

        def launched(job: Job, options: Options) -> int:
            self.started.append(("launched", options.mode))
            return 7

        monkeypatch.setattr(auto_train, "train_live", live)
        monkeypatch.setattr(auto_train, "tune_and_train", launched)
        monkeypatch.setattr(mode, "why_launched", lambda *_: reason)

    def status(self) -> int:
        return auto_train.train_auto(JOB, Options(mode="auto"))


@pytest.mark.parametrize(("tuned", "started"), [(True, "launched"), (False, "live")])
def test_live_alone_starts_a_job_that_was_tuned_under_its_winner(
    monkeypatch: pytest.MonkeyPatch, tuned: bool, started: str
) -> None:
    calls = Calls(monkeypatch, None, RunOutcome(3), may_refuse=False)
    monkeypatch.setattr(mode, "only_trains", lambda *_: tuned)
    status = auto_train.train_live_or_tuned(JOB, Options(mode="live"))
    assert status == (7 if tuned else 3)
    assert calls.started == [(started, started)]


def test_a_training_that_can_be_tuned_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, None, RunOutcome(3))
    assert calls.status() == 3
    assert calls.started == [("live", "live")]


@pytest.mark.parametrize(("reason", "lines"), [("", 0), ("one rank", 1)])
def test_a_reason_known_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reason: str, lines: int
) -> None:
    calls = Calls(monkeypatch, reason, RunOutcome(0))
    assert calls.status() == 7
    assert calls.started == [("launched", "launched")]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all("one rank" in line for line in said)


def test_a_live_stage_is_announced_with_its_condition(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(auto_train, "tune_and_train", lambda *given: len(given))
    options = Options(mode="auto", allow=("codec",), store=str(tmp_path / "traces.db"))
    assert auto_train.train_auto(JOB, options) == 3, "with what trains after it"
    (line,) = capsys.readouterr().err.splitlines()
    assert "tuned in its own steps, under what they find, unless that has lossy" in line


def test_a_reason_found_by_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Calls(monkeypatch, None, RunOutcome(0, refusal="Adasum"))
    assert calls.status() == 7
    assert calls.started == [("live", "live"), ("launched", "launched")]
    (said,) = capsys.readouterr().err.splitlines()
    assert "because Adasum" in said and "starts again" in said


def test_who_stops_the_training_meanwhile_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch, None, RunOutcome(143, stopped=True, refusal="Adasum"))
    assert calls.status() == 143
    assert calls.started == [("live", "live")]
