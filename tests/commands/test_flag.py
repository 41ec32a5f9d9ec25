"""The flag: what it adds to Horovod's parser, what it refuses, and the job that it reads."""

import contextlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_autosync.commands import flag
from hvd_autosync.commands.tune_and_train import train_under_winner
from hvd_autosync.engine import training
from hvd_autosync.engine.job_line import parse_words, read_job
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.preflight import check_command
from hvd_autosync.engine.study_options import load_restrictions, tuning_key
from hvd_autosync.engine.training import OnFallback, RunOutcome, TrainingContext
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch import remote
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host, SearchSpace, Strategy, catalogue_knob
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.study.fallbacks import excluded_strategies
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyStatus, TraceStore, export_study, import_studies

pytest.importorskip("horovod", reason="Horovod is not installed: make setup builds it")

COMMAND = ["python", "train.py", "--autosync-trials", "3"]


def job_of(*options: str) -> object:
    words = [*options, *COMMAND]
    return read_job(parse_words(words), words)[0]


def test_what_follows_the_command_stays_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-np", "2", "--autosync-seed", "5", *COMMAND]
    job, options = read_job(parse_words(words), words)
    assert job.command == tuple(COMMAND)
    assert job.options == ("-np", "2")
    assert (options.seed, options.trials) == (5, 20)
    note = "hvd-autosync: note: --autosync-trials follows the command, so the command gets it"
    assert capsys.readouterr().err.startswith(note)


