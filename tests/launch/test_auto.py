"""When trials are warm or cold, and the messages about it."""

import errno
import shutil
import signal
import sys
import tempfile
import uuid
from pathlib import Path
from unittest.mock import Mock

import pytest

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch import auto
from hvd_autosync.launch.auto import AutoRunner
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.watched_files import WatchedFiles
from hvd_autosync.search_space import Host, Strategy, TrialResult, TrialSpec, TrialStatus
from hvd_autosync.search_space.trial import OUT_OF_TIME, PRUNED

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_tiny.py"


class Driven:
    """A runner with its messages."""

    def __init__(self, *words: str, controller: str | None = "gloo", cold: bool = False) -> None:
        options = ("-np", "2", *([f"--{controller}"] if controller else []))
        job = Job(options, words, (Host("localhost", 2),), controller)
        self.said: list[str] = []
        self.runner = AutoRunner(job, self.said.append, cold=cold)

    def run(self, **strategy: object) -> TrialResult:
        spec = TrialSpec(uuid.uuid4().hex, Strategy(strategy), 3, 10)
        return self.runner.run(spec, Limits(), lambda progress: None)

    @property
    def warm(self) -> bool:
        return self.runner._warm is not None


def test_a_message_says_why_a_command_that_is_no_script_runs_cold() -> None:
    driven = Driven("bash", "run.sh")
    assert not driven.warm
    (line,) = driven.said
    assert "each as a fresh launch" in line and "'bash'" in line


def test_requested_cold_trials_need_no_message() -> None:
    driven = Driven(sys.executable, str(SCRIPT), cold=True)
    assert not driven.warm and driven.said == []


