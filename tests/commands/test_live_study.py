"""The helper process of a live training: how it ends."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hvd_autosync.traces.owner import Owner
from hvd_autosync.util.variables import END_TUNING_NOTE, STUDY_NOTE, TUNING_ENDED_NOTE

MAIN = "from hvd_autosync.commands import live_study as it"
#: What rank 0 says first, but for whether Horovod can be initialized again.
BEGIN: dict[str, Any] = {
    "type": "begin",
    "process": 1,
    "hosts": ["a", "a"],
    "command": ["python", "x.py"],
    "adds_levels": False,
}


def start(code: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"{MAIN}\n{code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HVD_AUTOSYNC_STORE": str(folder / "traces.db")} | variables,
    )


#: However long it takes to start on a busy machine: it ends by what it knows.
PATIENT = "it._LONGEST_S, it._LET_GO_S = 1000, 200\n"


def test_a_script_that_makes_no_step_is_told_so(tmp_path: Path) -> None:
    with start(f"{PATIENT}it.main()", tmp_path) as helper:
        assert helper.stdin is not None and helper.stderr is not None
        helper.stdin.write('{"type": "end"}\n')
        helper.stdin.flush()
        # Its input stays open, as where a child of rank 0 lives on.
        words = helper.stderr.read()
        assert helper.wait(280) == 0, words
    assert "nothing was tuned" in words
    assert "Fatal" not in words


#: Loading the learner's libraries takes for ever.
LOADING = f"{PATIENT}import threading\nit._load = lambda training: threading.Event().wait()\n"


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ([{"type": "end", "steps": 1}], "the training ended after 1 step, before its default was"),
        ([{"type": "end", "steps": 6}], "the training ended after 6 steps, before its default was"),
        ([], ""),  # it has failed, and says so itself
    ],
)
def test_a_training_that_ends_first_does_not_wait_for_it(
    tmp_path: Path, last: list[dict[str, Any]], said: str
) -> None:
    words = "".join(f"{json.dumps(each)}\n" for each in (BEGIN | {"reinitializes": True}, *last))
    with start(f"{LOADING}it.main()", tmp_path) as helper:
        _, lines = helper.communicate(words, timeout=280)
    assert helper.returncode == 0, lines
    assert (said in lines) if said else not lines
    assert not (tmp_path / "traces.db").exists(), "there is nothing to resume"


def test_a_short_training_after_launched_trials_is_not_sent_back_to_them(tmp_path: Path) -> None:
    with start(f"{LOADING}it.main()", tmp_path, HVD_AUTOSYNC_JUDGED="one") as helper:
        _, lines = helper.communicate('{"type": "end", "steps": 6}\n', timeout=280)
    assert "it has kept the winner of study one" in lines and "after 6 steps" in lines
    assert "nothing was tuned" not in lines and "--autosync-mode" not in lines


@pytest.mark.parametrize("last", ["", '{"type": "end"}\n'])
def test_it_does_not_outlive_the_training(tmp_path: Path, last: str) -> None:
    stuck = "import time\nfrom hvd_autosync.engine import live_job\n"
    stuck += "live_job.live_options = lambda: time.sleep(1000)\nit._LONGEST_S = 0.5\nit.main()"
    with start(stuck, tmp_path) as helper:
        helper.communicate(last, timeout=280)
        assert helper.returncode == 0


@pytest.mark.parametrize("dies", [True, False])
def test_ranks_of_an_elastic_job_do_not_wait_for_a_calculation(tmp_path: Path, dies: bool) -> None:
    """And others can go on with the study, also where they cannot see that this process ended."""
    stuck = "import time\nfrom hvd_autosync.engine import tuning\n"
    stuck += f"tuning.links_of = lambda *args, **given: time.sleep(1000)\n{PATIENT}it.main()"
    with start(stuck, tmp_path, HOROVOD_ELASTIC="1") as helper:
        assert helper.stdin is not None and helper.stderr is not None
        helper.stdin.write(json.dumps(BEGIN | {"reinitializes": False, "elastic": True}) + "\n")
        helper.stdin.flush()
        assert "study" in helper.stderr.readline()
        if dies:
            helper.stdin.close()
        else:  # its input stays open, as where a child of rank 0 lives on
            helper.stdin.write('{"type": "reset"}\n')
            helper.stdin.flush()
        assert not helper.stderr.read()
        assert helper.wait(280) == 0
    with closing(sqlite3.connect(tmp_path / "traces.db")) as store:
        ((owner,),) = store.execute("select owner from hvd_autosync_studies").fetchall()
    assert Owner.from_json(json.loads(owner)) == Owner.nobody()


@pytest.mark.parametrize(("stopped", "reuse"), [(True, "auto"), (True, "never"), (False, "auto")])
def test_a_training_that_is_stopped_between_two_trials_is_not_lost(
    tmp_path: Path, stopped: bool, reuse: str
) -> None:
    marker = tmp_path / "stopped"
    options = {"HVD_AUTOSYNC_STOPPED": str(marker), "HVD_AUTOSYNC_REUSE": reuse}
    with start(f"{PATIENT}it.main()", tmp_path, **options) as helper:
        assert helper.stdin is not None and helper.stderr is not None
        helper.stdin.write(json.dumps(BEGIN | {"reinitializes": False}) + "\n")
        helper.stdin.flush()
        assert "study" in helper.stderr.readline()
        if stopped:
            marker.touch()
        words = helper.communicate(timeout=280)[1]
    assert ("the training ended before its tuning" in words) is stopped
    assert ("the next run of this job resumes it" in words) is (stopped and reuse != "never")
    assert ("the training ended unexpectedly" in words) is not stopped


def test_a_notebook_learns_the_study_and_ends_its_tuning(tmp_path: Path) -> None:
    (tmp_path / END_TUNING_NOTE).touch()
    stopped = str(tmp_path / "stopped")
    with start(f"{PATIENT}it.main()", tmp_path, HVD_AUTOSYNC_STOPPED=stopped) as helper:
        assert helper.stdin is not None and helper.stderr is not None
        helper.stdin.write(json.dumps(BEGIN | {"reinitializes": False}) + "\n")
        helper.stdin.flush()
        line = helper.stderr.readline()
        assert line.startswith("hvd-autosync: study ")
        assert (tmp_path / STUDY_NOTE).read_text() == line.split()[2].rstrip(":")
        switched = {"type": "switched", "step": 1, "steps": 1, "spent_s": 0.1}
        messages = ({"type": "link", "link": None}, switched, {"type": "end"})
        lines = "".join(f"{json.dumps(each)}\n" for each in messages)
        words = helper.communicate(lines, timeout=120)[1]
    noted = (tmp_path / TUNING_ENDED_NOTE).read_text()
    assert noted in words and noted.startswith("tuning was ended after 0 trials")


@pytest.mark.parametrize("how", ["signal", "file", ""])
def test_it_knows_that_the_job_is_stopped(tmp_path: Path, how: str) -> None:
    code = "it._LONGEST_S = 100\nstopped = it._watch_for_stop()\nassert not stopped()\n"
    code += "print('ready', file=sys.stderr, flush=True)\nsys.stdin.read()\n"
    code += "print(stopped(), file=sys.stderr)"
    marker = tmp_path / "stopped"
    with start(f"import sys\n{code}", tmp_path, HVD_AUTOSYNC_STOPPED=str(marker)) as helper:
        assert helper.stderr is not None and helper.stderr.readline() == "ready\n"
        if how == "signal":
            helper.send_signal(signal.SIGTERM)
        elif how == "file":
            marker.touch()
        assert helper.communicate(timeout=280)[1] == f"{how != ''}\n"


def test_warnings_of_a_scheduler_do_not_end_it(tmp_path: Path) -> None:
    """``sbatch --signal=B:USR1@60`` and its like are for the script."""
    code = "it._watch_for_stop = lambda: print('ready', file=sys.stderr, flush=True) or bool\n"
    with start(f"import sys\n{PATIENT}{code}it.main()", tmp_path) as helper:
        assert helper.stderr is not None and helper.stderr.readline() == "ready\n"
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            helper.send_signal(number)
        helper.communicate("", timeout=280)
        assert helper.returncode == 0


def test_a_signal_ends_it_also_while_the_training_goes_on(tmp_path: Path) -> None:
    code = "it._LONGEST_S = 0.5\nit._watch_for_stop()\nprint('ready', file=sys.stderr, flush=True)"
    with start(f"import sys, time\n{code}\ntime.sleep(1000)", tmp_path) as helper:
        assert helper.stderr is not None and helper.stderr.readline() == "ready\n"
        helper.send_signal(signal.SIGTERM)
        assert helper.wait(280) == 0


def test_an_invalid_option_is_said_in_lines(tmp_path: Path) -> None:
    with start(f"{PATIENT}it.main()", tmp_path, HVD_AUTOSYNC_TRIALS="many") as helper:
        _, words = helper.communicate("", timeout=280)
    lines = words.splitlines()
    assert any("invalid value 'many' for HVD_AUTOSYNC_TRIALS" in line for line in lines)
    assert lines[-1] == "hvd-autosync: the training goes on untuned"
    assert "\\n" not in words


def test_a_training_without_a_result_to_reuse_is_said_to_be_untuned(tmp_path: Path) -> None:
    with start(f"{PATIENT}it.main()", tmp_path, HVD_AUTOSYNC_REUSE="only") as helper:
        assert helper.stdin is not None and helper.stderr is not None
        helper.stdin.write(json.dumps(BEGIN | {"reinitializes": False}) + "\n")
        helper.stdin.flush()
        words = helper.stderr.read()
        assert helper.wait(280) == 0
    assert "this store has no finished study of this job" in words
    assert words.splitlines()[-1] == "hvd-autosync: the training goes on untuned"
