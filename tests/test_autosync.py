"""The main job on real launches: ``horovodrun --autosync`` from its first line to its last."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hvd_autosync.launch.trial_files import offline_trackers
from hvd_autosync.runtime.driver.environment import TRIAL_VARIABLE, spec_from_environment
from hvd_autosync.search_space import Strategy, build_space
from hvd_autosync.search_space.sync_plan import beyond_horovod
from hvd_autosync.study.confirm import Comparison
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.values import Conclusion
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import StudyStatus, TraceStore, export_study

if TYPE_CHECKING:
    from conftest import ProcessesSeen

SCRIPT = Path(__file__).parent / "scripts" / "train_tiny.py"
pytestmark = [pytest.mark.cluster, pytest.mark.slow]

KeepLinks = Callable[[Path, list[str]], None]
QUICK = ["--autosync-trials", "3", "--autosync-steps", "8", "--autosync-warmup", "3"]


@pytest.fixture
def job(tmp_path: Path, horovodrun: str, keep_links: KeepLinks) -> "Job":
    return Job(tmp_path, horovodrun, keep_links)


@pytest.fixture
def default_job(job: "Job") -> "Job":
    """The job with the flag's own choice of where its trials run."""
    job.mode = []
    return job


class Job:
    """A tiny job with a store of its own, which is tuned by launched trials."""

    def __init__(self, folder: Path, horovodrun: str, keep_links: KeepLinks) -> None:
        self.folder, self.horovodrun, self._keep_links = folder, horovodrun, keep_links
        self.settings, self.mode = QUICK, ["--autosync-mode", "launched"]
        self.store_path = folder / "traces.db"

    def words(self, *script: str, options: tuple[str, ...] = ("--gloo",)) -> list[str]:
        return [
            self.horovodrun,
            "-np",
            "2",
            "--autosync",
            *self.settings,
            *self.mode,
            "--autosync-store",
            str(self.store_path),
            *options,
            sys.executable,
            str(SCRIPT),
            *script,
        ]

    def keep_links(self, options: tuple[str, ...] = ("--gloo",)) -> None:
        self._keep_links(self.store_path, self.words(options=options)[1:])

    def run(self, *script: str, options: tuple[str, ...] = ("--gloo",)) -> "Done":
        return subprocess.run(
            self.words(*script, options=options), text=True, capture_output=True, timeout=560
        )

    @property
    def store(self) -> TraceStore:
        return TraceStore(str(self.store_path))


Done = subprocess.CompletedProcess[str]


IN_VARIABLE, IN_ARGUMENT = "s3cret-of-a-variable", "s3cret-of-an-argument"
#: Read by every Python at its start: it writes down what is drawn, and which file draws it.
RECORDS = """
import os, sys
_urandom = os.urandom
def urandom(size):
    drawn = _urandom(size)
    if size >= 16:
        with open(os.environ["DRAWN"], "a") as file:
            name = os.path.basename(sys._getframe(1).f_code.co_filename)
            file.write(f"{name} {drawn.hex()}\\n")
    return drawn
os.urandom = urandom
"""


