"""The helper process of a live training: how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MAIN = "from hvd_autosync.commands import live_study as it"


def start(code: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", f"{MAIN}\n{code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"HVD_AUTOSYNC_STORE": str(folder / "traces.db")} | variables,
    )


def test_a_script_that_makes_no_step_is_told_so(tmp_path: Path) -> None:
    with start("it.main()", tmp_path) as helper:
        assert helper.stdin is not None and helper.stderr is not None
        helper.stdin.write('{"type": "end"}\n')
        helper.stdin.flush()
        # Its input stays open, as where a child of rank 0 lives on.
        words = helper.stderr.read()
        assert helper.wait(60) == 0, words
    assert "nothing was tuned" in words
    assert "Fatal" not in words


@pytest.mark.parametrize("last", ["", '{"type": "end"}\n'])
def test_it_does_not_outlive_the_training(tmp_path: Path, last: str) -> None:
    stuck = "import time\nfrom hvd_autosync.engine import live\n"
    stuck += "live.live_options = lambda: time.sleep(1000)\nit._LONGEST_S = 0.5\nit.main()"
    with start(stuck, tmp_path) as helper:
        helper.communicate(last, timeout=60)
        assert helper.returncode == 0


def test_an_invalid_option_is_said_in_lines(tmp_path: Path) -> None:
    with start("it.main()", tmp_path, HVD_AUTOSYNC_TRIALS="many") as helper:
        _, words = helper.communicate("", timeout=60)
    lines = words.splitlines()
    assert any("invalid value 'many' for HVD_AUTOSYNC_TRIALS" in line for line in lines)
    assert lines[-1] == "hvd-autosync: the training goes on untuned"
    assert "\\n" not in words
