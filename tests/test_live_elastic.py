"""Elastic trainings that are tuned in their own steps, by real launches on changing hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvd_autosync.search_space import TrialResult, TrialStatus
from hvd_autosync.search_space.trial import VANISHED
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore

SCRIPT = Path(__file__).parent / "scripts" / "train_elastic.py"
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

QUICK = {"TRIALS": "2", "STEPS": "8", "WARMUP": "3", "EXPECTED_HOURS": "10"}
_PATIENCE_S = 240.0


@dataclass
class ElasticJob:
    """An elastic job on this host, which has two names; in a folder of its own.

    Attributes:
        folder: The folder.
        process: Its launcher.
    """

    folder: Path
    process: subprocess.Popen[str] | None = None

    def hosts(self, *lines: str) -> None:
        """Let the discovery script name other hosts from now on."""
        (self.folder / "new").write_text("".join(f"{line}\n" for line in lines))
        (self.folder / "new").replace(self.folder / "hosts")

    def start(self, horovodrun: str, *arguments: str, flag: bool = False) -> None:
        """Start the job, tuned by the flag or by the variable."""
        discovery = self.folder / "discover.sh"
        discovery.write_text(f"#!/bin/sh\ncat {self.folder}/hosts\n")
        discovery.chmod(0o755)
        elastic = ["--min-np", "2", "--max-np", "3", "--host-discovery-script", str(discovery)]
        launcher = [horovodrun, "-np", "2", *elastic, "--network-interfaces", "lo"]
        launcher += ["--autosync"] if flag else []
        script = [sys.executable, str(SCRIPT), "--folder", str(self.folder), *arguments]
        own = {f"HVD_AUTOSYNC_{name}": value for name, value in QUICK.items()}
        own["HVD_AUTOSYNC_STORE"] = str(self.folder / "traces.db")
        if not flag:
            own["HVD_AUTOSYNC_LIVE"] = "1"
        with open(self.folder / "said", "w") as said:
            self.process = subprocess.Popen(
                [*launcher, *script], env=os.environ | own, stdout=said, stderr=said, text=True
            )

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def wait_for(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first of the next steps of which something holds."""
        assert self.process is not None
        until = time.monotonic() + _PATIENCE_S
        steps = self.folder / "steps"
        begin = steps.stat().st_size if steps.exists() else 0
        while time.monotonic() < until and self.process.poll() is None:
            text = steps.read_text()[begin:] if steps.exists() else ""
            for line in text.splitlines(keepends=True):
                if line.endswith("\n") and what(step := json.loads(line)):
                    return dict(step)
            time.sleep(0.05)
        raise AssertionError(f"it did not come to that: {self.said}")

    def end(self) -> None:
        """Let the training end; its parameters are those of Horovod's own optimizer."""
        assert self.process is not None
        (self.folder / "end").touch()
        assert self.process.wait(timeout=120) == 0, self.said
        # Some exchanges add in another order.
        assert float((self.folder / "off").read_text()) < 1e-4
        until = time.monotonic() + 120
        while (left := _processes_of(self)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, left

    def studies(self) -> list[StudyRecord]:
        """The studies of the store, the earliest first."""
        return TraceStore(str(self.folder / "traces.db")).studies()[::-1]

    def failures(self) -> list[TrialResult]:
        """The results of all trials that have failed."""
        store = TraceStore(str(self.folder / "traces.db"))
        trials = [trial for study in self.studies() for trial in store.trials(study.study_id)]
        return [each.result for each in trials if each.result and not each.result.status.measured]


def _processes_of(job: ElasticJob) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(job.folder) in " ".join([*process.cmdline(), *process.environ().values()]):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[ElasticJob]:
    job = ElasticJob(tmp_path)
    yield job
    if job.process is not None and job.process.poll() is None:
        job.process.terminate()
        job.process.wait(timeout=120)


def test_tuning_starts_over_with_other_ranks_and_knows_those_of_before(
    job: ElasticJob, horovodrun: str
) -> None:
    job.hosts("localhost:2")
    job.start(horovodrun)
    job.wait_for(lambda step: step["watching"])
    job.hosts("localhost:2", "127.0.0.1:1")
    job.wait_for(lambda step: step["size"] == 3 and bool(step["trial"]))
    job.hosts("localhost:2")
    job.wait_for(lambda step: step["size"] == 2 and step["watching"])
    job.end()
    first, second = job.studies()
    assert not job.failures()
    assert first.status is StudyStatus.FINISHED, "of two ranks"
    assert second.status is not StudyStatus.FAILED, "of three ranks"
    assert f"using the result of study {first.study_id}" in job.said
    assert "goes on with 3 ranks, and its tuning starts over" in job.said


@pytest.mark.wide
def test_a_strategy_in_whose_trial_a_rank_vanishes_is_left_out(
    job: ElasticJob, horovodrun: str
) -> None:
    job.hosts("localhost:2", "127.0.0.1:1")
    job.start(horovodrun, "--vanishing", "127.0.0.1", flag=True)
    job.wait_for(lambda step: step["size"] == 2 and step["watching"])
    job.end()
    assert (job.folder / "vanished").exists()
    interrupted, finished = job.studies()
    (failure,) = job.failures()
    assert failure.status is TrialStatus.CRASHED and failure.reason == VANISHED
    assert interrupted.status is StudyStatus.RUNNING, "of three ranks; it can be resumed"
    assert finished.status is StudyStatus.FINISHED, "of two ranks"
