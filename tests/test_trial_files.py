"""No trial leaves a file behind: scripts that save and resume, on real launches."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hvd_autosync.testing import Testbed, testbed_missing
from hvd_autosync.traces import TraceStore

SCRIPT = Path(__file__).parent / "scripts" / "train_resuming.py"
pytestmark = [pytest.mark.cluster, pytest.mark.slow]
QUICK = [
    "--gloo",
    "--autosync",
    "--autosync-mode",
    "launched",
    "--autosync-trials",
    "2",
    "--autosync-steps",
    "8",
    "--autosync-warmup",
    "3",
]
STEPS = [str(step) for step in range(100)]


def _tune_and_train(
    horovodrun: str,
    keep_links: Callable[[Path, list[str]], None],
    folder: Path,
    *command: str,
    before: tuple[str, ...] = (),
    options: str = "",
    status: int = 0,
) -> str:
    """The output of a job that has its files in ``folder/run``."""
    (folder / "run").mkdir(exist_ok=True)
    store = folder / "traces.db"
    words = ["-np", "2", *QUICK, "--autosync-store", str(store), *options.split(), *command]
    keep_links(store, words)
    done = subprocess.run(
        [*before, horovodrun, *words],
        cwd=folder / "run",
        text=True,
        capture_output=True,
        timeout=280,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def tune_and_train(
    horovodrun: str, keep_links: Callable[[Path, list[str]], None]
) -> Callable[..., str]:
    """``tune_and_train(folder, *command, before=(), options="", status=0)``; see above."""
    return partial(_tune_and_train, horovodrun, keep_links)


def assert_trained_from_the_beginning(said: str, folder: Path) -> None:
    assert re.findall(r"starting from step (\d+)", said) == ["0"]
    assert (folder / "run" / "log.txt").read_text().split() == STEPS
    assert {each.name for each in (folder / "run").iterdir()} == {"checkpoint.pt", "log.txt"}
    store = TraceStore(str(folder / "traces.db"))
    (study,) = store.studies()
    results = [trial.result for trial in store.trials(study.study_id)]
    assert all(result is not None and result.step_time is not None for result in results)
    assert [result.status.value for result in results if result] == ["completed"] * len(results)


def test_a_script_that_resumes_begins_at_its_beginning(
    tmp_path: Path, tune_and_train: Callable[..., str]
) -> None:
    said = tune_and_train(tmp_path, sys.executable, str(SCRIPT), ".")
    assert_trained_from_the_beginning(said, tmp_path)
    assert "trial files are not private" not in said


@pytest.mark.wide
def test_a_shells_script_too_in_fresh_launches(
    tmp_path: Path, tune_and_train: Callable[..., str]
) -> None:
    (tmp_path / "run.sh").write_text(
        f"touch started; {sys.executable} {SCRIPT} .; status=$?; rm -f started; exit $status\n"
    )
    said = tune_and_train(
        tmp_path,
        "sh",
        "../run.sh",
        options=f"--autosync-trials 1 --autosync-keep-trial-files {tmp_path}/kept",
    )
    assert_trained_from_the_beginning(said, tmp_path)
    logs = list((tmp_path / "kept").glob("*/*/**/run/log.txt"))
    # A trial ends within its last step, before the script writes of that.
    assert len(logs) == 1 and logs[0].read_text().split() == STEPS[:10]


@pytest.mark.root
@pytest.mark.skipif(testbed_missing() is not None, reason=str(testbed_missing()))
@pytest.mark.wide
def test_hosts_that_share_files_do_so_in_trials(tmp_path: Path, horovodrun: str) -> None:
    """Files of each host alone are tried first, in a fork and in a fresh launch."""
    (tmp_path / "run").mkdir()
    with Testbed(hosts=2) as bed:
        words = [
            horovodrun,
            *bed.horovodrun_options(),
            *QUICK,
            "--autosync-trials",
            "1",
            "--autosync-store",
            str(tmp_path / "traces.db"),
            sys.executable,
            str(SCRIPT),
            ".",
            "index",
        ]
        done = bed.run(
            words,
            cwd=tmp_path / "run",
            text=True,
            capture_output=True,
            timeout=280,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    (tmp_path / "run" / "index.txt").unlink()
    assert_trained_from_the_beginning(said, tmp_path)
    assert "trial files are not private: a trial failed with private files (rank 1" in said
    assert "its hosts do not see each other's files" in said
    assert f"changes that a trial makes in {tmp_path}/run, {SCRIPT} on this host are" in said


@pytest.mark.root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs unshare")
def test_without_namespaces_what_trials_change_is_put_back(
    tmp_path: Path, tune_and_train: Callable[..., str]
) -> None:
    """A folder in which a file is too large to be copied is not trained in once that is changed."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.txt").write_text("before\n")
    forbid = 'echo 0 > /proc/sys/user/max_mnt_namespaces; exec "$@"'
    before = ("unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh")
    said = tune_and_train(
        tmp_path,
        sys.executable,
        str(SCRIPT),
        ".",
        before=before,
        options=f"--autosync-trials 1 --autosync-keep-trial-files {tmp_path}/kept",
    )
    assert re.findall(r"starting from step (\d+)", said) == ["0"]
    assert (tmp_path / "run" / "log.txt").read_text().split() == ["before", *STEPS]
    assert "trial files are not private" in said and "unshare: " in said
    assert len(list((tmp_path / "kept").glob("**/checkpoint.pt*"))) == 1

    (tmp_path / "run" / "checkpoint.pt").unlink()
    with open(tmp_path / "run" / "log.txt", "a") as log:
        log.truncate(2 << 30)
    said = tune_and_train(
        tmp_path,
        sys.executable,
        str(SCRIPT),
        ".",
        before=before,
        status=1,
        options="--autosync-trials 1 --autosync-reuse never",
    )
    assert "starting from step" not in said
    assert f"a trial changed {tmp_path}/run/log.txt (2147.5 MB)" in said
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
