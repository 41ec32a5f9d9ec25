"""A winner as a configuration of NCCL's tuner plugin, or why it cannot be one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hvd_autosync.commands.cli import app
from hvd_autosync.errors import StudyError
from hvd_autosync.reporting.nccl_tuner import tuner_config
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore


def study_of(author: Any, values: dict[str, object], fixed: dict[str, Any] | None = None) -> Any:
    """A finished study whose winner has these values."""
    space = SearchSpace(author.space.knobs, tuple(sorted((fixed or {}).items())))
    winner = Strategy(values)  # type: ignore[arg-type]
    return replace(author.record, winner=winner, space=space, task=author.task)


def lines(text: str) -> list[list[str]]:
    """The lines as the plugin reads them, which ignores comments and lines of over 255 bytes."""
    assert all(len(line) < 255 for line in text.splitlines())
    return [line.split(",") for line in text.splitlines() if line and not line.startswith("#")]


def place(study: StudyRecord) -> list[str]:
    assert study.task is not None
    resources = study.task.resources
    return [str(len(resources.hosts)), str(resources.world_size)]


def test_a_ring_holds_for_every_collective_of_horovods(author: Any) -> None:
    study = study_of(
        author,
        {
            "nccl_algorithm": "ring",
            "nccl_protocol": "simple",
            "nccl_min_channels": 8,
            "nccl_max_channels": 4,
            "nccl_buffer_bytes": 2**20,
        },
    )
    text = tuner_config(study)
    assert lines(text) == [
        [collective, "0", str(2**64 - 1), "ring", "simple", "8", *place(study)]
        for collective in ("allreduce", "allgather", "reducescatter", "broadcast")
    ]
    assert "# also set NCCL_BUFFSIZE=1048576\n" in text and "NCHANNELS" not in text


def test_a_tree_is_for_allreduce_and_a_range_of_channels_stays_a_variable(author: Any) -> None:
    study = study_of(
        author, {"nccl_algorithm": "tree", "nccl_max_channels": 4}, {"nccl_protocol": "ll"}
    )
    text = tuner_config(study)
    (line,) = lines(text)
    assert line == ["allreduce", "0", str(2**64 - 1), "tree", "ll", "0", *place(study)]
    assert "# also set NCCL_MAX_NCHANNELS=4\n" in text


@pytest.mark.parametrize(
    ("values", "said", "hint"),
    [
        ({"cycle_time_ms": 2.0}, "sets no knob of NCCL", "built with NCCL"),
        ({"threads_per_rank": 2}, "sets no knob of NCCL", "built with NCCL"),
        ({"nccl_protocol": "ll"}, "leaves algorithm or protocol to NCCL", "NCCL_PROTO=ll."),
        ({"nccl_buffer_bytes": 2**20}, "leaves algorithm", "NCCL_BUFFSIZE=1048576."),
    ],
)
def test_other_winners_say_what_to_do(
    author: Any, values: dict[str, object], said: str, hint: str
) -> None:
    with pytest.raises(StudyError, match=said) as caught:
        tuner_config(study_of(author, values))
    assert hint in caught.value.hint


def test_the_command_prints_or_writes_it(author: Any, tmp_path: Path) -> None:
    store: TraceStore = author.store
    file = tmp_path / "tuner.conf"

    def show(where: str) -> Any:
        words = ["show", author.study_id, "--store", store.name, "--nccl-tuner", where]
        return CliRunner().invoke(app, words)

    refused = show(str(file))
    assert refused.exit_code != 0 and "has no winner" in refused.output and not file.exists()
    winner = Strategy({"nccl_algorithm": "ring", "nccl_protocol": "ll"})
    store.finish(author.study_id, StudyStatus.FINISHED, {}, winner)
    printed, written = show("-"), show(str(file))
    assert printed.exit_code == written.exit_code == 0
    assert len(lines(printed.output)) == 4 and written.output == ""
    assert file.read_text() == printed.output
    unwritable = show(str(tmp_path / "none" / "tuner.conf"))
    assert unwritable.exit_code != 0 and "cannot write" in unwritable.output