@pytest.mark.parametrize("word", ["--autosync", "--autosync-trials=3", "--autosync-mine"])
def test_a_job_without_the_flag_is_told_of_one_behind_its_command(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from horovod.runner import launch

    parse_words(["-np", "2", "true"])  # makes sure that the launcher is extended
    line = ["horovodrun", "-np", "2", "python", "train.py", word]
    monkeypatch.setattr("sys.argv", line)
    parsed = launch.parse_args()
    assert not parsed.autosync and parsed.command == line[3:]
    said = capsys.readouterr().err
    assert (f"{word.partition('=')[0]} follows the command" in said) is (word != "--autosync-mine")
    monkeypatch.setenv("HVD_AUTOSYNC_TRIAL", "e30=")  # launched by a driver, which has said it
    launch.parse_args()
    assert not capsys.readouterr().err


def test_two_dashes_may_precede_the_command() -> None:
    words = ["-np", "2", "--", *COMMAND, "--"]
    job, _ = read_job(parse_words(words), words)
    assert (job.options, job.command) == (("-np", "2"), (*COMMAND, "--"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_plan_on_a_full_disk_is_one_line() -> None:
    code = (
        "from hvd_autosync.commands import flag\n"
        "def show():\n"
        "    print('the plan')\n"
        "    return 0\n"
        "raise SystemExit(flag.guarded(show))\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == (
        "hvd-autosync: error: cannot write the output: No space left on device\n"
    )


def test_lines_on_a_full_disk_leave_the_status_of_the_training() -> None:
    code = (
        "from hvd_autosync.commands import flag\n"
        "from hvd_autosync.util.print_line import print_line\n"
        "raise SystemExit(flag.guarded(lambda: print_line('x') or 7))\n"
    )
    with open("/dev/full", "w") as full:
        assert (
            subprocess.run([sys.executable, "-c", code], stderr=full, check=False).returncode == 7
        )


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["-np", "2"], "no command"),
        (["-np", "2", "--"], "no command"),
        (["-np", "0", *COMMAND], "invalid value 0 for -np"),
        (
            ["-np", "2", "--min-np", "1", "--autosync-mode", "launched", *COMMAND],
            "--autosync-mode launched launches trials",
        ),
        (["-np", "2", "--min-np", "1", "--autosync-allow", "order", *COMMAND], "elastic"),
        (["-np", "2", "--min-np", "1", "--autosync-tune-only", *COMMAND], "elastic"),
        (["-np", "2", "--autotune", *COMMAND], "--autotune and --autosync"),
        (["-np", "2", "--jsrun", *COMMAND], "jsrun"),
        (["-np", "2", "--autosync-trials", "x", *COMMAND], "'x' for --autosync-trials"),
        (["-np", "2", "--autosync-reuse", "maybe", *COMMAND], "'maybe' for --autosync-reuse"),
        (["-np", "2", "--autosync-trails", "5", *COMMAND], "Did you mean --autosync-trials?"),
        (["-np", "2", "--autosync-trails=5", *COMMAND], "Did you mean --autosync-trials?"),
    ],
)
def test_refusals_end_with_status_two_and_the_reason(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_words(words)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert named in said and len(said.splitlines()) < 5


def test_under_lsf_a_job_has_to_choose_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSB_JOBID", "1")
    hosts = ["-np", "2", "-H", "a:2"]
    for words in ([*hosts, *COMMAND], [*hosts, "--gloo", *COMMAND]):
        with pytest.raises(ConfigurationError, match="under LSF"):
            read_job(parse_words(words), words)
    words = [*hosts, "--mpi", *COMMAND]
    assert read_job(parse_words(words), words)[0].controller == "mpi"


def test_an_elastic_job_is_tuned_live_on_the_hosts_that_its_script_names(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho b:2\necho a\necho b:2\n")
    script.chmod(0o755)
    words = ["-np", "2", "--min-np", "1", "--host-discovery-script", str(script), *COMMAND]
    job, options = read_job(parse_words(words), words)
    assert options.mode == "live"
    assert job.elastic and job.hosts == (Host("a", 1), Host("b", 2))
    assert job.options == tuple(words[:6])
    script.write_text("#!/bin/sh\necho no nodes >&2\nexit 3\n")
    with pytest.raises(ConfigurationError, match=r"hosts\.sh' fails: no nodes"):
        read_job(parse_words(words), words)
    script.write_text("#!/bin/sh\n")
    assert read_job(parse_words(words), words)[0].hosts == (Host("localhost", 2),), "none yet"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("pyton", "train.py"), "'pyton' is not found"),
        (("python", "nowhere.py", "--epochs", "2"), "'nowhere.py' does not exist in"),
        (("python", "-u", "nowhere.py"), "'nowhere.py' does not exist in"),
        (("python", "-W", "ignore", "nowhere.py"), "'nowhere.py' does not exist in"),
        (("A=1", "B=2", "python", "nowhere.py"), "'nowhere.py' does not exist in"),
        (("python", "-mtrain", "nowhere.py"), None),
        (("PATH=/elsewhere", "pyton", "nowhere.py"), None),
        (("python", __file__, "nowhere.py"), None),
        (("python", str(Path(__file__).parent), "nowhere.py"), None),  # with a __main__.py
        (("python", "-m", "nowhere.py"), None),
        (("env", "A=1", "python", "nowhere.py"), None),
    ],
)
def test_a_command_that_is_not_here_is_refused(
    command: tuple[str, ...], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Job(("-np", "2"), command, (Host("localhost", 2),))
    refused = named and pytest.raises(ConfigurationError, match=named)
    with refused or contextlib.nullcontext():
        check_command(here)
    monkeypatch.setenv("PATH", "/usr/bin")  # an environment need not be activated
    if named is None:
        check_command(here)
    check_command(replace(here, hosts=(Host("192.0.2.1", 2),)))  # elsewhere it may be


def test_options_without_the_flag_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from horovod.runner import launch

    parse_words(["-np", "2", *COMMAND])  # makes sure that the launcher is extended
    monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "2", "--autosync-seed", "1", *COMMAND])
    with pytest.raises(SystemExit):
        launch.parse_args()
    assert "--autosync-seed has no effect without --autosync" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        (["--autosync-strategy", "won.toml"], True),
        (["--autosync-replay=last"], True),
        (["--autosync-replay", "last", "--autosync-store", "x.db"], True),
        ([], False),
    ],
)
def test_options_that_say_what_to_run_imply_the_flag(
    monkeypatch: pytest.MonkeyPatch, options: list[str], starts: bool
) -> None:
    from horovod.runner import launch

    parse_words(["-np", "2", *COMMAND])  # makes sure that the launcher is extended
    monkeypatch.setenv("HVD_AUTOSYNC_STRATEGY", "" if starts else "won.toml")
    monkeypatch.setattr("sys.argv", ["horovodrun", "-np", "2", *options, *COMMAND])
    assert launch.parse_args().autosync is starts


