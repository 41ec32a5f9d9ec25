from __future__ import annotations

import errno
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hvd_autosync import __version__
from hvd_autosync.commands import cli
from hvd_autosync.search_space import (
    CATALOGUE,
    RankReport,
    SearchSpace,
    Strategy,
    TrialResult,
    TrialStatus,
)
from hvd_autosync.study.confirm import Comparison
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.related_studies import RELATED
from hvd_autosync.study.values import Conclusion, StudySettings
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import StudyStatus, TraceStore, export_study
from hvd_autosync.traces.records import Fallback

SPACE = SearchSpace(tuple(knob for knob in CATALOGUE if knob.name == "cycle_time_ms"))
WINNER = Strategy({"cycle_time_ms": 5.0})


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TraceStore:
    """The store that the environment names."""
    monkeypatch.setenv("HVD_AUTOSYNC_STORE", str(tmp_path / "traces.db"))
    monkeypatch.setenv("COLUMNS", "120")
    return TraceStore(tmp_path / "traces.db")


def write_study(
    store: TraceStore,
    *,
    gain: bool,
    space: SearchSpace = SPACE,
    tried: Strategy = WINNER,
    verdicts: tuple[Verdict, ...] = (),
) -> str:
    """A finished study of two trials."""
    study_id = store.create_study(
        job_key="job",
        command=("horovodrun", "-np", "2", "--gloo", "python", "[train].py"),
        settings=StudySettings().to_json(),
        versions={},
    ).study_id
    store.describe_task(study_id, None, space)
    store.ask(study_id, Strategy(), "default", {})
    store.tell(study_id, 0, measured(0.05))
    store.ask(study_id, tried, "sobol", {})
    store.tell(study_id, 1, measured(0.04))
    (winner, low) = (tried, 1.2) if gain else (space.default, 0.9)
    compared = (Comparison(tried, 1.25, low, 1.3, 3),)
    conclusion = Conclusion(winner, "measured", "all trials were used", 0.05, compared, verdicts)
    store.finish(study_id, StudyStatus.FINISHED, conclusion.to_json(), winner)
    return study_id


def measured(step_s: float) -> TrialResult:
    return TrialResult(TrialStatus.COMPLETED, ranks=(RankReport(0, "a", (step_s,) * 40),))


@pytest.fixture
def study_id(store: TraceStore) -> str:
    return write_study(store, gain=True)


def run(*words: str, **keywords: Any) -> Any:
    return CliRunner().invoke(cli.app, list(words), **keywords)


def process(*words: str, stdout: Any = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hvd_autosync.commands.cli", *words]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=280, check=False
    )


def test_a_wrong_level_of_the_log_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVD_AUTOSYNC_LOG", "loud")
    done = CliRunner().invoke(cli.app, ["traces", "list"])
    assert done.exit_code == 2
    assert "'loud'; the levels are debug, info, warning" in done.output


def test_help_comes_fast_and_without_the_heavy_libraries() -> None:
    """In half a second where adding up a million squares takes a sixteenth of one."""
    program = (
        "import sys, time\n"
        "def loop_s():\n"
        "    begin = time.process_time(); sum(x * x for x in range(1_000_000))\n"
        "    return time.process_time() - begin\n"
        "before_s = loop_s()\n"
        "from hvd_autosync.commands import cli\n"
        "sys.argv = ['hvd-autosync', '--help']\n"
        "try:\n    cli.main()\n"
        "finally:\n"
        "    heavy = {'torch', 'numpy', 'pandas', 'sqlalchemy', 'horovod'} & set(sys.modules)\n"
        "    print('heavy:', sorted(heavy), file=sys.stderr)\n"
        "    spent_s = time.process_time() - before_s\n"
        "    print('loops:', 2 * spent_s / (before_s + loop_s()), file=sys.stderr)\n"
    )
    loops: list[float] = []
    while len(loops) < 10 and min(loops, default=8.0) >= 8:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == 0
        assert "heavy: []" in done.stderr
        for command in ("tune", "space", "show", "doctor", "traces"):
            assert re.search(rf"^ +{command} ", done.stdout, re.M)
        loops.append(float(done.stderr.split("loops:")[1]))
    assert min(loops) < 8, loops


def test_the_version() -> None:
    assert run("--version").output == f"hvd-autosync {__version__}\n"


