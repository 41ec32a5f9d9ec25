"""What a machine with a GPU can show, beside the cases of ``tests/runtime``: ``make gpu-check``.

The ranks share the device if there are fewer devices than ranks.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from hvd_autosync.runtime.measure.profiler import _DeviceClock
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore

EXAMPLES = Path(__file__).parents[1] / "examples"
FORK_SERVER = "hvd_autosync.launch.fork_server"
QUICK = ["--autosync-trials", "6", "--autosync-steps", "20", "--autosync-expected-hours", "10"]
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use"),
]


def run_job(horovodrun: str, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [horovodrun, "-np", "2", "--gloo", *words], text=True, capture_output=True, timeout=280
    )
    print(done.stdout[-4000:], done.stderr[-4000:])  # pytest shows it when the test fails
    return done


def only_study(path: Path) -> StudyRecord:
    (study,) = TraceStore(str(path)).studies()
    assert study.status is StudyStatus.FINISHED
    assert study.task is not None
    assert study.task.resources.device == torch.cuda.get_device_name()
    return study


def held_out(output: str) -> float:
    """Bits per byte after the last epoch of the language model."""
    return float(re.findall(r"held-out ([\d.]+) bits/byte", output)[-1])


def test_events_time_what_the_device_does() -> None:
    """The host has only queued it by then."""
    factor = torch.randn(8192, 8192, device="cuda")
    product = factor @ factor
    torch.cuda.synchronize()
    clock, start = _DeviceClock(), time.perf_counter()
    begin = clock.now()
    for _ in range(20):
        torch.mm(factor, factor, out=product)
    queued_s = time.perf_counter() - start
    end = clock.now()
    torch.cuda.synchronize()
    waited_s = time.perf_counter() - start
    assert 0.8 * waited_s < clock.seconds(begin, end) < 1.05 * waited_s
    assert queued_s < 0.5 * waited_s


def test_a_training_is_tuned_in_its_own_steps(horovodrun: str, tmp_path: Path) -> None:
    # Steps are short there, and the study has to end before the training does.
    length = ["--epochs", "3", "--steps-per-epoch", "1000"]
    script = [sys.executable, str(EXAMPLES / "train_lm.py"), *length]
    store = tmp_path / "traces.db"
    flag = ["--autosync", "--autosync-mode", "live", "--autosync-store", str(store), *QUICK]
    tuned, plain = run_job(horovodrun, *flag, *script), run_job(horovodrun, *script)
    assert tuned.returncode == plain.returncode == 0
    assert "tuned in its own steps" in tuned.stderr
    study = only_study(store)
    assert study.settings["mode"] == "live"
    assert study.task is not None
    model = study.task.model
    assert model.forward_s > 0 < model.backward_s
    # Another order of sums, thousands of steps long.
    assert abs(held_out(tuned.stdout) - held_out(plain.stdout)) < 0.05


def test_fork_servers_never_open_the_device(horovodrun: str, tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "train_lm.py"), "--width", "256"]
    store = tmp_path / "traces.db"
    flag = ["--autosync", "--autosync-tune-only", "--autosync-mode", "launched"]
    with Devices() as seen:
        done = run_job(horovodrun, *flag, "--autosync-store", str(store), *QUICK, *script)
    assert done.returncode == 0
    assert only_study(store).settings["mode"] == "launched"
    assert seen.servers
    assert not seen.servers & seen.with_device
    assert seen.children & seen.with_device


class Devices:
    """Which fork servers there are meanwhile, and which processes have a GPU's file open.

    Attributes:
        servers: Ids of fork servers.
        children: Ids of what they forked.
        with_device: Ids of either that had a device open.
    """

    def __init__(self) -> None:
        self.servers: set[int] = set()
        self.children: set[int] = set()
        self.with_device: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Devices:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            named = {}
            for process in psutil.process_iter():
                try:
                    if FORK_SERVER in process.cmdline():
                        named[process.pid] = process.ppid()
                        if any(map(_is_device, Path(f"/proc/{process.pid}/fd").iterdir())):
                            self.with_device.add(process.pid)
                except (psutil.Error, OSError):  # gone meanwhile
                    continue
            forked = {pid for pid, parent in named.items() if parent in named}
            self.children |= forked
            self.servers |= named.keys() - forked - self.children


def _is_device(file: Path) -> bool:
    # nvidiactl and nvidia-uvm are open where the number of devices was asked for.
    return re.fullmatch(r"/dev/nvidia\d+", os.readlink(file)) is not None
