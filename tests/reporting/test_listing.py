from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from hvd_autosync.reporting.listing import studies_table, trials_table
from hvd_autosync.reporting.tuning_progress import TuningProgress
from hvd_autosync.reporting.words import speedup_text
from hvd_autosync.search_space import Strategy
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import StudyRecord, import_autotune_log, trials_frame


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


def test_a_choice_of_an_extension_that_is_not_loaded_is_no_damage(
    store: Any, finished: StudyRecord
) -> None:
    assert finished.outcome is not None
    own = Verdict(Strategy({"rest_codec": "own"}), Outcome.WORSE, 2.0, 1.0, 0.1, "it is larger")
    outcome = {**finished.outcome, "verdicts": [own.to_json()]}
    damaged = {**finished.outcome, "winner": {}}
    studies = [replace(finished, outcome=each) for each in (outcome, damaged)]
    first, second = rows(studies_table(studies))
    assert "unknown values" in first and "damaged" in second


def test_trials_show_times_speedups_and_how_they_ended(store: Any, finished: StudyRecord) -> None:
    lines = rows(trials_table(finished, store.trials(finished.study_id)))
    assert len(lines) == 12
    assert lines[1].split()[:7] == ["1", "sobol", "40.0", "±", "0.1", "ms", "1.25x"]
    assert "crashed: rank 1 exited with status 3" in lines[3]


def test_speedups_are_those_of_the_progress(store: Any, author: Any) -> None:
    author.explore()
    author.trial("confirm", dict(author.space.default), mean_s=0.1)  # the machine has become slow
    author.trial("confirm", {"buckets": 8}, mean_s=0.08)
    study, trials = author.study, store.trials(author.study_id)
    progress = TuningProgress()
    progress.start(study)
    shown = [each.speedup for each in progress.ended]
    assert shown[-2:] == pytest.approx([1, 1.25], rel=0.01)
    frame = trials_frame(store, author.study_id)
    assert frame["speedup"].tolist() == pytest.approx(shown, nan_ok=True)
    assert speedup_text(shown[-1]) in rows(trials_table(study.record, trials))[-1]


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
