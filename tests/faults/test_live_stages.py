"""Six faults in each of five stages of a training that is tuned in its own steps.

Two hosts share a slow link, so that there is something to gain, to confirm and to switch to.
Whatever happens, a training that ends well has the model that it would have without tuning. One
that does not ends with a status of its own, and the same command then ends well. What was measured
stays.
"""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import sqlalchemy
import torch
from torch import nn

from hvd_autosync.errors import StoreError
from hvd_autosync.search_space import TrialResult
from hvd_autosync.testing import Testbed, testbed_missing
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore, TrialRecord

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_live.py"
RATE_MBIT = 100.0
WIDTH = 512
#: How long a rank or the network is away, seconds.
_AWAY_S = 4.0
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(testbed_missing() is not None, reason=str(testbed_missing())),
    pytest.mark.timeout(900),
]
Stage = Callable[["Training"], bool]


@dataclass
class Training:
    """A training on two hosts, started by the flag, as often as a test does so.

    Attributes:
        bed: The hosts.
        folder: For what it writes.
        horovodrun: Its path.
        store_path: The file of its store.
        said: What its last launch has said, once it has ended.
        filling: Fills the disk of the store until it ends.
    """

    bed: Testbed
    folder: Path
    horovodrun: str
    store_path: Path
    said: str = ""
    filling: threading.Thread | None = None
    _process: subprocess.Popen[str] = field(init=False)

    def start(self) -> None:
        words = [self.horovodrun, *self.bed.horovodrun_options(), "--gloo"]
        words += ["--autosync", "--autosync-mode", "live", "--autosync-store", str(self.store_path)]
        words += ["--autosync-trials", "3", "--autosync-steps", "8", "--autosync-warmup", "3"]
        words += ["--autosync-expected-hours", "10", sys.executable, str(SCRIPT)]
        words += ["--folder", str(self.folder), "--more", "10", "--width", str(WIDTH)]
        self._process = self.bed.popen(words, stderr=subprocess.PIPE, text=True)

    def wait(self) -> int:
        """Its exit status."""
        self.said = self._process.communicate(timeout=400)[1]
        if self.filling is not None:
            self.filling.join()
        return self._process.returncode

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def rank(self, number: int) -> psutil.Process:
        return next(self._find(str(SCRIPT), {"HOROVOD_RANK": str(number)}))

    def helper(self) -> psutil.Process:
        found = {each.pid: each for each in self._find("live_study", {})}
        return next(each for each in found.values() if each.ppid() not in found)

    def _find(self, word: str, variables: Mapping[str, str]) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command, environment = process.cmdline(), process.environ()
                ours = command[:1] == [sys.executable] and any(word in each for each in command)
                known = any(str(self.folder) in each for each in (*command, *environment.values()))
                if ours and known and variables.items() <= environment.items():
                    yield process

    @property
    def study(self) -> StudyRecord | None:
        """Its newest study; ``None`` before there is one that can be read."""
        if self.store_path.exists():
            with contextlib.suppress(StoreError, sqlalchemy.exc.SQLAlchemyError, sqlite3.Error):
                return next(iter(self.store.studies()), None)
        return None

    @property
    def store(self) -> TraceStore:
        return TraceStore(self.store_path)

    def under_way(self, *kinds: str) -> bool:
        """Whether a trial of one of the kinds has begun that has not ended."""
        last = self.trials[-1:]
        return bool(last) and last[0].result is None and last[0].kind in kinds

    @property
    def trials(self) -> list[TrialRecord]:
        """Those of its newest study."""
        study = self.study
        return [] if study is None else list(self.store.trials(study.study_id))

    @property
    def results(self) -> list[TrialResult]:
        """Of all its studies, from the oldest on."""
        if self.study is None:
            return []
        studies = reversed(self.store.studies())
        trials = [each for study in studies for each in self.store.trials(study.study_id)]
        return [each.result for each in trials if each.result is not None]

    def assert_model(self) -> None:
        """Assert that the model is that of as many steps without tuning."""
        steps = int((self.folder / "steps").read_text())
        found = torch.load(self.folder / "model", weights_only=True).values()
        for live, default in zip(found, model_after(steps), strict=True):
            # Some exchanges add in another order.
            assert (live - default).abs().max() <= 1e-5 * default.abs().max()


