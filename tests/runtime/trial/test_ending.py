"""How runs end, with real workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from hvd_autosync.runtime.collectives.operations import CollectiveError
from hvd_autosync.runtime.trial import ending
from hvd_autosync.runtime.trial.ending import should_prune
from hvd_autosync.search_space.trial import left_out

Launch = Callable[..., Any]


def worker_pids(output: str) -> list[str]:
    """Process ids of ranks and their children with their starts, as the script printed them."""
    lines = [line.split("pids")[1] for line in output.splitlines() if "pids" in line]
    return [pid for line in lines for pid in line.split()]


def lives(process: str) -> bool:
    pid, _, start = process.partition(":")
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19] == start
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(processes: list[str]) -> None:
    deadline = time.monotonic() + 120
    while any(map(lives, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [each for each in processes if lives(each)]


@pytest.mark.cluster
def test_all_ranks_end_after_the_steps(launch: Launch) -> None:
    job = launch("train.py", "--loader", "--close-stderr", profile=True)
    assert job.status == 0, job.output
    assert "done" not in job.output
    assert "Traceback" not in job.output
    assert sorted(job.messages) == [0, 1]
    for rank in (0, 1):
        types = [m["type"] for m in job.messages[rank]]
        assert types[0] == "hello" and types[-2:] == ["steps", "end"]
        (hello,), (end,) = job.of_type("hello", rank), job.of_type("end", rank)
        assert hello["device"] == "cpu"
        assert end["cause"] == "steps" and end["peak_memory_bytes"] > 10_000_000
        steps, blocked = job.joined("step_s", rank), job.joined("blocked_s", rank)
        assert len(steps) == len(blocked) == len(job.joined("losses", rank)) == 24
        assert all(0 <= b < s for b, s in zip(blocked, steps, strict=True))
    pids = worker_pids(job.output)
    assert len(pids) == 6
    assert_gone(pids)
    (profile,) = job.of_type("profile")
    assert not job.of_type("profile", 1)
    assert [p["name"] for p in profile["profile"]["parameters"]] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    assert profile["profile"]["wrapped"] and profile["owned"] == []


@pytest.mark.cluster
def test_pruned_run_of_a_script_that_marks_its_steps(launch: Launch) -> None:
    job = launch(
        "train.py",
        "--manual",
        "--step-s",
        "0.005",
        profile=True,
        measured_steps=10**6,
        prune_above_s=1e-4,
    )
    assert job.status == 0, job.output
    # Votes are after every eighth measured step; the first that both ranks' steps justify counts.
    step_s = [job.joined("step_s", rank) for rank in (0, 1)]
    untypical = [job.joined("untypical", rank) for rank in (0, 1)]
    # An epoch is of four steps.
    assert untypical == [list(range(0, len(step_s[0]), 4))] * 2

    def kept(rank: int, votes: int) -> list[float]:
        measured = range(4, 4 + votes)
        out = left_out(measured, untypical[rank])
        return [step_s[rank][index] for index in measured if index not in out]

    justified = [
        votes
        for votes in range(8, len(step_s[0]) - 4 + 1, 8)
        if all(should_prune(kept(rank, votes), 1e-4) for rank in (0, 1))
    ]
    assert {len(steps) - 4 for steps in step_s} == {justified[0]}
    for rank in (0, 1):
        assert job.of_type("end", rank)[0]["cause"] == "pruned"
    profile = job.of_type("profile")[0]["profile"]
    assert not profile["wrapped"] and profile["parameters"] == []
    assert profile["backward_s"] > 0


@pytest.mark.cluster
def test_ranks_with_uneven_data(launch: Launch) -> None:
    # Rank 0 makes 3 of an epoch's 5 steps and waits in join(): for the first vote's step to come
    # it has to catch up, and it is there when rank 1 has made all steps. It waits there, too, when
    # rank 1 asks whether fewer would do, and has to take over the answer.
    job = launch("train.py", "--uneven", profile=True, prune_above_s=100.0, adaptive_steps=True)
    assert job.status == 0, job.output
    assert "Traceback" not in job.output
    assert len(job.joined("step_s", 0)) == 15
    assert len(job.joined("step_s", 1)) == 24
    assert [job.of_type("end", rank)[0]["cause"] for rank in (0, 1)] == ["steps", "steps"]
    assert len(job.of_type("profile")) == 1


@pytest.mark.mpi
def test_mpi_that_the_script_initialized(launch: Launch) -> None:
    job = launch("train.py", "--mpi4py", "--endpoint", "--loader", under="mpi", profile=True)
    assert job.status == 0, job.output
    assert "finalize" not in job.output
    assert [len(job.joined("step_s", rank)) for rank in (0, 1)] == [24, 24]
    assert_gone(worker_pids(job.output))


@pytest.mark.cluster
def test_end_of_the_script_and_forked_children(launch: Launch) -> None:
    job = launch("train.py", "--steps", "7", "--fork", under="alone")
    assert job.status == 0, job.output
    assert "done" in job.output
    (end,) = job.of_type("end")
    assert end["cause"] == "script"
    assert len(job.joined("step_s")) == len(job.joined("losses")) == 7
    assert all(map(math.isfinite, job.joined("losses")))


class Ended(BaseException):
    """Instead of the end of the process."""


def test_a_rank_that_waits_in_join_begins_nothing_when_the_others_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # An operation that begins while Horovod shuts down can stop its process for ever.
    called: list[str] = []

    def end(status: int) -> NoReturn:
        raise Ended(status)

    class Run:
        def leave(self, cause: str, *, shut_down: bool) -> NoReturn:
            ending.leave(shut_down=shut_down)

    monkeypatch.setattr(ending, "exit_with_children", end)
    monkeypatch.setattr(ending, "shutdown", lambda: called.append("shutdown"))
    monkeypatch.setattr(ending, "allreduce", lambda *_, name, **__: called.append(name))
    monkeypatch.setattr(ending.logging, "shutdown", lambda: None)

    def join(device: int) -> int:
        raise CollectiveError("Horovod has been shut down")

    with pytest.raises(Ended):
        ending.leaving_join(join, Run())(-1)  # type: ignore[arg-type]
    assert called == ["shutdown"]
    with pytest.raises(Ended):
        ending.leave()
    assert called[1:] == ["hvd_autosync.end", "shutdown"]


@pytest.mark.cluster
def test_failure_of_the_script(launch: Launch) -> None:
    job = launch("train.py", "--steps", "3", "--fail", under="alone")
    assert job.status == 1
    assert "RuntimeError: the script failed" in job.output
    assert len(job.joined("step_s")) == 3


@pytest.mark.cluster
def test_real_training_is_not_measured(launch: Launch) -> None:
    job = launch(
        "train.py", "--steps", "3", under="alone", measured_steps=0, strategy={"buckets": 2}
    )
    assert job.status == 0, job.output
    assert job.messages == {}
    assert "planned True" in job.output
    assert "done, threads: MainThread" in job.output.splitlines()