def test_an_error_is_a_message_and_a_status_not_a_traceback(tmp_path: Path) -> None:
    done = process("show", "--store", str(tmp_path / "new.db"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 2 and done.stderr.splitlines()[1].startswith("  ")


@pytest.mark.parametrize(
    "words",
    [
        "show",
        "watch",
        "simulate",
        "recurring",
        "report -o -",
        "replay",
        "traces list",
        "traces show",
        "traces export",
        "traces contribute",
        "traces delete abc",
    ],
)
def test_no_store_is_created_to_be_read(words: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing.db"
    done = run(*words.split(), "--store", str(missing))
    assert done.exit_code == 1
    assert f"error: there is no trace store {missing}" in done.output
    assert list(tmp_path.iterdir()) == []


def test_before_the_first_job_there_are_no_studies_and_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    default = tmp_path / "hvd-autosync" / "traces.db"
    listed = run("traces", "list")
    assert listed.exit_code == 0 and f"no studies in {default} yet" in listed.output
    assert run("recurring").exit_code == 0
    shown = run("show")
    assert shown.exit_code == 1
    assert f"error: {default} has no study yet\n  Run a job with --autosync" in shown.output
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_lacks_a_study_is_named(store: TraceStore) -> None:
    assert f"error: {store.name} has no study yet" in run("show").output
    write_study(store, gain=True)
    assert f"error: {store.name} has no study 'nothing'" in run("show", "nothing").output


def test_an_unusable_argument_is_status_2(store: TraceStore, tmp_path: Path) -> None:
    for words in ((), (str(tmp_path), "--horovod-autotune", str(tmp_path))):
        result = run("traces", "import", *words)
        assert result.exit_code == 2
        assert "give exactly one file" in result.stderr


def test_ctrl_c_is_status_130(study_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("hvd_autosync.reporting.explanation.explain", interrupted)
    assert run("show").exit_code == 130


def test_a_bug_keeps_its_traceback(study_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr("hvd_autosync.reporting.explanation.explain", broken)
    assert isinstance(run("show").exception, ZeroDivisionError)


def test_tune_hands_the_line_over_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[str]] = []

    def tune_command(words: list[str]) -> int:
        taken.append(words)
        return 7

    monkeypatch.setattr("hvd_autosync.commands.flag.tune_command", tune_command)
    line = [
        "-np",
        "2",
        "-H",
        "a:1,b:1",
        "--autosync-trials",
        "3",
        "-v",
        "python",
        "t.py",
        "--store",
        "x",
        "--help",
        "--",
        "-np",
    ]
    assert run("tune", *line).exit_code == 7
    assert taken == [line]
    mpi = ["--mpi", "--binding-args=-bind-to none", "-np", "2", "python", "t.py"]
    assert run("tune", *mpi).exit_code == 7
    assert taken[1] == mpi


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["show"], ["traces", "show"], ["watch"]])
def test_a_full_disk_is_one_line(store: TraceStore, words: list[str]) -> None:
    write_study(store, gain=True)
    with open("/dev/full", "w") as full:
        done = process(*words, stdout=full)
    assert done.stderr == "error: cannot write the output: No space left on device\n"
    assert done.returncode == 1


def test_an_error_of_the_system_is_not_one_of_the_output(
    store: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(*args: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("hvd_autosync.commands.watch.open_store", no_more)
    assert isinstance(run("watch").exception, OSError)


def test_what_the_encoding_lacks_is_escaped(
    store: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_study(store, gain=True)
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = process("traces", "show")
    assert done.returncode == 0, done.stderr
    assert "50.0 \\xb1 " in done.stdout


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("show --nccl-tuner - --take winner", "--take has no effect with --nccl-tuner"),
        ("replay --trials 3", "--trials has no effect without --learner"),
        ("replay --seeds 3 --verify", "--seeds has no effect without --learner"),
        ("replay --verify --speed 3", "--speed has no effect with --verify or --learner"),
        ("recurring --overwrite", "--overwrite has no effect without --export"),
        ("recurring abc --yes", "--yes has no effect without --forget"),
        ("traces export --to optuna x --related", "--related has no effect with --to"),
        ("doctor -p 22", "--ssh-port has no effect without --hosts"),
        ("space --schema -np 2 true", "--schema takes no line"),
    ],
)
def test_options_that_change_nothing_are_refused(store: TraceStore, words: str, named: str) -> None:
    refused = run(*words.split())
    assert refused.exit_code == 2
    assert named in refused.output and "Traceback" not in refused.output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--hosts", "50001"], "--hosts"),
        (["--bandwidth", f"{'9' * 400}gbit"], "for --bandwidth"),
        (["--latency", f"{'9' * 400}s"], "for --latency"),
    ],
)
def test_a_cluster_that_cannot_be_is_not_simulated(
    store: TraceStore, words: list[str], named: str
) -> None:
    refused = run("simulate", *words)
    assert refused.exit_code == 2 and named in refused.output


def test_a_replay_has_a_slowest_speed(store: TraceStore) -> None:
    write_study(store, gain=True)
    refused = run("replay", "--speed", "1e-300")
    assert refused.exit_code == 2 and "'1e-300' for --speed" in refused.output


def test_tune_without_a_line_teaches() -> None:
    result = run("tune")
    assert result.exit_code == 2
    assert "hvd-autosync tune -np 4 -H a:2,b:2 python train.py" in result.output
    assert "--autosync-minutes M" in run("tune", "--help").output


def test_tune_refuses_a_line_without_a_command() -> None:
    done = process("tune", "-np", "2")
    assert done.returncode == 2
    assert "there is no command to tune" in done.stderr


def test_space_without_a_line_prints_all_knobs_and_how_to_restrict_them() -> None:
    result = run("space")
    assert result.exit_code == 0
    assert all(knob.name in result.output for knob in CATALOGUE)
    assert "[knobs.cycle_time_ms]" in result.output and "--autosync-space FILE" in result.output


def test_space_prints_the_schema_of_its_file() -> None:
    result = run("space", "--schema")
    assert result.exit_code == 0
    tables = json.loads(result.output)["properties"]["knobs"]["properties"]
    assert list(tables) == [knob.name for knob in CATALOGUE]


def test_space_with_a_line_prints_the_space_of_that_job(store: TraceStore) -> None:
    done = process("space", "-np", "2", "--gloo", "--cycle-time-ms", "3", "true")
    assert done.returncode == 0, done.stderr
    assert "Knobs of this job" in done.stdout
    assert "fixed at 3 ms" in done.stdout
    assert "The plan:" in done.stdout


def test_show_explains_the_last_study(study_id: str) -> None:
    result = run("show")
    assert result.exit_code == 0
    assert study_id in result.output
    assert "1.25x faster than the default (90 % interval 1.20x to 1.30x" in result.output
    # Brackets of a script's name are no markup.
    assert "\nhorovodrun -np 2 --gloo python '[train].py'\n" in result.output


def test_lines_to_be_copied_are_whole_on_a_narrow_terminal(
    study_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    lines = run("show").output.splitlines()
    assert lines[-1] == "horovodrun -np 2 --gloo python '[train].py'"


def test_show_writes_the_winner_as_a_file(study_id: str) -> None:
    taken = run("show", "--take", "winner")
    assert taken.exit_code == 0 and "cycle_time_ms = 5.0" in taken.stdout.splitlines()
    assert run("show", "--take", "best").exit_code == 1


def write_judged(store: TraceStore) -> str:
    """A study whose winner is a strategy file, and that has judged a lossy strategy."""
    space = SearchSpace(tuple(k for k in CATALOGUE if k.name in ("buckets", "rest_codec")))
    lossy = space.complete({"rest_codec": "fp16"})
    verdict = Verdict(lossy, Outcome.WORSE, 2.0, 1.0, 0.1, "its loss is larger")
    tried = space.complete({"buckets": 8})
    return write_study(store, gain=True, space=space, tried=tried, verdicts=(verdict,))


def test_every_printed_command_names_the_store(tmp_path: Path) -> None:
    path = tmp_path / "my traces.db"
    store = TraceStore(path)
    write_judged(store)
    failed = store.create_study(job_key="job", command=("a",), settings={}, versions={}).study_id
    store.finish(failed, StudyStatus.FAILED, {"reason": "no script"}, None)
    for words in (["show"], ["report", "--format", "md", "-o", "-"]):
        shown = run(*words, "--store", str(path))
        printed = re.findall(r"hvd-autosync show .*", shown.stdout + shown.stderr)
        assert len(printed) == 3, "of the winner, of the judged strategies, of the failed study"
        assert all(f" --store '{path}'" in line for line in printed)
    html = tmp_path / "report.html"
    assert run("report", "-o", str(html), "--store", str(path)).exit_code == 0
    assert html.read_text().count(" --store &#39;") == 2
    (winner,) = (line for line in printed if "--take winner" in line)
    taken = run("show", *shlex.split(winner.partition(" > ")[0])[2:])
    assert taken.exit_code == 0 and "[knobs]" in taken.stdout


def test_a_report_of_a_trace_file_prints_no_command_that_finds_no_study(
    store: TraceStore, tmp_path: Path
) -> None:
    file = tmp_path / "trace.jsonl"
    export_study(store, write_judged(store), file)
    text = run("report", str(file), "--format", "md", "-o", "-").stdout
    assert "--take winner" not in text and "\nbuckets = 8\n" in text
    assert text.index("traces import FILE") < text.index("--take ROW")


def test_show_takes_the_beginning_of_an_id_and_another_store(study_id: str, tmp_path: Path) -> None:
    other = TraceStore(tmp_path / "other.db")
    other_id = write_study(other, gain=False)
    result = run("show", other_id[:6], "--store", str(tmp_path / "other.db"))
    assert "No gain found: use the default." in result.output
    assert run("show", other_id).exit_code == 1


def test_traces_are_listed_newest_first(store: TraceStore, study_id: str) -> None:
    newer = write_study(store, gain=False)
    lines = run("traces", "list").output.splitlines()
    assert lines[1].startswith(newer) and "no gain" in lines[1]
    assert lines[2].startswith(study_id) and "1.25x" in lines[2]


def test_a_newer_study_that_failed_is_mentioned(
    store: TraceStore, study_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "newer" not in run("show").stderr
    failed = store.create_study(job_key="job", command=("a",), settings={}, versions={}).study_id
    store.finish(failed, StudyStatus.FAILED, {"reason": "no script"}, None)
    shown = run("show")
    assert study_id in shown.stdout and f"the newer study {failed} failed" in shown.stderr
    assert "no script" in run("show", failed).stdout
    for words in ("show --take winner", "simulate", "replay", "traces show", "traces export"):
        taken = run(*words.split())
        assert f"the newer study {failed} failed" in taken.stderr, words
        assert "note: " not in taken.stdout


def test_who_takes_a_winner_learns_what_came_since(store: TraceStore, study_id: str) -> None:
    assert not run("show", "--take", "winner").stderr
    store.keep_drift(study_id, ["steps have become slower"])
    store.keep_fallback(study_id, Fallback(WINNER, 70, "the loss has risen"))
    taken = run("show", "--take", "winner")
    assert "cycle_time_ms = 5.0" in taken.stdout.splitlines() and "note: " not in taken.stdout
    drift, fallback = taken.stderr.splitlines()
    assert drift == "note: since then: steps have become slower"
    assert "ended by the loss guard at step 70" in fallback and "the loss has risen" in fallback


def test_a_study_that_nobody_runs_any_more_is_listed_as_interrupted(store: TraceStore) -> None:
    begun = store.create_study(job_key="job", command=("a",), settings={}, versions={}).study_id
    assert re.search(f"{begun} .* running ", run("traces", "list").output)
    store.let_go(begun)
    assert re.search(f"{begun} .* interrupted ", run("traces", "list").output)


def test_rows_of_lists_in_a_pipe_are_not_wrapped(store: TraceStore) -> None:
    command = ("horovodrun", "-np", "4", "python", "train.py", *("--flag",) * 30, "--last")
    store.create_study(job_key="job", command=command, settings={}, versions={})
    (_, line) = run("traces", "list").stdout.splitlines()
    assert line.endswith("--last")


def test_an_empty_store_lists_nothing_and_says_so(store: TraceStore) -> None:
    result = run("traces", "list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "no studies in" in result.stderr


def test_trials_are_shown_as_table_csv_and_json(study_id: str) -> None:
    table = run("traces", "show", study_id).output.splitlines()
    assert "cycle_time_ms=5" in table[2] and "1.25x" in table[2]
    header, _default, winner = run("traces", "show", "--format", "csv").output.splitlines()
    assert header.startswith("number,kind,status,step_ms")
    assert winner.startswith("1,sobol,completed,40.0,")
    rows = json.loads(run("traces", "show", "--format", "json").output)
    assert [row["speedup"] for row in rows] == [1.0, 1.25]


def test_texts_that_are_no_unicode_are_in_json_too(store: TraceStore) -> None:
    reason = "no file 'gr\udcfc\udcdfe'"
    made = {"settings": StudySettings().to_json(), "versions": {}}
    study_id = store.create_study(job_key="job", command=("a",), **made).study_id
    store.describe_task(study_id, None, SPACE)
    store.ask(study_id, Strategy(), "default", {})
    store.tell(study_id, 0, measured(0.05))
    store.ask(study_id, WINNER, "sobol", {})
    store.tell(study_id, 1, TrialResult(TrialStatus.CRASHED, reason))
    *_, row = json.loads(run("traces", "show", study_id, "--format", "json").output)
    assert row["reason"] == reason and row["step_ms"] is None
    report = json.loads(run("report", study_id, "--format", "json", "-o", "-").output)
    assert report["trials"][-1] == row


def test_what_an_extension_prints_is_no_part_of_the_output(
    study_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extension = tmp_path / "own.py"
    extension.write_text("print('loaded')\n")
    monkeypatch.setenv("HVD_AUTOSYNC_EXTENSIONS", str(extension))
    done = process("show", study_id, "--take", "winner")
    assert "loaded" in done.stderr and "loaded" not in done.stdout, done


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("EXTENSIONS", "/none.py", "cannot load '/none.py'"),
        ("LOG", "loud", "HVD_AUTOSYNC_LOG is 'loud'"),
    ],
)
def test_the_doctor_says_why_other_commands_do_not_start(
    name: str, value: str, said: str, store: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvd_autosync.doctor.checks.examine", lambda *_, **__: [])
    monkeypatch.setattr("hvd_autosync.testing.daemon.down", lambda: True)
    monkeypatch.setenv(f"HVD_AUTOSYNC_{name}", value)
    refused = run("traces", "list")
    assert refused.exit_code == 2 and said in refused.stderr
    examined = run("doctor", "--json")
    (check,) = json.loads(examined.stdout)["checks"]
    assert examined.exit_code == 1 and check["text"].startswith(said)
    assert run("testbed", "down").output == "down\n"


def test_a_study_travels_through_a_file(store: TraceStore, study_id: str, tmp_path: Path) -> None:
    file = str(tmp_path / "study.jsonl")
    assert run("traces", "export", study_id, "-o", file).output.strip() == file
    refused = run("traces", "export", study_id, "-o", file)
    assert refused.exit_code == 1 and "give --overwrite" in refused.output
    refused = run("traces", "contribute", study_id, "-o", file)
    assert refused.output.endswith("exists already\n  Name another file with --output.\n")
    assert run("traces", "export", study_id, "-o", file, "--overwrite").exit_code == 0
    other = str(tmp_path / "other.db")
    assert run("traces", "import", file, "--store", other).stdout.split() == [study_id]
    assert TraceStore(other).study(study_id).to_json() == store.study(study_id).to_json()


def test_an_export_without_a_name_is_called_after_the_study(
    study_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("traces", "export").output.strip() == f"{study_id}.jsonl"
    assert (tmp_path / f"{study_id}.jsonl").exists()


def test_a_log_of_horovods_own_tuner_is_imported(store: TraceStore, tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    log.write_text("cycle_time_ms,tensor_fusion_threshold,score\n5,32,101.5\n")
    result = run("traces", "import", "--horovod-autotune", str(log))
    assert result.exit_code == 0
    assert store.study(result.output.strip()).winner is not None


def test_deletion_asks_first(store: TraceStore, study_id: str) -> None:
    refused = run("traces", "delete", study_id[:8], input="n\n")
    assert refused.exit_code == 1 and f"Delete study {study_id}" in refused.stderr
    assert len(store.studies()) == 1
    assert run("traces", "delete", study_id[:8], input="y\n").exit_code == 0
    assert store.studies() == []


@pytest.mark.parametrize("damage", ["{", "3"])
def test_a_damaged_study_can_be_deleted(store: TraceStore, study_id: str, damage: str) -> None:
    with sqlite3.connect(store.name) as connection:
        connection.execute("UPDATE hvd_autosync_studies SET space = ?", [damage])
        connection.execute("UPDATE hvd_autosync_trials SET result = ?", [damage])
    connection.close()
    assert "damaged" in run("traces", "list").stderr
    refused = run("traces", "delete", "last", input="n\n")
    assert refused.stderr == run("traces", "delete", study_id[:8], input="n\n").stderr
    assert f"Delete study {study_id}, which is damaged?" in refused.stderr
    assert run("traces", "delete", study_id, "--yes").exit_code == 0
    assert store.studies() == []


def test_a_damaged_study_is_listed_and_the_others_can_be_used(
    store: TraceStore, study_id: str, tmp_path: Path, add_damaged: Callable[[TraceStore], str]
) -> None:
    damaged = add_damaged(store)
    listed = run("traces", "list")
    assert listed.exit_code == 0
    _, good, bad = listed.stdout.splitlines()
    assert good.startswith(study_id) and "1.25x" in good
    assert bad.split() == [damaged, "-", "unreadable", "-", "-"]
    assert f"study {damaged} is damaged" in listed.stderr
    assert f"traces delete {damaged}" in listed.stderr
    file = str(tmp_path / "study.jsonl")
    assert run("traces", "export", study_id, "--related", "-o", file).exit_code == 0
    assert "is damaged in the store" not in run("replay", study_id, "--verify").stderr


def test_an_export_names_the_related_studies_that_it_lacks(
    store: TraceStore, study_id: str, tmp_path: Path
) -> None:
    learner = store.create_study(job_key="other", command=(), settings={}, versions={}).study_id
    store.describe_task(learner, None, SPACE)
    named = {RELATED: [[study_id, 0.9], ["0123456789ab", 0.5]]}
    store.tell(learner, store.ask(learner, Strategy(), "default", named), measured(0.05))
    file = tmp_path / "study.jsonl"
    done = run("traces", "export", learner, "--related", "-o", str(file))
    assert done.exit_code == 0 and done.stdout == f"{file}\n"
    assert "note: the study also learned from 0123456789ab, which this store" in done.stderr
    assert study_id not in done.stderr and study_id in file.read_text()
    store.delete(study_id)
    done = run("traces", "export", learner, "--related", "--overwrite", "-o", str(file))
    assert f"learned from {study_id}, 0123456789ab, which" in done.stderr
    done = run("traces", "export", learner, "--overwrite", "-o", str(file))
    assert done.stderr == "", "nothing else was asked for"


def test_deletion_does_not_ask_with_yes(store: TraceStore, study_id: str) -> None:
    assert run("traces", "delete", study_id, "--yes").exit_code == 0
    assert store.studies() == []


def checks(monkeypatch: pytest.MonkeyPatch, *severities: str) -> list[Any]:
    """Make the doctor find ``severities``; what it was asked is collected in the result."""
    from hvd_autosync.doctor import checks as doctor
    from hvd_autosync.doctor.finding import Finding, Severity

    asked: list[Any] = []

    def examine(*arguments: Any, **keywords: Any) -> list[Finding]:
        asked.append((*arguments, keywords))
        return [Finding("store", Severity(v), f"[{v}]", f"repair {v}") for v in severities]

    monkeypatch.setattr(doctor, "examine", examine)
    row = {"name": "p", "targets": "torch.f", "why": "[w]", "used_in": "runtime/f.py"}
    row |= {"tested": "torch 1.0", "here": "tested"}
    monkeypatch.setattr(doctor, "patch_table", lambda: [row])
    return asked


def test_the_doctor_prints_each_check_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    checks(monkeypatch, "ok", "warn")
    for name in [name for name in os.environ if name.startswith("HVD_AUTOSYNC_")]:
        monkeypatch.delenv(name)
    result = run("doctor")
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "ok    store: [ok]",
        "      repair ok",
        "warn  store: [warn]",
        "      repair warn",
        "ok    variables: none is set",
        "patches of other packages (tested versions; those here):",
        "      p (torch 1.0; tested): [w]",
        "          by runtime/f.py: torch.f",
    ]


@pytest.mark.parametrize("name", ["", "a..b", ".a", "a b", "a" * 64, "node1;true"])
def test_the_doctor_asks_no_host_without_a_name(name: str) -> None:
    refused = run("doctor", "--hosts", f"node1,{name}:2")
    assert refused.exit_code == 2
    assert f"{name!r} is no host name" in " ".join(refused.output.split())


def test_the_doctor_fails_when_a_check_does(monkeypatch: pytest.MonkeyPatch) -> None:
    checks(monkeypatch, "ok", "fail")
    assert run("doctor").exit_code == 1
    result = run("doctor", "--json")
    assert result.exit_code == 1
    document = json.loads(result.output)
    assert document["ok"] is False
    assert document["checks"][1] == {
        "subject": "store",
        "severity": "fail",
        "text": "[fail]",
        "remedy": "repair fail",
    }
    assert document["patches"][0]["targets"] == "torch.f"


def test_the_doctor_gets_hosts_ssh_and_store(
    store: TraceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = checks(monkeypatch)
    run("doctor", "--hosts", "a:4, b:4,c", "-p", "2222", "-i", "key")
    assert asked == [(["a", "b", "c"], {"ssh": (2222, "key"), "store": store.name})]