def test_a_torch_that_cannot_be_imported_is_reported_without_a_traceback(
    horovodrun: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.12 is missing')")
    done = subprocess.run(
        [horovodrun, "-np", "2", "--autosync", "--autosync-dry-run", "true"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "hvd-autosync: error: horovod.torch cannot be imported: OSError" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_users_own_settings_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "0")
    monkeypatch.setenv("NCCL_PROTO", "^LL128")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    job = job_of("-np", "2", "--gloo", "--cycle-time-ms", "3.5", "--fusion-threshold-mb", "16")
    assert dict(job.held) == {  # type: ignore[attr-defined]
        "cache_capacity": 0,
        "cycle_time_ms": 3.5,
        "fusion_threshold_bytes": 16 * 2**20,
        "nccl_protocol": "^LL128",
        "threads_per_rank": 3,
    }
    assert job.controller == "gloo"  # type: ignore[attr-defined]


def test_horovods_configuration_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    file = tmp_path / "config.yaml"
    file.write_text(
        "controller: mpi\nparams:\n  cycle_time_ms: 7\nautosync:\n  trials: 4\n  warmup: 2\n"
    )
    words = ["-np", "2", "--config-file", str(file), *COMMAND]
    job, options = read_job(parse_words(words), words)
    assert (job.controller, dict(job.held)) == ("mpi", {"cycle_time_ms": 7})
    assert (options.trials, options.warmup) == (4, 2)


@pytest.mark.parametrize(
    "text", [None, "", "- 1", "{", "since: 2024-13-45", "autosync: 3", "autosync: {trials: 0}"]
)
def test_configuration_files_that_cannot_be_used_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    file = tmp_path / "config.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        parse_words(["-np", "2", "--config-file", str(file), *COMMAND])
    said = capsys.readouterr().err
    assert "configuration file" in said or f"autosync in '{file}' is not a section" in said


def test_autotune_from_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    with pytest.raises(ConfigurationError, match="HOROVOD_AUTOTUNE"):
        job_of("-np", "2")


def test_hosts_come_from_option_file_or_local_machine(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("a slots=1\nb slots=4\n")
    words = ("-np", "3", "--mpi", "--hostfile", str(hostfile))
    assert job_of(*words).hosts == (  # type: ignore[attr-defined]
        Host("a", 1),
        Host("b", 2),
    )
    assert job_of("-np", "3").hosts == (Host("localhost", 3),)  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="-np 3 asks for more ranks than the 2 slots"):
        job_of("-np", "3", "-H", "a:1,b:1")
    with pytest.raises(ConfigurationError, match="under Gloo Horovod starts a rank on each slot"):
        job_of("-np", "3", "--hostfile", str(hostfile))


@pytest.mark.parametrize("text", [None, "a slots=1\n\n"])
def test_hostfiles_that_cannot_be_read_are_named(tmp_path: Path, text: str | None) -> None:
    hostfile = tmp_path / "hosts"
    if text is not None:
        hostfile.write_text(text)
    with pytest.raises(ConfigurationError, match=f"hostfile '{hostfile}' cannot be read"):
        job_of("-np", "1", "--hostfile", str(hostfile))


def test_an_empty_list_of_hosts_is_not_this_host(tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.touch()
    with pytest.raises(ConfigurationError, match=f"hostfile '{hostfile}' is empty"):
        job_of("-np", "1", "--hostfile", str(hostfile))
    with pytest.raises(ConfigurationError, match="list of hosts is empty"):
        job_of("-np", "1", "-H", "")


@pytest.mark.parametrize(
    ("text", "named"),
    [("[knobs.speed]\nfixed = 1", "'speed'"), ("[knobs", "not TOML"), (None, "cannot be read")],
)
def test_space_files_that_cannot_be_used_are_named(
    tmp_path: Path, text: str | None, named: str
) -> None:
    file = tmp_path / "space.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=named):
        load_restrictions(str(file))


@pytest.mark.parametrize(
    ("script", "as_file", "versions", "recorded"),
    [
        ("train.py", False, {}, True),
        ("train.py", True, {}, True),
        ("train.py", False, {"torch": "1.0"}, True),
        ("other.py", False, {}, False),
    ],
)
def test_a_replayed_winner_that_the_loss_guard_ends_does_not_win_again(
    script: str,
    as_file: bool,
    versions: dict[str, str],
    recorded: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(*_: object, on_fallback: OnFallback | None = None) -> RunOutcome:
        if on_fallback is not None:
            on_fallback(64, "the loss has risen")
        return RunOutcome(0)

    monkeypatch.setattr(training, "run_training", train)
    monkeypatch.setattr(flag, "check_hosts", lambda job: None)
    job = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),))
    options = Options(store=str(tmp_path / "traces.db"), allow=("schedule",))
    store, key = TraceStore(options.store), tuning_key(job, options, {})
    study_id = store.create_study(
        job_key=key, command=job.display(), settings={}, versions=versions
    ).study_id
    winner = Strategy({"local_steps": 4})
    store.describe_task(study_id, None, SearchSpace((catalogue_knob("local_steps"),)))
    outcome = Conclusion(winner, "it won", "", 0.1).to_json()
    store.finish(study_id, StudyStatus.FINISHED, outcome, winner)
    export_study(store, study_id, tmp_path / "study.jsonl")
    trace = str(tmp_path / "study.jsonl") if as_file else "last"
    again = replace(job, command=("python", script))
    assert flag._run_winner(again, replace(options, allow=()), trace) == 0
    assert excluded_strategies(store, [key]) == ((winner,) if recorded else ())
    assert ("only --autosync-replay uses it" in capsys.readouterr().err) is recorded


@pytest.mark.parametrize("shared", [False, True])
def test_a_shared_study_learns_nothing_of_a_training_that_replays_it(
    shared: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train(*_: object, on_fallback: OnFallback | None = None) -> RunOutcome:
        if on_fallback is not None:
            on_fallback(64, "the loss has risen")
        return RunOutcome(0, drift="steps have become slower")

    monkeypatch.setattr(training, "run_training", train)
    job = Job(("-np", "2"), ("python", "train.py"), (Host("localhost", 2),))
    store = TraceStore(str(tmp_path / "own.db"))
    study_id = store.create_study(
        job_key="key", command=job.display(), settings={}, versions={}
    ).study_id
    winner = Strategy({"cycle_time_ms": 5.0})
    outcome = Conclusion(winner, "it won", "", 0.1).to_json()
    store.finish(study_id, StudyStatus.FINISHED, outcome, winner)
    export_study(store, study_id, tmp_path / "study.jsonl", anonymously=shared)
    others = TraceStore(str(tmp_path / "others.db"))
    import_studies(others, tmp_path / "study.jsonl")
    assert flag._run_winner(job, Options(store=str(tmp_path / "others.db")), "last") == 0
    (study,) = others.studies()
    assert (len(study.fallbacks), len(study.drift)) == ((0, 0) if shared else (1, 1))
    said = capsys.readouterr().err
    for message in ("only --autosync-replay uses it", "the next run tunes again"):
        assert (message in said) is not shared


@pytest.mark.parametrize(
    ("winner", "remote_count", "told"),
    [({"local_steps": 4}, 2, True), ({"local_steps": 4}, 1, False), ({"buckets": 3}, 2, False)],
)
def test_a_fallback_that_cannot_be_seen_from_here_is_told(
    winner: dict[str, Value],
    remote_count: int,
    told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a login node, where no rank runs."""
    monkeypatch.setattr(training, "run_training", lambda *_, **__: RunOutcome(0))
    job = Job(("-np", "2"), ("python", "train.py"), (Host("a", 1), Host("b", 1)))
    monkeypatch.setattr(remote, "remote_hosts", lambda job: job.hosts[:remote_count])
    options = Options(store=str(tmp_path / "traces.db"))
    study = TraceStore(options.store).create_study(
        job_key="key", command=(), settings={}, versions={}
    )
    record = replace(study, winner=Strategy(winner))
    assert train_under_winner(job, options, record, TrainingContext()) == 0
    assert ("no rank ran on this host" in capsys.readouterr().err) is told


@pytest.mark.parametrize(
    ("option", "what"),
    [
        ("reuse=auto", "; run the same command again to resume tuning"),
        ("reuse=never", "; run the same command again to tune from scratch"),
        ("reuse=only", ""),
        ("dry-run", ""),
        ("recurring", ""),
        ("replay=last", ""),
    ],
)
def test_after_ctrl_c_it_says_what_the_same_command_does(
    option: str, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(job: Job) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(flag, "stop_on_signals", lambda: None)
    monkeypatch.setattr(flag.signal, "signal", lambda *_: None)
    monkeypatch.setattr(flag, "check_command", press)
    words = ["-np", "2", f"--autosync-{option}", *COMMAND]
    assert flag.guarded(lambda: flag.autosync(parse_words(words), words)) == 130
    (*_, last) = capsys.readouterr().err.splitlines()
    assert last == f"hvd-autosync: stopped{what}"
