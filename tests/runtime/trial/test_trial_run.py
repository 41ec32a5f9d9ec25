"""What is due at which step, without Horovod: its functions are replaced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives import launcher_use
from hvd_autosync.runtime.trial import profiling, trial_run
from hvd_autosync.runtime.trial.trial_run import TrialRun


class Left(Exception):
    """Thrown where the process would end."""


class Stream(IterableDataset[torch.Tensor]):
    """Data without an end that could be known."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(1)


class Spy:
    """Takes the sender's place and notes what a run does."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.votes: list[int] = []
        self.prune = False
        self.most_steps = 0
        self.alike = True

    def start(self, rank: int, news: Callable[[], Any]) -> None:
        assert rank == 0

    def stop(self) -> None:
        pass

    def send(self, compose: Callable[[], dict[str, Any]]) -> None:
        self.messages.append(compose())

    @property
    def types(self) -> list[str]:
        return [message["type"] for message in self.messages]

    def vote(self, step_s: list[float], above_s: float) -> bool:
        self.votes.append(len(step_s))
        return self.prune


def make_optimizer(*names: str) -> Any:
    """Looks like one that Horovod wrapped."""
    parameters = [torch.nn.Parameter(torch.ones(2, 1)) for _ in names]
    optimizer: Any = torch.optim.SGD(parameters, lr=0.1)
    optimizer._parameter_names = dict(zip(parameters, names, strict=True))
    return optimizer


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    spy = Spy()

    def leave(*, shut_down: bool) -> None:
        raise Left

    monkeypatch.setattr(trial_run, "rank", lambda: 0)
    monkeypatch.setattr(trial_run.ending, "leave", leave)
    monkeypatch.setattr(trial_run.ending, "vote_prune", spy.vote)
    monkeypatch.setattr(profiling, "same_by_sums", lambda described, name: spy.alike)
    monkeypatch.setattr(trial_run, "agree_steps", lambda steps, name: spy.most_steps)
    monkeypatch.setattr(trial_run.atexit, "register", lambda _: None)
    return spy


@pytest.fixture
def start(make_spec: Any, spy: Spy) -> Callable[..., TrialRun]:
    return lambda **spec: TrialRun(make_spec(**spec), spy)  # type: ignore[arg-type]


Start = Callable[..., TrialRun]


def test_ends_after_its_steps(start: Start, spy: Spy) -> None:
    run, optimizer = start(warmup_steps=2, measured_steps=3), make_optimizer("w")
    run.optimizer_created(optimizer, frozenset())
    with pytest.raises(Left):
        for _ in range(100):
            run.optimizer_stepped(optimizer)
    assert spy.types == ["hello", "steps", "end"]
    assert len(spy.messages[1]["step_s"]) == 5
    assert spy.messages[2]["cause"] == "steps"
    assert spy.messages[2]["peak_memory_bytes"] > 1_000_000


def test_says_hello_once(start: Start, spy: Spy) -> None:
    run = start()
    run.optimizer_created(make_optimizer("a"), frozenset())
    run.optimizer_created(make_optimizer("b"), frozenset())
    run.mark()
    assert spy.types == ["hello"]
    assert spy.messages[0]["device"] == "cpu"
    assert spy.messages[0]["host"]


class Stepping:
    """An optimizer that does nothing."""


def test_votes_every_eight_measured_steps(start: Start, spy: Spy) -> None:
    run, optimizer = start(warmup_steps=3, measured_steps=25, prune_above_s=1.0), Stepping()
    run._begun = True
    with pytest.raises(Left):
        for _ in range(100):
            run.optimizer_stepped(optimizer)
    assert spy.votes == [8, 16, 24]


def test_ends_when_all_ranks_vote_to_prune(start: Start, spy: Spy) -> None:
    run, optimizer = start(warmup_steps=3, measured_steps=40, prune_above_s=1.0), Stepping()
    spy.prune = True
    with pytest.raises(Left):
        for _ in range(100):
            run.optimizer_stepped(optimizer)
    assert spy.messages[-1]["cause"] == "pruned"
    assert len(spy.messages[-2]["step_s"]) == 11


def test_does_not_vote_without_threshold(start: Start, spy: Spy) -> None:
    run = start(measured_steps=100)
    for _ in range(90):
        run.mark()
    assert spy.votes == []


@pytest.mark.parametrize(("agreed", "last"), [(12, 14), (40, 42)])
def test_measures_as_few_steps_as_all_agree_on(
    start: Start, spy: Spy, monkeypatch: pytest.MonkeyPatch, agreed: int, last: int
) -> None:
    run = start(warmup_steps=2, measured_steps=40, adaptive_steps=True)
    optimizer, asked = Stepping(), []
    run._begun = True

    def agree(step_s: list[float], most: int) -> int:
        asked.append((len(step_s), most))
        return agreed

    monkeypatch.setattr(trial_run.ending, "agree_enough", agree)
    with pytest.raises(Left):
        for _ in range(100):
            run.optimizer_stepped(optimizer)
    assert asked == [(1, 40)], "the first step has the set-up in it"
    assert len(spy.messages[-2]["step_s"]) == last and spy.messages[-1]["cause"] == "steps"


def test_who_was_in_join_ends_with_the_others(
    start: Start, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have agreed meanwhile to end after 14 steps, and have made 5."""
    run, optimizer = start(warmup_steps=2, measured_steps=40, adaptive_steps=True), Stepping()
    run._begun = True
    run.optimizer_stepped(optimizer)
    agreed = {"trial": 5, "trial.last": -14}
    monkeypatch.setattr(profiling, "same_by_sums", lambda described, name: spy.alike)
    monkeypatch.setattr(trial_run, "agree_steps", lambda steps, name: agreed[name])
    run.all_joined()
    with pytest.raises(Left):
        for _ in range(100):
            run.optimizer_stepped(optimizer)
    assert run._steps == 14


