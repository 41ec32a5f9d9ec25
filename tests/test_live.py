"""Trainings that are tuned in their own steps, by real launches."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
import torch

from hvd_autosync.launch.rendezvous import rendezvous
from hvd_autosync.search_space import Host
from hvd_autosync.traces import StudyStatus, TraceStore

SCRIPT = Path(__file__).parent / "scripts" / "train_live.py"
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

QUICK = {"TRIALS": "3", "STEPS": "8", "WARMUP": "3", "EXPECTED_HOURS": "10"}
KeepLinks = Callable[[Path, list[str]], None]
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class LiveJob:
    """A job of two ranks on this host, with a folder for what it writes.

    Attributes:
        folder: That folder.
        horovodrun: Its path.
        keep_links: The fixture.
        python: What runs the script.
    """

    folder: Path
    horovodrun: str
    keep_links: KeepLinks
    python: tuple[str, ...] = (sys.executable,)

    @property
    def store_path(self) -> Path:
        return self.folder / "traces.db"

    def variables(self, *, live: bool) -> dict[str, str]:
        own = {f"HVD_AUTOSYNC_{name}": value for name, value in QUICK.items()}
        own["HVD_AUTOSYNC_STORE"] = str(self.store_path)
        return os.environ | (own | {"HVD_AUTOSYNC_LIVE": "1"} if live else {})

    def script(self, *arguments: str) -> list[str]:
        return [*self.python, str(SCRIPT), "--folder", str(self.folder), *arguments]

    def run(self, *arguments: str, live: bool = True) -> Done:
        words = [self.horovodrun, "-np", "2", "--gloo", *self.script(*arguments)]
        return _run(words, self.variables(live=live))

    def flag(self, *arguments: str, mode: str = "live") -> list[str]:
        options = [
            word
            for name, value in QUICK.items()
            for word in (f"--autosync-{name.lower().replace('_', '-')}", value)
        ]
        flag = ["--autosync", "--autosync-store", str(self.store_path)]
        flag += [] if mode == "auto" else ["--autosync-mode", mode]  # it is the default
        return [self.horovodrun, "-np", "2", "--gloo", *flag, *options, *self.script(*arguments)]

    def with_flag(self, *arguments: str, mode: str = "live", measures: bool = False) -> Done:
        """Run with the flag; whether it measures links is up to the test."""
        words = self.flag(*arguments, mode=mode)
        if not measures:
            self.keep_links(self.store_path, words[1:])
        return _run(words, dict(os.environ))

    def with_codec(self, *arguments: str) -> list[str]:
        """Words that judge a codec before the training; links are not measured."""
        space = self.folder / "space.toml"
        space.write_text('[knobs.rest_codec]\nfixed = "fp16"\n')
        words = self.flag(*arguments, mode="auto")
        words[words.index("--autosync") : 0] = ["--autosync-allow", "codec"]
        words[words.index("--autosync") : 0] = ["--autosync-space", str(space)]
        self.keep_links(self.store_path, words[1:])
        return words

    @property
    def store(self) -> TraceStore:
        return TraceStore(str(self.store_path))

    def state(self, name: str) -> list[torch.Tensor]:
        state = torch.load(self.folder / name, weights_only=True)
        if name == "model":
            return [*state.values()]
        return [entry["momentum_buffer"] for _, entry in sorted(state["state"].items())]


def _run(words: list[str], variables: dict[str, str]) -> Done:
    return subprocess.run(words, text=True, capture_output=True, timeout=560, env=variables)


@pytest.fixture
def job(tmp_path: Path, horovodrun: str, keep_links: KeepLinks) -> LiveJob:
    return LiveJob(tmp_path, horovodrun, keep_links)


@pytest.fixture
def forked_job(job: LiveJob, fork_rank: Callable[[], list[str]]) -> LiveJob:
    """The job without the flag, whose key would have another command; its ranks are forked."""
    return replace(job, python=tuple(fork_rank()))


def assert_finished(job: LiveJob, done: Done) -> None:
    assert done.returncode == 0, done.stderr
    (study,) = job.store.studies()
    assert study.status is StudyStatus.FINISHED, done.stderr
    assert study.settings["mode"] == "live"
    kinds = {trial.kind for trial in job.store.trials(study.study_id)}
    assert {"default", "model"} <= kinds or {"default", "sobol"} <= kinds


@pytest.mark.parametrize("mode", [pytest.param("live", marks=pytest.mark.wide), "auto"])
def test_one_set_up_all_checkpoints_and_the_model_of_the_default(
    job: LiveJob, forked_job: LiveJob, mode: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    done = job.with_flag(mode=mode, measures=True)
    assert_finished(job, done)
    steps = int((job.folder / "steps").read_text())
    plain = replace(forked_job, folder=tmp_path_factory.mktemp("plain"))
    assert plain.run("--steps", str(steps), "--sleep", "0", live=False).returncode == 0
    assert "tuned in its own steps" in done.stderr
    assert "trace: hvd-autosync show" in done.stderr
    assert sorted((job.folder / "set-ups").read_text().split()) == ["0", "1"]
    checkpoints = sorted(int(path.name.split("-")[1]) for path in job.folder.glob("step-*"))
    assert checkpoints == [*range(9, steps, 10)]
    for name in ("model", "optimizer"):
        for live, default in zip(job.state(name), plain.state(name), strict=True):
            # Some exchanges add in another order.
            assert (live - default).abs().max() <= 1e-5 * default.abs().max(), name
    if mode == "auto":
        assert_only_trained(job, job.with_flag(mode=mode))


def assert_only_trained(job: LiveJob, again: Done) -> None:
    """Assert that a job has used the result of its study in this run."""
    assert again.returncode == 0, again.stderr
    (study,) = job.store.studies()
    said = [line for line in again.stderr.splitlines() if line.startswith("hvd-autosync: ")]
    assert "this job was tuned before" in said[0] and study.study_id in said[0]
    assert "trial" not in again.stderr and "tuning " not in again.stderr
    assert sorted((job.folder / "set-ups").read_text().split()) == ["0", "0", "1", "1"]


@pytest.mark.wide
def test_with_less_data_on_one_rank(forked_job: LiveJob) -> None:
    assert_finished(forked_job, forked_job.run("--uneven"))


@pytest.mark.wide
@pytest.mark.parametrize("losses", ["apart", "together"])
def test_two_optimizers(forked_job: LiveJob, losses: str) -> None:
    assert_finished(forked_job, forked_job.run("--two", losses))


def test_one_rank_alone_is_trained(forked_job: LiveJob) -> None:
    words = [forked_job.horovodrun, "-np", "1", "--gloo", *forked_job.script("--steps", "20")]
    done = _run(words, forked_job.variables(live=True))
    assert done.returncode == 0, done.stderr
    assert "not tuned: the job has a single rank" in done.stdout + done.stderr


@pytest.mark.mpi
def test_under_mpirun_alone(forked_job: LiveJob) -> None:
    words = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"]
    done = _run([*words, *forked_job.script()], forked_job.variables(live=True))
    assert_finished(forked_job, done)


@pytest.mark.parametrize(
    ("beside", "launcher"),
    [
        pytest.param("torch", "gloo", marks=pytest.mark.wide),
        pytest.param("mpi4py", "mpi", marks=[pytest.mark.mpi, pytest.mark.wide]),
    ],
)
def test_what_a_script_uses_beside_horovod_notices_nothing(
    job: LiveJob, beside: str, launcher: str
) -> None:
    """Trials of this knob initialize Horovod again."""
    space = job.folder / "space.toml"
    space.write_text("[knobs.buckets]\nfixed = 0\n")
    words = job.flag("--beside", beside)
    words[words.index("--gloo")] = f"--{launcher}"
    words[words.index("--autosync-mode") : 0] = ["--autosync-space", str(space)]
    job.keep_links(job.store_path, words[1:])
    assert_finished(job, _run(words, dict(os.environ)))
    (study,) = job.store.studies()
    trials = job.store.trials(study.study_id)
    assert {t.result.status.value for t in trials if t.result} == {"completed"}
    capacities = {t.strategy.get("cache_capacity", 1024) for t in trials}
    assert len(capacities) > 1, "there was another one to switch to and back"


@pytest.mark.wide
def test_plain_processes(job: LiveJob) -> None:
    gloo = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_IFACE": "lo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
    }
    with rendezvous("127.0.0.1", [Host("localhost", 2)]) as places:
        ranks = [
            subprocess.Popen(
                job.script(),
                env=job.variables(live=True) | gloo | place,
                stderr=subprocess.PIPE,
                text=True,
            )
            for place in places
        ]
        errors = [each.communicate(timeout=280)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], errors
    assert_finished(job, Done([], 0, "", errors[0]))


@pytest.mark.usefixtures("patient_helper")
@pytest.mark.parametrize(
    "how",
    ["raise", *(pytest.param(each, marks=pytest.mark.wide) for each in ("kill", "catch", "own"))],
)
def test_a_strategy_that_fails_is_left_out_when_the_training_is_started_again(
    job: LiveJob, how: str
) -> None:
    done = job.with_flag("--fails", how)
    assert done.returncode == 0, done.stderr
    assert "starting the training again" in done.stderr
    # A mechanism that has failed is in no study that goes on: then a new one begins.
    newest, *before = job.store.studies()
    assert newest.status is StudyStatus.FINISHED and newest.settings["mode"] == "live"
    assert [each.status for each in before] in ([], [StudyStatus.FAILED])
    trials = [t for study in (*before, newest) for t in job.store.trials(study.study_id)]
    failed = [t for t in trials if t.result and not t.result.ranks]
    assert [trial.result.status.value for trial in failed if trial.result] == ["crashed"]
    later = [t.strategy for t in trials if t.asked_at > failed[0].asked_at]
    assert later and failed[0].strategy not in later


@pytest.mark.wide
def test_a_killed_helper_does_no_harm(job: LiveJob) -> None:
    words = [job.horovodrun, "-np", "2", "--gloo", *job.script()]
    training = subprocess.Popen(
        words, env=job.variables(live=True), stderr=subprocess.PIPE, text=True
    )
    assert training.stderr is not None
    lines = iter(training.stderr.readline, "")
    assert any("trial 0 (default)" in line for line in lines)
    found = _helpers(job)  # what it has forked shows its words, too
    (helper,) = [pid for pid, parent in found.items() if parent not in found]
    os.kill(helper, signal.SIGKILL)
    rest = training.communicate(timeout=200)[1]
    assert training.returncode == 0, rest
    assert "the process that tunes has ended" in rest
    assert (job.folder / "model").exists()


def test_arguments_of_the_script_are_a_refusal_with_its_reason(forked_job: LiveJob) -> None:
    done = forked_job.run("--compression", "--steps", "60")
    assert done.returncode == 0, done.stderr
    assert "say how gradients are exchanged" in done.stderr
    assert "--autosync-mode launched" in done.stderr
    assert not forked_job.store_path.exists() or not forked_job.store.studies()


def test_parameters_in_another_order_on_each_rank_are_trained_as_without_us(
    forked_job: LiveJob,
) -> None:
    done = forked_job.run("--unordered", "--steps", "60")
    assert done.returncode == 0, done.stderr
    assert "this training is not tuned: ranks have different models" in done.stderr
    tuned = forked_job.state("model")
    assert forked_job.run("--unordered", "--steps", "60", live=False).returncode == 0
    assert all(torch.equal(*pair) for pair in zip(tuned, forked_job.state("model"), strict=True))


def test_what_cannot_be_tuned_in_its_own_steps_is_tuned_by_launched_trials(job: LiveJob) -> None:
    done = job.with_flag("--compression", "--steps", "60", mode="auto")
    assert done.returncode == 0, done.stderr
    because = [line for line in done.stderr.splitlines() if "say how gradients are" in line]
    assert len(because) == 1 and "starts again after launched trials" in because[0]
    (study,) = job.store.studies()
    assert study.status is StudyStatus.FINISHED
    assert "mode" not in study.settings, "its trials were launched"
    assert (job.folder / "steps").read_text() == "60"


def test_after_launched_trials_have_judged_codecs_exact_knobs_are_tuned_live(job: LiveJob) -> None:
    """The codec is a fixed one, so that it surely is the winner's."""
    words = job.with_codec()
    done = _run(words, dict(os.environ))
    assert done.returncode == 0, done.stderr
    live, launched = job.store.studies()
    assert [live.status, launched.status] == [StudyStatus.FINISHED] * 2, done.stderr
    assert "mode" not in launched.settings and live.settings["mode"] == "live"
    assert live.settings["judged_by"] == launched.study_id
    assert launched.winner is not None and live.winner is not None and live.space is not None
    assert launched.winner["rest_codec"] == live.winner["rest_codec"] == "fp16"
    assert live.space.default == launched.winner and not live.space.has_lossy
    first, *others = (t.strategy for t in job.store.trials(live.study_id))
    assert not first and all(strategy["rest_codec"] == "fp16" for strategy in others)
    assert sorted((job.folder / "set-ups").read_text().split()) == ["0", "1"], "of the training"
    again = _run(words, dict(os.environ))
    assert again.returncode == 0, again.stderr
    assert len(job.store.studies()) == 2 and "tuning " not in again.stderr
    assert f"(study {live.study_id})" in again.stderr


