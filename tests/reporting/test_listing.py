from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hvd_autosync.reporting.listing import studies_table, trials_table
from hvd_autosync.traces import StudyRecord, import_autotune_log


def rows(table: Table) -> list[str]:
    console = Console(width=200, markup=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get().splitlines()[1:]


def test_studies_show_what_came_of_them(store: Any, finished: StudyRecord, new_author: Any) -> None:
    without = new_author()
    without.explore()
    without.confirm(factor=1.35)
    new_author()
    running, no_gain, gain = rows(studies_table(store.studies()))
    assert "running" in running and " - " in running
    assert "finished" in no_gain and "no gain" in no_gain
    assert finished.study_id in gain and "1.32x" in gain
    assert "horovodrun -np 4 -H a:2,b:2 python train.py" in gain


def test_trials_show_times_speedups_and_how_they_ended(store: Any, finished: StudyRecord) -> None:
    lines = rows(trials_table(finished, store.trials(finished.study_id)))
    assert len(lines) == 12
    assert lines[1].split()[:7] == ["1", "sobol", "40.0", "±", "0.1", "ms", "1.25x"]
    assert "crashed: rank 1 exited with status 3" in lines[3]


def test_a_trial_without_a_result_is_shown_as_such(store: Any, author: Any) -> None:
    store.ask(author.study_id, author.space.default, "default", {})
    (line,) = rows(trials_table(author.record, store.trials(author.study_id)))
    assert "no result" in line


def test_a_study_of_horovods_own_tuner_is_listed(store: Any, tmp_path: Path) -> None:
    log = tmp_path / "autotune.csv"
    log.write_text("cycle_time_ms,tensor_fusion_threshold,score\n5,32,101.5\n")
    study = store.study(import_autotune_log(store, log))
    (line,) = rows(studies_table([study]))
    assert "log of Horovod's own autotuner" in line
    (trial,) = rows(trials_table(study, store.trials(study.study_id)))
    assert "cycle_time_ms=5.0, fusion_threshold_bytes=33554432" in trial