class Secrets:
    """The user's, and ours as these are drawn."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "sitecustomize.py").write_text(RECORDS)
        self.file = folder / "drawn"
        self.file.touch()
        monkeypatch.setenv("PYTHONPATH", str(folder))
        monkeypatch.setenv("DRAWN", str(self.file))
        monkeypatch.setenv("MY_API_TOKEN", IN_VARIABLE)

    def drawn_by(self, file: str) -> list[str]:
        """In digits."""
        lines = (line.split() for line in self.file.read_text().splitlines())
        return [digits for name, digits in lines if name == file]


def assert_no_secret_is_shown(
    secrets: Secrets,
    tuned: "ProcessesSeen",
    trained: "ProcessesSeen",
    line: list[str],
    winner: Strategy,
) -> None:
    """By processes of a tuning with its training, and of that training alone."""
    # Ours are these variables, Horovod's settings, and what torch sets for all it starts.
    ours = {
        f"HVD_AUTOSYNC_{name}"
        for name in ("TRIAL", "TRIAL_ID", "DRIVER", "CONTROLLERS", "KEY", "FILES")
    }
    ours |= {*offline_trackers({}), "SPT_NOENV", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}
    added = {each for each in tuned.variables if each not in trained.variables}
    assert {name for name in added if not name.startswith("HOROVOD_")} <= ours
    assert tuned.variables_with("servers-"), "fork servers were seen"
    for seen in (tuned, trained):
        # Horovod writes the environment of ranks on command lines (``gloo_run.py``): those of a
        # shell and, until it becomes the rank, of ``env``.
        showing = [each.replace(b"\0", b" ") for each in seen.lines_with(IN_VARIABLE)]
        assert showing and all(b"env HOROVOD_HOSTNAME=" in each for each in showing)
        assert seen.variables_with(IN_VARIABLE) == {"MY_API_TOKEN"}
        assert not seen.variables_with(IN_ARGUMENT)
        # The store may be a database with a password: its place is the driver's alone.
        store = line[line.index("--autosync-store") + 1]
        (driver,) = seen.lines_with(store)
        assert driver.endswith("\0".join([*line, ""]).encode()) and not seen.variables_with(store)

    key = (Path(os.environ["XDG_DATA_HOME"]) / "hvd-autosync" / "key").read_bytes().hex()
    ports, trials = secrets.drawn_by("channel.py"), secrets.drawn_by("trial.py")
    assert len(ports) >= 2 and len(trials) >= 3
    for secret in (key, *ports, *trials, *secrets.drawn_by("state_rpc.py")):
        for seen in (tuned, trained):
            assert not seen.lines_with(secret) and not seen.variables_with(secret)
    # The keys of trials go to fork servers, not into environments; a training's is of no use.
    specs = [
        spec_from_environment({TRIAL_VARIABLE: value.decode()})
        for value in tuned.variables.get(TRIAL_VARIABLE, ())
    ]
    assert any(specs) or not beyond_horovod(winner), "ranks of the training were seen"
    assert all(spec is None or spec.measured_steps == 0 for spec in specs)


def plant_lossy_winner(job: Job) -> str:
    """A study of the job in place of its own, with a lossy winner and an exact one after it."""
    (study,) = job.store.studies()
    assert study.task is not None
    job.store.delete(study.study_id)
    planted = job.store.create_study(
        job_key=study.job_key, command=study.command, settings=study.settings, versions={}
    )
    space = build_space(study.task.model, study.task.resources, allow=("codec",))
    job.store.describe_task(planted.study_id, study.task, space)
    lossy, exact = Strategy({"buckets": 1, "rest_codec": "bf16"}), Strategy({"cycle_time_ms": 2.0})
    compared = tuple(Comparison(each, 1.5, 1.2, 1.8, 3) for each in (lossy, exact))
    verdict = Verdict(lossy, Outcome.ADMITTED, 1.0, 1.0, 0.1, "", 0.01, 4)
    found = Conclusion(lossy, "it was planted", "", 0.1, compared, (verdict,))
    job.store.finish(planted.study_id, StudyStatus.FINISHED, found.to_json(), lossy)
    return planted.study_id


def check_that_a_fallback_is_recorded(job: Job, script: tuple[str, ...]) -> None:
    """The fallback is in the store, and the next run uses another confirmed strategy."""
    study_id = plant_lossy_winner(job)
    broken = job.run(*script)
    assert broken.returncode == 0 and "trained 140 steps" in broken.stdout, broken.stderr
    said = re.findall(r"loss guard: a mean loss of nan is not finite at step (\d+)", broken.stderr)
    assert said == ["96"] and "restored step 1;" in broken.stderr
    assert "ended this strategy at step 96: from now on only --autosync-replay" in broken.stderr
    (ended,) = job.store.study(study_id).fallbacks
    assert ended.step == 96 and ended.strategy["rest_codec"] == "bf16"

    again = job.run(*script)
    assert again.returncode == 0 and "trained 140 steps" in again.stdout, again.stderr
    assert "at step 96 of a training" in again.stderr and "not used again" in again.stderr
    assert "cycle_time_ms=2" in again.stderr and "loss guard: a mean" not in again.stderr
    assert len(job.store.studies()) == 1, "nothing was searched again"


def test_a_job_is_tuned_trained_and_the_next_time_only_trained(
    job: Job,
    processes_seen: Callable[[], "AbstractContextManager[ProcessesSeen]"],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No process shows a secret meanwhile that the user's own do not show.

    And a winner that the loss guard ends is not used a third time.
    """
    secrets = Secrets(tmp_path_factory.mktemp("secrets"), monkeypatch)
    script = (
        "--steps",
        "140",
        "--nan-at",
        "40",  # after the trials' last step
        "--password",
        IN_ARGUMENT,
    )
    with processes_seen() as tuned:
        first = job.run(*script)
    assert first.returncode == 0, first.stderr
    assert re.findall(r"trained 140 steps", first.stdout) == ["trained 140 steps"]
    *_, answer, trace = first.stderr.strip().splitlines()
    (study,) = job.store.studies()
    assert answer.startswith("hvd-autosync: ") and study.study_id in trace
    assert first.stderr.count(answer) == 2  # before the training and after it
    assert study.status is StudyStatus.FINISHED and study.outcome is not None
    trials = job.store.trials(study.study_id)
    assert trials[0].kind == "default" and dict(trials[0].strategy) == {}
    assert all(trial.result is not None for trial in trials)
    conclusion = Conclusion.from_json(study.outcome)
    assert study.space is not None
    assert conclusion.comparisons or conclusion.winner == study.space.default
    # What was slower in each of its first rounds is out before.
    assert all(c.rounds >= 3 or c.speedup < 1 for c in conclusion.comparisons)

    with processes_seen() as trained:
        again = job.run(*script)
    line = job.words(*script)[1:]
    assert_no_secret_is_shown(secrets, tuned, trained, line, conclusion.winner)
    for file in job.folder.glob("traces.db*"):
        assert not any(each.encode() in file.read_bytes() for each in (IN_VARIABLE, IN_ARGUMENT))
    assert IN_ARGUMENT not in first.stderr and re.search(r"--password '?\*\*\*", first.stderr)
    assert again.returncode == 0
    assert "trial 0" not in again.stderr and "trained 140 steps" in again.stdout
    assert again.stderr.strip().splitlines()[-3:] == [answer, answer, trace]
    assert len(job.store.studies()) == 1

    path = job.folder / "trace.jsonl"
    export_study(job.store, study.study_id, path)
    check_that_a_fallback_is_recorded(job, script)
    job.store_path = job.folder / "another.db"
    job.settings, job.mode = [], []  # they would have no effect
    replayed = job.run("--status", "3", options=("--gloo", "--autosync-replay", str(path)))
    assert replayed.returncode == 1, "horovodrun says so of a training that ends with 3"
    assert "trained 60 steps" in replayed.stdout and "trial 0" not in replayed.stderr
    assert f"study {study.study_id}: {answer.removeprefix('hvd-autosync: ')}" in replayed.stderr
    assert "different command" in replayed.stderr
    assert not job.store_path.exists(), "a file is all that is needed"


