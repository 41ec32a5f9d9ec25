"""No process of ours imports what lies in the working directory; the script finds its own path."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_autosync.doctor import checks as doctor
from hvd_autosync.launch import command, remote
from hvd_autosync.launch.cold import ColdRunner
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.user_script import user_script
from hvd_autosync.launch.warm import WarmRunner
from hvd_autosync.runtime.optimizer import tuned
from hvd_autosync.search_space import Host, Strategy, TrialSpec, TrialStatus
from hvd_autosync.testing import daemon
from hvd_autosync.util.program import run_code

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tiny.py"
_MODULES = (
    "selectors",
    "socket",
    "json",
    "psutil",
    "numpy",
    "torch",
    "horovod",
    "hvd_autosync",
    "sqlalchemy",
    "ctypes",
)


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Makes the working directory a hostile one; what was imported from it."""
    folder, log = tmp_path / "hostile", tmp_path / "imported"
    folder.mkdir()
    log.touch()
    for name in _MODULES:
        path = folder / f"{name}.py"
        if name == "hvd_autosync":
            path = folder / name / "__init__.py"
            path.parent.mkdir()
        path.write_text(f"open({str(log)!r}, 'a').write({name!r} + ' ')\nraise SystemExit(9)\n")
    monkeypatch.chdir(folder)
    return log.read_text


def runs_on(
    monkeypatch: pytest.MonkeyPatch, use: Callable[[Job], object], answer: str = ""
) -> list[str]:
    """The lines for the shell of the other host that ``use`` sends there."""
    sent: list[str] = []

    def run_on(host: str, line: str, ssh: object) -> Any:
        sent.append(line)
        return SimpleNamespace(returncode=0, stdout=answer, stderr="")

    monkeypatch.setattr(remote, "run_on", run_on)
    monkeypatch.setattr(remote, "remote_hosts", lambda job: [Host("b", 1)])
    use(Job((), ("python", "train.py"), (Host("b", 1),)))
    return sent


def daemon_command(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that starts the daemon of a test bed, here with a plan that it refuses."""
    started: list[list[str]] = []

    def popen(words: list[str], **options: object) -> object:
        started.append(words)
        raise InterruptedError

    with monkeypatch.context() as patch, pytest.raises(InterruptedError):
        patch.setattr(daemon, "find", lambda: None)
        patch.setattr(subprocess, "Popen", popen)
        daemon.up(0, 1, [])
    return started[0]


def test_no_program_of_ours_imports_from_the_working_directory(
    imported: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    question = json.dumps({"parameters": [], "slots": [1], "device": "cpu"})
    sweep = runs_on(monkeypatch, lambda job: remote.sweep_remote_hosts(job, "nosuch"))
    version = runs_on(monkeypatch, remote.hosts_without_package)
    programs = {
        "look-up": (tuned._LOOK_UP, question, 0),
        "sweep": (shlex.split(sweep[0]), "", 0),
        "version": (shlex.split(version[0]), "", 0),
        "daemon": (daemon_command(monkeypatch), "", 1),
    }
    for name, (words, said, status) in programs.items():
        done = subprocess.run(words, input=said, text=True, capture_output=True)
        assert imported() == "", name
        assert done.returncode == status, done.stderr
    assert "hosts must be from 1" in done.stderr


def test_the_launcher_without_its_script_is_the_same_launcher(
    imported: Callable[[], str], horovodrun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = run_code(command._LAUNCH, "--help")
    done = subprocess.run(words, text=True, capture_output=True)
    assert (imported(), done.returncode) == ("", 0)
    assert "--autosync-trials" in done.stdout
    monkeypatch.setattr("os.path.exists", lambda path: False)
    assert command._horovodrun() == words[:-1]


def test_the_doctor_asks_elsewhere(imported: Callable[[], str], horovodrun: str) -> None:
    assert doctor._knows_autosync([sys.executable, "-m", "horovod.runner.launch"])
    assert imported() == ""


WAYS = [[], ["-I"], *([["-P"]] if sys.version_info >= (3, 11) else [])]


@pytest.mark.parametrize("options", WAYS)
def test_the_path_loses_the_working_directory_and_nothing_else(options: list[str]) -> None:
    python, *rest = run_code("print(sys.path)")
    plain = [python, *options, "-c", "import sys; print([x for x in sys.path if x])"]
    ours = [python, *options, *rest]
    assert subprocess.check_output(ours) == subprocess.check_output(plain)


PATHS = """
import json, sys
print("path", json.dumps(sys.path), flush=True)
print("argv", json.dumps(sys.argv), flush=True)
if "--help" in sys.argv:
    sys.exit()
"""


def said(kind: str, output: str) -> Any:
    return json.loads(next(x for x in output.splitlines() if x.startswith(kind)).partition(" ")[2])


def job_of(ranks: int, *words: str) -> Job:
    hosts = (Host("localhost", ranks),)
    return Job(("-np", str(ranks), "--gloo"), (sys.executable, *words), hosts, "gloo")


@pytest.mark.cluster
@pytest.mark.slow
def test_neither_do_the_processes_of_trials_and_the_script_has_its_own_path(
    imported: Callable[[], str], horovodrun: str, tmp_path: Path
) -> None:
    """The script lies elsewhere, so it does not ask for what lies here."""
    script = tmp_path / "train.py"
    script.write_text(PATHS + SCRIPT.read_text())
    job = job_of(2, str(script), "--steps", "30")
    plain = subprocess.run(
        [*job.command, "--help"], text=True, capture_output=True, check=True
    ).stdout
    probe = TrialSpec(uuid.uuid4().hex, Strategy(), 0, 0, probe=job.hosts)
    probed = ColdRunner(job).run(probe, Limits(), lambda state: None)
    assert (imported(), probed.status) == ("", TrialStatus.COMPLETED), probed
    runner = WarmRunner(job, user_script(job.command))
    try:
        spec = TrialSpec(uuid.uuid4().hex, Strategy(), 3, 10)
        result = runner.run(spec, Limits(), lambda state: None)
    finally:
        runner.close()
    assert (imported(), result.status) == ("", TrialStatus.COMPLETED), result.stderr_tail
    path = said("path", result.stderr_tail)
    assert path == said("path", plain) and path[0] == str(tmp_path)
    assert said("argv", result.stderr_tail) == list(job.command[1:])


@pytest.mark.cluster
@pytest.mark.slow
def test_a_module_has_the_working_directory_on_its_path(
    horovodrun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "training.py").write_text(PATHS + SCRIPT.read_text())
    monkeypatch.chdir(tmp_path)
    job = job_of(1, "-m", "training", "--steps", "30")
    plain = subprocess.run(
        [*job.command, "--help"], text=True, capture_output=True, check=True
    ).stdout
    runner = WarmRunner(job, user_script(job.command))
    try:
        spec = TrialSpec(uuid.uuid4().hex, Strategy(), 3, 10)
        result = runner.run(spec, Limits(), lambda state: None)
    finally:
        runner.close()
    assert result.status is TrialStatus.COMPLETED, result.stderr_tail
    assert said("path", result.stderr_tail) == said("path", plain)
