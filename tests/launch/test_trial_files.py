"""The driver's handling of messages about a trial's files, and the trackers of trials."""

import base64
import json
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_autosync.launch.auto import AutoRunner
from hvd_autosync.launch.collector import Collector
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.private_files import FILES_VARIABLE, FilesOrder, NotPrivateError
from hvd_autosync.launch.trial_files import TrialFiles, offline_trackers
from hvd_autosync.runtime.driver.messages import Files, Refused
from hvd_autosync.search_space import Host, Strategy, TrialResult, TrialSpec, TrialStatus

CRASHED = TrialResult(TrialStatus.CRASHED, "rank 0 raised OSError")


def spec_of(name: str = "t", **fields: object) -> TrialSpec:
    return TrialSpec(name, Strategy(), 3, 10, **fields)  # type: ignore[arg-type]


class FilesReport:
    """The files of one trial, after one message about them."""

    def __init__(self, refused: Refused | None = None, **changed: Any) -> None:
        self.printed: list[str] = []
        self.files = TrialFiles(self.printed.append)
        self.spec = spec_of()
        self.files.variables(self.spec)
        written = Files("t", "a", 1, 5, 2**30, 0, "", 0)
        self.collector = Collector(self.spec, 1)
        self.collector.files.append(refused or replace(written, **changed))


def test_each_run_of_a_trial_has_files_of_its_own() -> None:
    files, orders = TrialFiles(print, "kept"), []
    for spec in (spec_of("a"), spec_of("a"), spec_of("b")):
        order = FilesOrder.of(files.variables(spec))
        assert order is not None and (order.key, order.keep) == (spec.key, "kept")
        orders.append(order.name)
    assert len(set(orders)) == 3
    assert FILES_VARIABLE not in files.variables(spec_of(probe=(Host("a", 1),)))


def encoded(**fields: object) -> str:
    return base64.b64encode(json.dumps(fields).encode()).decode()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("no base64!", "'no base64!' is no order"),
        (base64.b64encode(b"[" * 10**5).decode(), "is no order"),
        (base64.b64encode(b"[]").decode(), "is no order"),
        (encoded(name="t"), "is no order: .*'key'"),
        (encoded(name="t", key="k", mood="good"), "is no order: .*'mood'"),
        (encoded(name="t", key=5), "key: 5 is wrong: expected `str`"),
        (encoded(name="t", key="k", limit_bytes="9"), "limit_bytes: '9' is wrong"),
        (encoded(name="t", key="k", limit_bytes=-1), "limit_bytes: -1 is wrong"),
    ],
)
def test_a_malformed_order_names_the_variable_and_the_field(text: str, problem: str) -> None:
    with pytest.raises(NotPrivateError, match=f"{FILES_VARIABLE}: .*{problem}.*; unset it"):
        FilesOrder.of({FILES_VARIABLE: text})


