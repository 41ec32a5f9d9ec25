"""The table of faults: what goes wrong in a strategy's trials must not cost more than the trial.

Every job here is healthy by default and fails under every other strategy. Whatever the fault, the
study goes on to its end, the default is kept, the training runs, and nothing is left behind.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from hvd_autosync.engine.cluster import cluster_key
from hvd_autosync.engine.job_line import parse_words, read_job
from hvd_autosync.search_space import Links
from hvd_autosync.study.values import Conclusion
from hvd_autosync.testing import Testbed, testbed_missing
from hvd_autosync.traces import StudyStatus

if TYPE_CHECKING:
    from conftest import Job

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tiny.py"
pytestmark = [pytest.mark.cluster, pytest.mark.slow]

#: Fault -> (status of its trials, what the trace says of why).
FAULTS: dict[str, tuple[str, str]] = {
    "crash": ("crashed", "rank 1 raised RuntimeError: deliberate crash at step 5"),
    "kill": ("crashed", "rank 1 was killed by SIGKILL"),
    "memory": ("crashed", "rank 1 was killed by SIGKILL"),
    "exit": ("crashed", "rank 1 exited with status 7"),
    "disk": ("crashed", "rank 1 raised OSError: [Errno 28] No space left on device"),
    "hang": ("hung", "no step for"),
    "stop": ("hung", "no step for"),
    "flood": ("completed", ""),
    "children": ("completed", ""),
}


#: These stand for the rest: a rank that ends, and one that does not.
NARROW = (("crash", "auto"),)
# Cold launches share no state: three faults stand for the rest there.
WIDE = {
    *((fault, "auto") for fault in FAULTS),
    ("stop", "cold"),
    ("kill", "cold"),
    ("disk", "cold"),
} - {*NARROW}


@pytest.mark.parametrize(
    ("fault", "runner"),
    [*NARROW, *(pytest.param(*each, marks=pytest.mark.wide) for each in sorted(WIDE))],
)
def test_a_fault_costs_its_trial_and_nothing_else(
    fault: str, runner: str, job: Job, horovodrun: str, request: pytest.FixtureRequest
) -> None:
    environment = dict(job.environment)
    if fault == "disk":
        environment["FULL_DISK"] = str(request.getfixturevalue("small_disk"))
    status, reason = FAULTS[fault]
    # A strategy that survives its fault could win, and the training would have the fault too.
    after = ["--autosync-tune-only"] if status == "completed" else []
    words = [
        "-np",
        "2",
        "--gloo",
        "--autosync",
        "--autosync-mode",
        "launched",
        *after,
        "--autosync-trials",
        "2",
        "--autosync-steps",
        "8",
        "--autosync-warmup",
        "3",
        "--autosync-runner",
        runner,
        "--autosync-store",
        job.store_option,
        sys.executable,
        str(SCRIPT),
        "--fault",
        fault,
        "--at",
        "5",
        "--rank",
        "1",
        "--under-any",
        "HOROVOD_CYCLE_TIME",
    ]
    # To measure links takes a launch, which has none of these faults. As none is known there is no
    # cost model, and the second trial is a point of a sequence, which sets the variable.
    launched, _ = read_job(parse_words(words), words)
    job.store.keep_links(cluster_key(launched), Links())
    done = subprocess.run(
        [horovodrun, *words], text=True, capture_output=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "measuring the links" not in done.stderr
    assert done.stdout.count("trained 60 steps") == (0 if after else 1)
    traces = job.store
    (study,) = traces.studies()
    assert study.status is StudyStatus.FINISHED and study.outcome is not None
    default, *others = traces.trials(study.study_id)
    assert default.result is not None and default.result.step_time is not None
    results = [t.result for t in others if "cycle_time_ms" in t.strategy and t.kind == "sobol"]
    assert results
    for result in results:
        assert result is not None
        assert result.status.value == status, result
        assert reason in result.reason
    if status != "completed":
        assert Conclusion.from_json(study.outcome).best is None
    job.await_nothing()


@pytest.mark.root
@pytest.mark.skipif(testbed_missing() is not None, reason=str(testbed_missing()))
def test_a_host_that_is_cut_off_costs_its_trial(tmp_path: Path) -> None:
    """Its ranks end by themselves, and the next trial runs once the host is back."""
    with Testbed(hosts=2) as bed, two_trials(bed) as driver:
        bed.cut_off(1)
        assert driver.stdout.readline() == "hung\n"
        await_true(lambda: "train_tiny" not in processes_on(bed, 1))
        bed.bring_back(1)
        driver.stdin.write("\n")


@pytest.mark.root
@pytest.mark.skipif(testbed_missing() is not None, reason=str(testbed_missing()))
@pytest.mark.wide
def test_an_ssh_connection_that_drops_costs_its_trial(tmp_path: Path) -> None:
    with Testbed(hosts=2) as bed, two_trials(bed) as driver:
        network = network_of(bed.pids[1])
        assert network
        sessions = [
            process
            for process in psutil.process_iter(["cmdline"])  # none of zombies
            if "notty" in " ".join(process.info["cmdline"] or ())
            and network_of(process.pid) == network
        ]
        assert sessions
        for session in sessions:
            with suppress(psutil.NoSuchProcess):
                session.kill()
        assert driver.stdout.readline() in ("crashed\n", "hung\n")
        await_true(lambda: "train_tiny" not in processes_on(bed, 1))
        driver.stdin.write("\n")


def network_of(pid: int) -> str:
    """Network namespace of a process; empty once it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


@contextmanager
def two_trials(bed: Testbed) -> Iterator[Any]:
    """A driver of two trials: entered while the first is measured, left when both have ended.

    The second one begins when something was written to the driver, and must complete.
    """
    command = (sys.executable, str(SCRIPT), "--steps", "1000000")
    plan = json.dumps([bed.horovodrun_options(), command])
    driver = bed.popen(
        [sys.executable, "-c", TWO_TRIALS, plan],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdin is not None and driver.stdout is not None
    assert driver.stdout.readline() == "measuring\n"
    yield driver
    driver.stdin.flush()
    assert driver.stdout.readline() == "completed\n"
    assert driver.wait(120) == 0


TWO_TRIALS = """
import json, sys, uuid
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.user_script import user_script
from hvd_autosync.launch.warm import WarmRunner
from hvd_autosync.engine.job_line import parse_words, read_job
from hvd_autosync.search_space import Strategy, TrialSpec

options, command = json.loads(sys.argv[1])
words = [*options, "--gloo", *command]
job, _ = read_job(parse_words(words), words)
runner, reported = WarmRunner(job, user_script(job.command)), False

def progress(state):
    global reported
    if state.phase == "measuring" and not reported:
        reported = True
        print("measuring", flush=True)

for steps in (100_000, 10):
    spec = TrialSpec(uuid.uuid4().hex, Strategy(), 3, steps)
    limits = Limits(silence_s=5 if steps > 10 else 60)  # the last one must complete
    print(runner.run(spec, limits, progress).status.value, flush=True)
    if steps > 10:
        sys.stdin.readline()
runner.close()
"""


def processes_on(bed: Testbed, host: int) -> str:
    return str(
        bed.run(
            ["sh", "-c", "cat /proc/[0-9]*/cmdline"], host=host, capture_output=True, text=True
        ).stdout
    )


def await_true(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)
