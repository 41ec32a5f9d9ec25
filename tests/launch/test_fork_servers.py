"""The driver's side of fork servers, where none comes up."""

import subprocess
import sys
from pathlib import Path

import pytest

from hvd_autosync.launch import fork_servers
from hvd_autosync.launch.fork_servers import ForkServersError
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.launch.user_script import user_script
from hvd_autosync.launch.warm import WarmRunner
from hvd_autosync.search_space import Host, Strategy, TrialSpec

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tiny.py"


def test_progress_is_reported_while_servers_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A driver that says nothing meanwhile could be taken for dead."""
    enough = tmp_path / "enough"
    waits = f"for i in $(seq 6000); do [ -e {enough} ] && break; sleep 0.05; done"
    command = ["sh", "-c", f"{waits}; echo no torch here >&2; exit 1"]
    monkeypatch.setattr(
        fork_servers,
        "start_launcher",
        lambda *job, variables: subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        ),
    )
    words = (sys.executable, str(SCRIPT))
    job = Job(("-np", "1", "--gloo"), words, (Host("localhost", 1),), "gloo")
    seen: list[TrialProgress] = []

    def progress(said: TrialProgress) -> None:
        seen.append(said)
        if len(seen) == 3:
            enough.touch()

    with pytest.raises(ForkServersError, match="rank 0: no torch here"):
        WarmRunner(job, user_script(words)).run(TrialSpec("t", Strategy()), Limits(), progress)
    assert len(seen) >= 3 and {said.phase for said in seen} == {"starting"}
