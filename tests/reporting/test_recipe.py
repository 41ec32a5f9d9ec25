from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hvd_autosync.errors import StudyError
from hvd_autosync.launch import command as launch_command
from hvd_autosync.reporting import recipe as recipe_module
from hvd_autosync.reporting.recipe import recipe
from hvd_autosync.reporting.strategy_export import exported_strategy
from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.strategy_file import read_strategy
from hvd_autosync.traces import StudyRecord, TraceStore
from hvd_autosync.traces.anonymous import anonymous

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

WINNER = Strategy({"controller": "mpi", "cycle_time_ms": 5.0})


@pytest.fixture(autouse=True)
def no_open_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_command, "open_mpi_major", lambda: None)


def test_variables_become_exports(finished: StudyRecord) -> None:
    assert recipe(finished, WINNER).exports == ("export HOROVOD_CYCLE_TIME=5.0",)


def test_options_come_before_the_command_whatever_the_command_is(finished: StudyRecord) -> None:
    study = replace(finished, command=("horovodrun", "-np", "4", "sh", "-c", "python a b.py --x"))
    words = shlex.split(recipe(study, WINNER).line)
    assert words == ["horovodrun", "--mpi", "-np", "4", "sh", "-c", "python a b.py --x"]


def test_the_line_is_understood_by_horovods_own_parser(
    finished: StudyRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    from horovod.runner import launch

    monkeypatch.setattr("sys.argv", shlex.split(recipe(finished, WINNER).line))
    parsed = launch.parse_args()
    assert parsed.use_mpi and parsed.num_proc == 4 and parsed.hosts == "a:2,b:2"
    assert parsed.command == ["python", "train.py", "--token", "***"]


def test_open_mpi_5_gets_its_binding_unless_the_user_binds(
    finished: StudyRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_command, "open_mpi_major", lambda: 5)
    binding = launch_command.OPEN_MPI_5_BINDING
    assert shlex.split(recipe(finished, WINNER).line)[1:3] == ["--mpi", binding]
    own = ("horovodrun", "--binding-args=-bind-to core", "-np", "4", "python", "t.py")
    assert binding not in shlex.split(recipe(replace(finished, command=own), WINNER).line)


def test_exchanges_are_written_into_a_file(finished: StudyRecord) -> None:
    winner = Strategy({"controller": "mpi", "buckets": 8, "large_exchange": "hierarchical"})
    found = recipe(finished, winner)
    assert found.exports == ()
    assert found.line.startswith("hvd-autosync run --strategy strategy.toml -np 4 -H a:2,b:2 ")
    strategy, classes = read_strategy(tomllib.loads(found.file))
    assert strategy == winner
    assert classes["large"][0] == "layer0.weight"


def test_hidden_secrets_and_held_knobs_are_mentioned(finished: StudyRecord) -> None:
    notes = recipe(finished, WINNER).notes
    assert any("Replace each ***" in note for note in notes)
    assert any("cache_capacity = 1024" in note for note in notes)


def test_hidden_marks_are_those_of_the_job() -> None:
    from hvd_autosync.launch.masking import redact

    assert redact(["python", "--token", "abc"])[2].startswith(recipe_module.HIDDEN)


def test_a_study_without_a_line_leaves_room_for_one(finished: StudyRecord) -> None:
    line = recipe(replace(finished, command=()), WINNER).line
    assert line == "horovodrun --mpi YOUR-OPTIONS YOUR-COMMAND"


def test_a_shared_study_leaves_room_for_the_line(author: Any, finished: StudyRecord) -> None:
    shared, _ = anonymous(finished, author.study.history)
    assert recipe(shared, WINNER).line == "horovodrun --mpi YOUR-OPTIONS YOUR-COMMAND"
    exact = Strategy({"buckets": 8, "large_exchange": "allreduce", "large_slices": 1})
    found = recipe(shared, exact)
    assert found.line == "hvd-autosync run --strategy strategy.toml YOUR-OPTIONS YOUR-COMMAND"
    assert read_strategy(tomllib.loads(found.file)) == (Strategy({"buckets": 8}), {})


@pytest.mark.parametrize(
    "values",
    [
        {"large_exchange": "hierarchical"},
        {"large_exchange": "allreduce", "rest_codec": "fp16"},
        {"embedding_exchange": "rows", "buckets": 4},
    ],
)
def test_a_shared_study_has_no_names_for_the_classes_of_a_strategy(
    author: Any, finished: StudyRecord, values: dict[str, Any]
) -> None:
    shared, _ = anonymous(finished, author.study.history)
    found = recipe(shared, Strategy(values))
    assert (found.exports, found.line, found.file) == ((), "", "")
    (note,) = found.notes
    assert "it has no names of parameters" in note and "hvd-autosync traces import" in note


def test_a_knob_that_this_process_does_not_know_is_named_with_its_value(
    store: TraceStore, finished: StudyRecord
) -> None:
    strategy = Strategy({"cycle_time_ms": 2.0, "own_size": 7})
    found = recipe(finished, strategy)
    assert (found.exports, found.line, found.file) == ((), "", "")
    (note,) = found.notes
    assert "'own_size' in the strategy cycle_time_ms=2.0, own_size=7" in note
    assert "HVD_AUTOSYNC_EXTENSIONS" in note
    with pytest.raises(StudyError, match="unknown knob 'own_size'") as wrong:
        exported_strategy(store, replace(finished, winner=strategy), "winner")
    assert "HVD_AUTOSYNC_EXTENSIONS" in wrong.value.hint


def test_another_launcher_keeps_its_line_and_gets_the_option(
    new_author: Callable[..., Any],
) -> None:
    found = recipe(new_author(command=("srun", "python", "t.py")).record, WINNER)
    assert found.line == ""
    assert any("--mpi of horovodrun" in note for note in found.notes)