@pytest.mark.parametrize(("default", "warm"), [("gloo", True), ("mpi", False)])
def test_trials_are_of_one_kind(default: str, warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default under MPI would be launched, and a candidate under Gloo forked."""
    monkeypatch.setattr(auto, "default_controller", lambda build: default)
    assert Driven(sys.executable, str(SCRIPT), controller=None).warm is warm
    assert Driven(sys.executable, str(SCRIPT)).warm


class Ends:
    """A runner whose trials end with the given results, one after the other, after 10 s each."""

    def __init__(self, *statuses: TrialStatus, reason: str = "") -> None:
        self.left = list(statuses)
        self._reason = reason
        self.limits: list[Limits] = []

    def run(self, spec: TrialSpec, limits: Limits, progress: object) -> TrialResult:
        self.limits.append(limits)
        return TrialResult(self.left.pop(0), self._reason, total_s=10.0)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("end", [TrialStatus.COMPLETED, TrialStatus.ENDED_EARLY])
def test_a_script_that_comes_to_its_end_is_trusted(end: TrialStatus) -> None:
    """It is not run a second time, and later failures are the strategy's."""
    driven = Driven(sys.executable, str(SCRIPT))
    driven.runner._warm = Ends(end, TrialStatus.CRASHED)  # type: ignore[assignment]
    driven.runner._cold = Ends()  # type: ignore[assignment]
    assert [driven.run().status for _ in range(2)] == [end, TrialStatus.CRASHED]
    assert driven.warm and driven.said == []


@pytest.mark.parametrize("first", [TrialStatus.CRASHED, TrialStatus.HUNG])
@pytest.mark.parametrize("again", [TrialStatus.COMPLETED, TrialStatus.ENDED_EARLY])
def test_a_fork_is_blamed_where_a_fresh_launch_comes_to_its_end(
    first: TrialStatus, again: TrialStatus
) -> None:
    driven = Driven(sys.executable, str(SCRIPT))
    driven.runner._warm = Ends(first)  # type: ignore[assignment]
    driven.runner._cold = Ends(again)  # type: ignore[assignment]
    assert driven.run().status is again
    assert not driven.warm and "fails in a forked process" in driven.said[0]


@pytest.mark.parametrize(
    ("reason", "blamed"), [(OUT_OF_TIME, False), (PRUNED, True)], ids=["no time", "slow"]
)
def test_a_repetition_that_has_no_time_shows_nothing(
    reason: str, blamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driven = Driven(sys.executable, str(SCRIPT))
    again = Ends(*[TrialStatus.CUT_SHORT] * 2, reason=reason)
    driven.runner._warm = Ends(TrialStatus.CRASHED)  # type: ignore[assignment]
    driven.runner._cold = again  # type: ignore[assignment]
    assert driven.run().status is (TrialStatus.CUT_SHORT if blamed else TrialStatus.CRASHED)
    assert driven.warm is not blamed and len(driven.said) == blamed
    # Likewise where private files are suspected.
    monkeypatch.setattr(driven.runner._files, "private", True)
    monkeypatch.setattr(driven.runner._files, "suspicion", lambda *_: "its output has a sign")
    driven.runner._watch = Mock()
    driven.runner._warm = None
    driven.said.clear()
    crashes = Ends(TrialStatus.CRASHED)

    def run(spec: TrialSpec, limits: Limits, progress: object) -> TrialResult:
        return (crashes if crashes.left else again).run(spec, limits, progress)

    monkeypatch.setattr(driven.runner, "_cold", Mock(run=run))
    assert driven.run().status is (TrialStatus.CUT_SHORT if blamed else TrialStatus.CRASHED)
    assert driven.runner._files.private is not blamed and len(driven.said) == blamed


def test_a_repetition_has_what_is_left_of_the_tunings_time() -> None:
    driven = Driven(sys.executable, str(SCRIPT))
    driven.runner._warm = Ends(TrialStatus.CRASHED)  # type: ignore[assignment]
    driven.runner._cold = cold = Ends(TrialStatus.COMPLETED)  # type: ignore[assignment]
    spec = TrialSpec(uuid.uuid4().hex, Strategy(), 3, 10)
    result = driven.runner.run(spec, Limits(total_s=25.0), lambda progress: None)
    assert (result.total_s, result.discarded_s) == (10.0, 10.0), "both runs count"
    assert [limits.total_s for limits in cold.limits] == [15.0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("again", [TrialStatus.COMPLETED, TrialStatus.CRASHED])
def test_the_times_of_all_runs_of_a_trial_count(
    again: TrialStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked and cold with private files, then cold without."""
    driven = Driven(sys.executable, str(SCRIPT))
    monkeypatch.setattr(driven.runner._files, "private", True)
    monkeypatch.setattr(driven.runner._files, "suspicion", lambda *_: "its output has a sign")
    crashed = TrialStatus.CRASHED
    driven.runner._watch = Mock()
    driven.runner._warm = Ends(crashed, crashed)  # type: ignore[assignment]
    driven.runner._cold = cold = Ends(crashed, again)  # type: ignore[assignment]
    spec = TrialSpec(uuid.uuid4().hex, Strategy(), 3, 10)
    result = driven.runner.run(spec, Limits(total_s=35.0), lambda progress: None)
    driven.runner.close()
    assert result.status is again
    assert (result.total_s, result.discarded_s) == (10.0, 30.0)
    assert [limits.total_s for limits in cold.limits] == [25.0, 5.0]  # type: ignore[attr-defined]


def test_a_trial_is_not_repeated_where_another_job_is_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That has no private files, and this one has."""
    monkeypatch.chdir(tmp_path)
    driven = Driven(sys.executable, str(SCRIPT), cold=True)
    monkeypatch.setattr(driven.runner._files, "private", True)
    monkeypatch.setattr(driven.runner._files, "suspicion", lambda *_: "its output has a sign")
    driven.runner._cold = Ends(*[TrialStatus.CRASHED] * 3)  # type: ignore[assignment]
    other = WatchedFiles(["python", "train.py"], print)
    assert driven.run().status is TrialStatus.CRASHED
    assert driven.runner._files.private and not driven.runner._files.cleared
    assert "another job is being tuned in" in driven.said[-1]
    other.close()
    assert driven.run().status is TrialStatus.CRASHED
    assert driven.runner._files.cleared
    WatchedFiles(["python", "train.py"], print).close()  # the folder is not kept


def test_a_probe_that_fails_is_no_sign_of_private_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs no script, and says nothing about a trial that fails later."""
    driven = Driven(sys.executable, str(SCRIPT), cold=True)
    monkeypatch.setattr(driven.runner._files, "private", True)
    monkeypatch.setattr(driven.runner._files, "suspicion", lambda *_: "its output has a sign")
    driven.runner._cold = Ends(TrialStatus.CRASHED)  # type: ignore[assignment]
    spec = TrialSpec("probe", Strategy(), 0, 0, probe=True)
    assert driven.runner.run(spec, Limits(), lambda progress: None).status is TrialStatus.CRASHED
    assert driven.runner._files.private and not driven.runner._files.cleared


def test_files_are_put_back_when_trials_begin_to_run_cold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they cannot be private."""

    class Writes(Ends):
        def run(self, spec: TrialSpec, limits: Limits, progress: object) -> TrialResult:
            Path("model.pt").write_text("of a trial")
            return super().run(spec, limits, progress)

    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_text("of the user")
    driven = Driven(sys.executable, str(SCRIPT))
    driven.runner._files.private = False
    driven.runner._warm = Writes(TrialStatus.CRASHED)  # type: ignore[assignment]
    driven.runner._cold = Writes(*[TrialStatus.COMPLETED] * 2)  # type: ignore[assignment]
    for _ in range(2):
        assert driven.run().status is TrialStatus.COMPLETED
        assert Path("model.pt").read_text() == "of the user"
    driven.runner.close()
    assert not driven.warm
    (line,) = [line for line in driven.said if "moved to" in line]
    shutil.rmtree(line.partition("moved to ")[2].partition(":")[0])


def test_ctrl_c_waits_until_files_are_put_back() -> None:
    class Watch:
        ended = False

        def begin(self, trial_id: str) -> None:
            pass

        def end(self) -> None:
            signal.raise_signal(signal.SIGINT)
            self.ended = True

    driven = Driven(sys.executable, str(SCRIPT), cold=True)
    driven.runner._cold = Ends(TrialStatus.COMPLETED)  # type: ignore[assignment]
    driven.runner._files.private = False
    driven.runner._watch = watch = Watch()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        driven.run()
    assert watch.ended  # type: ignore[attr-defined]


@pytest.mark.cluster
@pytest.mark.mpi
def test_all_trials_of_a_job_under_mpi_are_cold(horovodrun: str) -> None:
    driven = Driven(sys.executable, str(SCRIPT), controller=None)
    results = [driven.run(controller=name) for name in ("gloo", "mpi")]
    driven.runner.close()
    assert [result.status for result in results] == [TrialStatus.COMPLETED] * 2
    assert not driven.warm and driven.said == []


@pytest.mark.cluster
def test_a_script_that_cannot_be_forked_goes_on_cold(horovodrun: str, tmp_path: Path) -> None:
    """It refuses to run where torch is there before it."""
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nassert 'torch' not in sys.modules\n{SCRIPT.read_text()}")
    driven = Driven(sys.executable, str(script))
    assert driven.run().status is TrialStatus.COMPLETED
    assert not driven.warm
    (line,) = driven.said
    assert "fails in a forked process" in line and "AssertionError" in line


@pytest.mark.cluster
@pytest.mark.wide  # that of one which fails in a fork alone stands for it
def test_a_job_that_fails_either_way_is_not_blamed_on_the_fork(horovodrun: str) -> None:
    driven = Driven(sys.executable, str(SCRIPT), "--fault", "crash")
    assert driven.run().status is TrialStatus.CRASHED
    assert driven.said == []
    driven.runner.close()


def test_without_a_temporary_folder_no_trial_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    with pytest.raises(ConfigurationError, match=r"files: No usable .*'/tmp'") as caught:
        Driven(sys.executable, str(SCRIPT))
    assert "Set TMPDIR" in caught.value.hint