def test_what_is_done_between_steps_is_not_timed(
    start: Start, spy: Spy, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start(warmup_steps=1, measured_steps=20, prune_above_s=1.0)

    def slow_vote(step_s: list[float], above_s: float) -> bool:
        clock.now += 100
        return False

    monkeypatch.setattr(trial_run.ending, "vote_prune", slow_vote)
    for _ in range(12):
        run.mark()
    assert clock.now > 100
    assert run.recorder.step_s == [1.0] * 12


def test_first_optimizer_that_steps_is_counted(start: Start, spy: Spy) -> None:
    run, first, second = start(), Stepping(), Stepping()
    for _ in range(3):
        run.optimizer_stepped(first)
        for _ in range(5):
            run.optimizer_stepped(second)
    assert len(run.recorder.step_s) == 3


def test_steps_of_some_ranks_are_not_counted(start: Start, spy: Spy) -> None:
    run, everyone, some = start(), Stepping(), Stepping()
    some.process_set = "of rank 1"
    run.optimizer_created(some, frozenset())
    for _ in range(3):
        run.optimizer_stepped(some)
        run.optimizer_stepped(some)
        run.optimizer_stepped(everyone)
    assert len(run.recorder.step_s) == 3


def test_an_optimizer_that_is_no_longer_used_is_replaced(start: Start, spy: Spy) -> None:
    run, first, second = start(measured_steps=100), Stepping(), Stepping()
    run.optimizer_stepped(first)
    for _ in range(31):
        run.optimizer_stepped(second)
    assert len(run.recorder.step_s) == 1
    for _ in range(3):
        run.optimizer_stepped(second)
    assert len(run.recorder.step_s) == 4


def test_an_optimizer_of_the_same_parameters_replaces_the_one_before(
    start: Start, spy: Spy
) -> None:
    run, parameters = start(measured_steps=100), [torch.nn.Parameter(torch.ones(2))]
    first, second = (torch.optim.SGD(parameters, lr=rate) for rate in (0.1, 0.2))
    run.optimizer_stepped(first)
    for _ in range(3):
        run.optimizer_stepped(second)
    assert len(run.recorder.step_s) == 4


def test_marks_replace_automatic_counting(start: Start, spy: Spy) -> None:
    run, optimizer = start(), Stepping()
    run.optimizer_stepped(optimizer)
    run.mark()  # of the step that was just counted
    assert len(run.recorder.step_s) == 1
    for _ in range(3):
        run.optimizer_stepped(optimizer)
        run.optimizer_stepped(optimizer)
        run.mark()
    assert len(run.recorder.step_s) == 4


def test_marks_alone(start: Start, spy: Spy) -> None:
    run = start(profile=True, warmup_steps=4, measured_steps=5)
    with pytest.raises(Left):
        for _ in range(100):
            run.mark()
    assert spy.types == ["hello", "profile", "steps", "end"]
    assert spy.messages[1]["profile"]["wrapped"] is False
    assert len(spy.messages[2]["step_s"]) == 9


@pytest.mark.parametrize("warmup_steps", [1, 2, 3, 10])
def test_profile_leaves_measured_steps_alone(start: Start, spy: Spy, warmup_steps: int) -> None:
    run, optimizer = start(profile=True, warmup_steps=warmup_steps), make_optimizer("a", "b")
    run.optimizer_created(optimizer, frozenset({"rest_codec"}))
    parameter = optimizer.param_groups[0]["params"][0]
    profiled = []
    for _ in range(warmup_steps):
        profiled.append(bool(parameter._post_accumulate_grad_hooks))
        parameter.sum().backward()
        run.optimizer_stepped(optimizer)
    assert any(profiled[warmup_steps // 2 :])
    assert run.profiling.profiler is None
    assert not parameter._post_accumulate_grad_hooks
    assert spy.types == ["hello", "profile"]
    assert spy.messages[1]["owned"] == ["rest_codec"]
    names = [p["name"] for p in spy.messages[1]["profile"]["parameters"]]
    assert names == ["a", "b"]


def test_a_second_optimizer_is_profiled_after_a_short_warm_up(start: Start, spy: Spy) -> None:
    run = start(profile=True, warmup_steps=2, measured_steps=5)
    first, second = make_optimizer("a"), make_optimizer("b")
    for each in (first, second):
        run.optimizer_created(each, frozenset())
    with contextlib.suppress(Left):
        while True:
            run.optimizer_stepped(first)
    (profile,) = (m["profile"] for m in spy.messages if m["type"] == "profile")
    assert {p["name"] for p in profile["parameters"]} == {"a", "b"}


@pytest.mark.parametrize("how", ["loader", "average", "stream", "by hand"])
def test_the_profile_says_whether_epochs_were_seen(
    start: Start, spy: Spy, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(current, "script_averages", False)
    run, optimizer = start(profile=True, warmup_steps=4), make_optimizer("a")
    run.optimizer_created(optimizer, frozenset())
    data = torch.ones(20, 1)
    batches = iter(DataLoader(TensorDataset(data) if how == "loader" else Stream()))
    for _ in range(4):
        if how in ("loader", "stream"):
            next(batches)
        optimizer.param_groups[0]["params"][0].sum().backward()
        run.optimizer_stepped(optimizer)
        if how == "average":
            current.average(optimizer)
    seen = spy.messages[1]["profile"].get("has_epochs", True)  # left out if it is
    assert seen is (how in ("loader", "average"))


@pytest.mark.parametrize("used", [True, False])
def test_the_profile_says_whether_the_script_needs_its_launcher(
    start: Start, spy: Spy, used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher_use, "_files_of_script", lambda: [])
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", ModuleType("mpi4py.MPI") if used else None)
    run, optimizer = start(profile=True, warmup_steps=4), make_optimizer("a")
    run.optimizer_created(optimizer, frozenset())
    for _ in range(4):
        optimizer.param_groups[0]["params"][0].sum().backward()
        run.optimizer_stepped(optimizer)
    assert spy.messages[1]["profile"].get("needs_launcher", False) is used


def test_steps_with_an_epoch_an_evaluation_or_a_checkpoint_are_said_to_be_untypical(
    start: Start, spy: Spy
) -> None:
    run, optimizer = start(warmup_steps=2, measured_steps=10), make_optimizer("a")
    run.optimizer_created(optimizer, frozenset())
    step = 0
    with pytest.raises(Left):
        for _ in range(3):
            for _ in DataLoader(TensorDataset(torch.ones(4, 1))):
                if step == 5:
                    run.unlike_others()  # as where the script calls eval()
                if step == 10:
                    optimizer.state_dict()
                step += 1
                run.optimizer_stepped(optimizer)
    assert spy.types == ["hello", "steps", "end"]
    assert spy.messages[1]["untypical"] == [0, 4, 5, 8, 10]


def test_votes_are_on_typical_steps(start: Start, spy: Spy) -> None:
    run, optimizer = start(warmup_steps=3, measured_steps=25, prune_above_s=1.0), Stepping()
    run._begun = True
    with pytest.raises(Left):
        for step in range(100):
            if step in (1, 4, 12):
                run.unlike_others()
            run.optimizer_stepped(optimizer)
    assert spy.votes == [7, 14, 22]


def test_votes_are_on_all_steps_where_most_are_unlike_the_others(start: Start, spy: Spy) -> None:
    """Such as with a loader for each step."""
    run, optimizer = start(warmup_steps=3, measured_steps=25, prune_above_s=1.0), Stepping()
    run._begun = True
    with pytest.raises(Left):
        for _ in range(100):
            run.unlike_others()
            run.optimizer_stepped(optimizer)
    assert spy.votes == [8, 16, 24]


def test_an_average_at_an_evaluation_counts_and_the_evaluation_does_not(
    start: Start, spy: Spy
) -> None:
    """In the middle of a round it is part of the strategy."""
    run, optimizer = start(warmup_steps=1, measured_steps=9), Stepping()
    run._begun = True
    with pytest.raises(Left):
        for step in range(20):
            if step in (2, 3, 6):
                run.averaged_between_steps(1000.0)
            if step in (2, 3):
                run.unlike_others()
            run.optimizer_stepped(optimizer)
    steps = spy.messages[0]
    assert steps["untypical"] == [2, 3]
    # That before an ordinary step is in its duration already.
    assert [round(each_s, -3) for each_s in steps["step_s"]] == [0, 0, 0, 0, 2000, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("alike", [True, False])
def test_factors_are_profiled_where_ranks_multiply_alike(
    start: Start, spy: Spy, alike: bool
) -> None:
    spy.alike = alike
    run, optimizer = start(profile=True), make_optimizer("a")
    run.optimizer_created(optimizer, frozenset())
    (weight,) = optimizer.param_groups[0]["params"]
    for _ in range(4):
        torch.nn.functional.linear(torch.ones(3, 1), weight).sum().backward()
        run.optimizer_stepped(optimizer)
    (parameter,) = spy.messages[1]["profile"]["parameters"]
    assert parameter.get("factor_bytes", 0) == (4 * 3 * (1 + 2) if alike else 0)


def test_knobs_are_owned_that_all_optimizers_own(start: Start, spy: Spy) -> None:
    run, optimizer = start(profile=True), make_optimizer("a")
    run.optimizer_created(optimizer, frozenset({"rest_codec", "buckets"}))
    run.optimizer_created(make_optimizer("b"), frozenset({"buckets"}))
    for _ in range(4):
        run.optimizer_stepped(optimizer)
    assert spy.messages[1]["owned"] == ["buckets"]


def test_catches_up_after_join(start: Start, spy: Spy) -> None:
    run = start(profile=True, warmup_steps=4, measured_steps=20, prune_above_s=1.0)
    for _ in range(2):
        run.mark()
    spy.most_steps = 13
    run.all_joined()
    assert spy.types == ["hello", "profile"]
    assert spy.votes == []  # at step 12, without us
    with pytest.raises(Left):
        for _ in range(100):
            run.mark()
    assert spy.votes == [5]
    assert len(spy.messages[-2]["step_s"]) == 2 + 11


def test_end_of_the_script(start: Start, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start()
    for _ in range(3):
        run.mark()
    run._script_ended()
    assert spy.types == ["hello"]  # a forked child says nothing
    monkeypatch.setattr(current, "run", run)
    run._script_ended()
    assert spy.types == ["hello", "steps", "end"]
    assert len(spy.messages[1]["step_s"]) == 3
    assert spy.messages[2]["cause"] == "script"