@pytest.fixture(scope="module")
def plain_status(horovodrun: str) -> int:
    """That of ``horovodrun`` where the script ends with 3."""
    words = ["-np", "2", "--gloo", sys.executable, "-c", "raise SystemExit(3)"]
    return subprocess.run([horovodrun, *words], capture_output=True).returncode


@pytest.mark.usefixtures("patient_helper")
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        pytest.param("launched", "hvd-autosync: trace", marks=pytest.mark.wide),
        ("auto", "hvd-autosync: nothing was tuned: the training ended after 60 steps"),
    ],
)
def test_the_trainings_exit_status_is_horovodruns_own(
    job: Job, plain_status: int, mode: str, said: str
) -> None:
    job.mode = ["--autosync-mode", mode]
    if mode == "launched":
        job.keep_links()
    tuned = job.run("--status", "3", options=("--gloo", "--autosync-trials", "1"))
    assert tuned.returncode == plain_status != 0
    assert said in tuned.stderr
    assert tuned.stdout.count("trained 60 steps") == 1


@pytest.mark.mpi
def test_mpi_works_the_same(job: Job) -> None:
    space = job.folder / "space.toml"
    space.write_text("[knobs.cycle_time_ms]\nfixed = 90\n")  # nothing that would be confirmed
    options = ("--mpi", "--autosync-tune-only", "--autosync-trials", "2")
    options = (*options, "--autosync-space", str(space))
    job.keep_links(options)
    done = job.run(options=options)
    assert done.returncode == 0, done.stderr
    assert "trained" not in done.stdout
    *_, answer, trace = done.stderr.strip().splitlines()
    assert done.stderr.count(answer) == 1 and "hvd-autosync: trace" in trace
    (study,) = job.store.studies()
    assert study.space is not None and dict(study.space.fixed)["controller"] == "mpi"
    default, tried = job.store.trials(study.study_id)[:2]
    assert dict(default.strategy) == {} and default.result is not None
    assert tried.strategy["cycle_time_ms"] == 90 and tried.result is not None
    assert tried.result.step_time.mean_s > 0.08, "Horovod looks for gradients that often"