def model_after(steps: int) -> list[torch.Tensor]:
    """Parameters of the script's model after some steps of two ranks."""
    torch.manual_seed(1)
    layers = (nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(2):
            batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
            (model(batch).pow(2).mean() / 2).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


STAGES: dict[str, Stage] = {
    "set-up": lambda t: len(lines_of(t.folder / "set-ups")) == 2,
    "default": lambda t: t.under_way("default"),
    "trials": lambda t: t.under_way("model", "sobol"),
    "confirmation": lambda t: t.under_way("confirm"),
    "winner": lambda t: t.study is not None and t.study.status is StudyStatus.FINISHED,
}


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def kill_rank(training: Training) -> None:
    training.rank(1).kill()


def kill_helper(training: Training) -> None:
    training.helper().kill()


def stop_rank(training: Training) -> None:
    rank = training.rank(1)
    rank.send_signal(signal.SIGSTOP)
    time.sleep(_AWAY_S)
    rank.send_signal(signal.SIGCONT)


def cut_network(training: Training) -> None:
    training.bed.cut_off(1)
    time.sleep(_AWAY_S)
    training.bed.bring_back(1)


def lose_store(training: Training) -> None:
    for path in training.folder.glob("traces.db*"):
        path.unlink()


def fill_disk(training: Training) -> None:
    """Until the training ends: the store's journal comes and goes meanwhile."""
    filler = training.store_path.with_name("filler")

    def fill() -> None:
        with open(filler, "wb", buffering=0) as file:
            while training.runs:
                with contextlib.suppress(OSError):
                    file.write(bytes(4096))
                time.sleep(0.001)
        filler.unlink()

    training.filling = threading.Thread(target=fill)
    training.filling.start()


FAULTS: dict[str, Callable[[Training], None]] = {
    "rank killed": kill_rank,
    "helper killed": kill_helper,
    "rank stopped": stop_rank,
    "network cut": cut_network,
    "store lost": lose_store,
    "disk full": fill_disk,
}
#: How the end of a tuning is explained. After the other faults it goes on, or in a second launch.
SAID = {
    "helper killed": "live tuning has ended: the process that tunes has ended",
    "store lost": "live tuning has ended",
    "disk full": "live tuning has ended",
}
#: These stand for the rest.
NARROW = {("rank stopped", "trials")}
CASES = [
    pytest.param(fault, stage, marks=() if (fault, stage) in NARROW else pytest.mark.wide)
    for fault in FAULTS
    for stage in STAGES
]


@pytest.mark.parametrize(("fault", "stage"), CASES)
def test_a_fault_in_a_stage(
    fault: str, stage: str, tmp_path: Path, horovodrun: str, request: pytest.FixtureRequest
) -> None:
    disk = request.getfixturevalue("small_disk") if fault == "disk full" else tmp_path
    with Testbed(2, RATE_MBIT) as bed:
        training = Training(bed, tmp_path, horovodrun, disk / "traces.db")
        training.start()
        while training.runs and not STAGES[stage](training):
            time.sleep(0.01)
        assert training.runs, training.wait() or training.said
        kept = training.results
        FAULTS[fault](training)
        status = training.wait()
        if status != 0:
            assert fault == "rank killed", training.said
            assert not (tmp_path / "model").exists()
            training.start()
            status = training.wait()
        assert status == 0, training.said
        training.assert_model()
        if fault != "store lost":
            assert training.results[: len(kept)] == kept
        if said := SAID.get(fault):
            # After the study there is nothing left to lose.
            assert said in training.said or stage == "winner", training.said
        else:
            assert training.study is not None, training.said
            assert training.study.status is StudyStatus.FINISHED, training.said
