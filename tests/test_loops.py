"""Training loops of many kinds, as scripts that know nothing of us, tuned by the flag."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_autosync.traces import StudyStatus, TraceStore

LOOPS = Path(__file__).parent / "scripts" / "loops"
pytestmark = [pytest.mark.cluster, pytest.mark.slow]
#: Scripts with their arguments; the first stands for the others.
SCRIPTS = {
    "transformer.py": [],
    "gan.py": [pytest.mark.wide],
    "compiled.py aot_eager": [pytest.mark.wide],
    "compiled.py inductor": [pytest.mark.wide],
    "module_loop.py": [pytest.mark.wide],
    "checkpointing.py": [pytest.mark.wide],
    "checkpointing.py reentrant": [pytest.mark.wide],
    "gan.py --synchronize": [pytest.mark.wide],
    "added_group.py": [pytest.mark.wide],
    "ema.py": [pytest.mark.wide],
    "frozen.py": [pytest.mark.wide],
}


@pytest.mark.parametrize(
    "script", [pytest.param(words, marks=marks) for words, marks in SCRIPTS.items()]
)
def test_the_flag_tunes_a_loop_and_trains_it(
    script: str, tmp_path: Path, horovodrun: str, keep_links: Callable[[Path, list[str]], None]
) -> None:
    name, *words = script.split()
    quick = "--autosync-mode launched --autosync-trials 3 --autosync-steps 5 --autosync-warmup 2"
    command = [horovodrun, "-np", "2", "--gloo", "--autosync", *quick.split()]
    command += ["--autosync-store", str(tmp_path / "traces.db")]
    command += [sys.executable, str(LOOPS / name), *words]
    keep_links(tmp_path / "traces.db", command[1:])
    done = subprocess.run(command, text=True, capture_output=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the loop is complete" in done.stdout
    store = TraceStore(str(tmp_path / "traces.db"))
    (study,) = store.studies()
    assert study.status is StudyStatus.FINISHED
    trials = store.trials(study.study_id)
    assert len({trial.strategy for trial in trials}) >= 3
    # A slow strategy is ended early; none fails.
    results = [trial.result for trial in trials]
    failed = [each for each in results if each is None or not each.status.measured]
    assert not failed, failed