@pytest.mark.parametrize(
    ("script", "named"),
    [
        pytest.param(["--fault", "crash"], "deliberate crash at step -1", marks=pytest.mark.wide),
        (["--fault", "crash", "--at", "5", "--rank", "1"], "deliberate crash at step 5"),
        pytest.param(
            ["--fault", "exit", "--at", "5", "--rank", "1"],
            "rank 1 exited with status 7",
            marks=pytest.mark.wide,
        ),
    ],
)
def test_a_job_that_fails_by_itself_is_given_back(job: Job, script: list[str], named: str) -> None:
    done = job.run(*script)
    assert done.returncode != 0
    assert re.search(named, done.stderr), done.stderr
    # The script's own traceback is shown, and no other: not the launcher's, not that of the
    # ranks that only missed the failed one.
    assert done.stderr.count("Traceback") == ("crash" in script), done.stderr
    (study,) = job.store.studies()
    assert study.status is StudyStatus.FAILED


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(["--fault", "crash"], marks=pytest.mark.wide),
        ["--fault", "crash", "--at", "5", "--rank", "1"],
    ],
)
def test_a_training_that_fails_by_itself_is_not_the_fault_of_its_tuning(
    default_job: Job, script: list[str]
) -> None:
    done = default_job.run(*script)
    assert done.returncode != 0 and "trained" not in done.stdout
    assert done.stderr.count("RuntimeError: deliberate crash at step") == 1
    said = [line for line in done.stderr.splitlines() if "hvd-autosync: " in line]
    assert "tuned in its own steps" in said[0]
    assert not [line for line in said if "the training again" in line or "tuned:" in line], said


@pytest.mark.usefixtures("patient_helper")
@pytest.mark.parametrize(
    ("script", "trained", "named"),
    [
        (["--by-hand"], 60, r"nothing was tuned: .* no step .*hvd_autosync.step\(\)"),
        pytest.param(
            ["--steps", "1"],
            1,
            "nothing was tuned: the training ended after 1 step, before",
            marks=pytest.mark.wide,
        ),
    ],
)
def test_a_training_that_ends_before_it_is_tuned_says_so(
    default_job: Job, script: list[str], trained: int, named: str
) -> None:
    done = default_job.run(*script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"trained {trained} steps") == 1
    assert re.search(named, done.stderr), done.stderr
    assert "unexpectedly" not in done.stderr


@pytest.mark.parametrize(
    ("script", "trained", "named"),
    [
        (["--by-hand"], 60, r"without a single step .* it runs untuned.*hvd_autosync.step\(\)"),
        (["--steps", "6"], 6, "ended after 6 steps; at least 8 are needed .* it runs untuned"),
        (["--steps", "9"], 9, "ended by itself after 9 steps, .* it runs untuned"),
    ],
)
@pytest.mark.wide
def test_a_job_that_is_too_short_runs_untuned(
    job: Job, script: list[str], trained: int, named: str
) -> None:
    done = job.run(*script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"trained {trained} steps") == 1
    assert re.search(named, done.stderr), done.stderr
    (study,) = job.store.studies()
    assert study.status is StudyStatus.FAILED and len(job.store.trials(study.study_id)) == 1


def test_a_job_that_is_too_short_is_an_error_where_nothing_but_tuning_is_wanted(job: Job) -> None:
    done = job.run("--steps", "6", options=("--gloo", "--autosync-tune-only"))
    assert done.returncode == 1 and "trained" not in done.stdout
    assert "error: the script ended after 6 steps; at least 8 are needed" in done.stderr


@pytest.mark.parametrize("mode", ["launched", "auto"])
def test_a_dry_run_launches_nothing(job: Job, mode: str) -> None:
    job.mode = ["--autosync-mode", mode]
    done = job.run(options=("--gloo", "--autosync-dry-run"))
    assert done.returncode == 0, done.stderr
    assert "cycle_time_ms" in done.stdout and "trained" not in done.stdout
    in_place = "Trials are steps of the training itself" in " ".join(done.stdout.split())
    assert in_place is (mode == "auto")
    assert job.store.studies() == []


def test_an_unreachable_host_is_named_before_anything_starts(default_job: Job) -> None:
    done = default_job.run(options=("--gloo", "-H", "localhost:1,no-such-host.invalid:1"))
    assert done.returncode == 2
    assert "no-such-host.invalid" in done.stderr and "Traceback" not in done.stderr
    assert default_job.store.studies() == []


def test_an_unusable_store_is_named_before_anything_starts(default_job: Job) -> None:
    default_job.store_path.write_text("this is no database, " * 100)
    done = default_job.run()
    assert done.returncode != 0
    assert str(default_job.store_path) in done.stderr and "Traceback" not in done.stderr
    assert default_job.store_path.read_text() == "this is no database, " * 100