def test_a_rank_with_a_malformed_order_ends_with_one_line() -> None:
    code = "import os; from hvd_autosync.launch.refusal import enter_or_refuse as e; e(os.environ)"
    environment = {FILES_VARIABLE: "no base64!", "HOROVOD_RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 69
    assert done.stderr.startswith(f"hvd-autosync: {FILES_VARIABLE}: 'no base64!' is no order")
    assert done.stderr.count("\n") == 1


def test_a_refusal_of_a_rank_is_raised() -> None:
    report = FilesReport(Refused("t", "a: unshare: not here"))
    with pytest.raises(NotPrivateError, match="not here"):
        report.files.process_messages(report.collector)


def test_late_messages_of_an_earlier_run_are_ignored() -> None:
    report = FilesReport(Refused("s", "late"))
    report.files.process_messages(report.collector)


@pytest.mark.parametrize(
    ("changed", "result", "hosts", "suspicion"),
    [
        ({"full": 1}, CRASHED, 1, "more than the 1024 MiB"),
        ({}, CRASHED, 2, "do not see each other's files"),
        ({"files": 0}, CRASHED, 2, ""),
        ({}, CRASHED, 1, ""),
        (
            {},
            TrialResult(TrialStatus.CRASHED, stderr_tail="[Errno 30] Read-only file system: 'x'"),
            1,
            "Read-only file system",
        ),
        (
            {},
            TrialResult(TrialStatus.CRASHED, "OSError: [Errno 18] Invalid cross-device link"),
            1,
            "Invalid cross-device link",
        ),
        (
            {},
            TrialResult(
                TrialStatus.CRASHED,
                stderr_tail="OSError: [Errno 75] Value too large for defined data type: 'log.txt'",
            ),
            1,
            "Value too large",
        ),
    ],
    ids=["full", "hosts", "nothing written", "one host", "read-only", "renamed", "of others"],
)
def test_private_files_are_suspected_if_a_report_or_an_error_suggests_it(
    changed: dict[str, int], result: TrialResult, hosts: int, suspicion: str
) -> None:
    report = FilesReport(**changed)
    report.files.process_messages(report.collector)
    found = report.files.suspicion(result, hosts)
    assert suspicion in found and bool(suspicion) == bool(found)


def test_a_large_copied_file_is_reported_once() -> None:
    report = FilesReport(copied="/data/a.bin", copied_bytes=12 * 10**9)
    for _ in range(2):
        report.files.process_messages(report.collector)
    (line,) = report.printed
    assert "/data/a.bin (12.0 GB)" in line and "reading" in line


def test_trackers_are_offline_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert offline_trackers({}) == {"WANDB_MODE": "offline"}
    assert offline_trackers({"WANDB_MODE": "online"}) == {}
    served = {"WANDB_MODE": "disabled", "MLFLOW_TRACKING_URI": "https://mlflow.example"}
    assert offline_trackers(served) == {"MLFLOW_TRACKING_URI": str(tmp_path / "mlruns")}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    said: list[str] = []
    files = TrialFiles(said.append)
    for _ in range(2):
        assert files.variables(spec_of())["MLFLOW_TRACKING_URI"].startswith("/")
    assert len(said) == 1 and "MLFLOW_TRACKING_URI=" in said[0]


class Refuses:
    """A runner whose trials cannot have private files."""

    def __init__(self, runner: AutoRunner, ends: list[TrialResult]) -> None:
        self.runner, self.ends, self.private = runner, ends, [True]

    def run(self, *trial: object) -> TrialResult:
        self.private.append(self.runner._files.private)
        if self.runner._files.private and not self.ends:
            raise NotPrivateError("no overlays")
        return self.ends.pop(0) if self.ends else TrialResult(TrialStatus.COMPLETED)

    def close(self) -> None:
        pass


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[AutoRunner, list[str]]:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    job = Job(("-np", "2"), ("sh", "run.sh"), (Host("localhost", 2),), "gloo")
    return AutoRunner(job, said.append, cold=True), said


def run(runner: AutoRunner) -> TrialStatus:
    return runner.run(spec_of(uuid.uuid4().hex), Limits(), lambda progress: None).status


def test_where_no_files_can_be_private_trials_run_watched(
    driven: tuple[AutoRunner, list[str]],
) -> None:
    runner, said = driven
    runner._cold = Refuses(runner, [])  # type: ignore[assignment]
    assert [run(runner), run(runner)] == [TrialStatus.COMPLETED] * 2
    assert runner._cold.private == [True, True, False, False]  # type: ignore[attr-defined]
    assert "trial files are not private: no overlays" in said[0]
    runner.close()


@pytest.mark.parametrize("again", [TrialStatus.COMPLETED, TrialStatus.CRASHED])
def test_a_trial_that_fails_may_fail_only_for_that(
    driven: tuple[AutoRunner, list[str]], again: TrialStatus
) -> None:
    runner, said = driven
    full = TrialResult(TrialStatus.CRASHED, "OSError: [Errno 28] No space left on device")
    runner._cold = Refuses(runner, [full, TrialResult(again), full])  # type: ignore[assignment]
    assert run(runner) is again
    blamed = again is TrialStatus.COMPLETED
    assert runner._files.private is not blamed
    assert any("trial files are not private" in line for line in said) is blamed
    assert run(runner) is TrialStatus.CRASHED
    assert len(runner._cold.private) == 4, "it is asked once"  # type: ignore[attr-defined]
    runner.close()