@pytest.mark.wide
def test_where_the_loss_guard_ends_the_codec_live_tuning_ends(job: LiveJob) -> None:
    words = job.with_codec("--diverges")
    words[words.index("--autosync-steps") + 1] = "100"  # the guard looks at several windows of 32
    done = _run(words, dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert "live tuning has ended: the loss guard has ended its lossy strategy" in done.stderr
    live, launched = job.store.studies()
    assert live.status is StudyStatus.RUNNING and launched.fallbacks and not live.fallbacks
    assert launched.study_id not in job.store.interrupted() and (job.folder / "model").exists()


def test_ctrl_c_ends_the_job_and_the_helper(job: LiveJob) -> None:
    words = [job.horovodrun, "-np", "2", "--gloo", *job.script("--steps", "100000")]
    training = subprocess.Popen(
        words, env=job.variables(live=True), stderr=subprocess.PIPE, text=True
    )
    assert training.stderr is not None
    assert any("trial 0 (default)" in line for line in iter(training.stderr.readline, ""))
    assert _helpers(job)
    training.send_signal(signal.SIGINT)
    training.communicate(timeout=240)
    # Horovod's launcher then has status 0 once in a while: its thread that ends a rank and the one
    # that waits for it both reap it (safe_shell_exec.py).
    assert not (job.folder / "model").exists()
    until = time.monotonic() + 120
    while time.monotonic() < until and _helpers(job):
        time.sleep(0.1)
    assert not _helpers(job)


@pytest.mark.usefixtures("patient_helper")
@pytest.mark.parametrize("stops", ["flag", pytest.param("scheduler", marks=pytest.mark.wide)])
def test_a_job_that_is_stopped_in_a_trial_blames_no_strategy(job: LiveJob, stops: str) -> None:
    plain = [job.horovodrun, "-np", "2", "--gloo", *job.script("--fails", "wait")]
    words = job.flag("--fails", "wait") if stops == "flag" else plain
    variables = dict(os.environ) if stops == "flag" else job.variables(live=True)
    job.keep_links(job.store_path, job.flag()[1:])
    training = subprocess.Popen(words, env=variables, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 400
    while time.monotonic() < until and not (job.folder / "failed").exists():
        time.sleep(0.1)
    failed = (job.folder / "failed").exists()
    processes = [psutil.Process(training.pid)]
    if stops == "scheduler":
        processes += processes[0].children(recursive=True)
    for each in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGTERM)
    said = training.communicate(timeout=240)[1]
    assert failed, said
    assert training.returncode != 0
    if stops == "flag":  # otherwise those that pass lines on have ended, too
        assert "the next run of this job resumes it" in said
    assert "starting the training again" not in said
    until = time.monotonic() + 120
    while time.monotonic() < until and _helpers(job):
        time.sleep(0.1)
    (study,) = job.store.studies()
    default, *_, last = job.store.trials(study.study_id)
    assert default.result is not None and last.strategy
    assert last.result is None, "it is tried again"
    assert study.study_id in job.store.interrupted()


def _helpers(job: LiveJob) -> dict[int, int]:
    """Helpers of ``job``, each with its parent process: another test may have some of its own."""
    found = {}
    for process in psutil.process_iter():
        try:
            if any("live_study" in word for word in process.cmdline()):
                folders = [word for word in process.environ().values() if str(job.folder) in word]
                found |= {process.pid: process.ppid()} if folders else {}
        except psutil.Error:
            continue
    return found
