"""Live tuning on ranks that are threads: they meet, switch and report together."""

from __future__ import annotations

import json
import math
import random
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
from horovod.common.exceptions import HorovodInternalError
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.hooks import RemovableHandle

from hvd_autosync.errors import SpaceError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.agreement import agree_steps, on_all
from hvd_autosync.runtime.collectives.operations import join, rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.collectives.reinitialize import NotNowError
from hvd_autosync.runtime.guard.fallback import fall_back_to_exact
from hvd_autosync.runtime.live import helper_line, live_trial, live_tuning
from hvd_autosync.runtime.live.attach import switchable
from hvd_autosync.runtime.live.boundary import Agreement
from hvd_autosync.runtime.live.helper import LOST, Message
from hvd_autosync.runtime.live.live_tuning import LiveTuning
from hvd_autosync.runtime.measure.drift import DriftWatch
from hvd_autosync.runtime.patches.exits import watch_failed_operations
from hvd_autosync.runtime.sync.synchronizer import Synchronizer
from hvd_autosync.runtime.trial import probe
from hvd_autosync.search_space import Link, Strategy, TrialResult, TrialSpec, TrialStatus
from hvd_autosync.search_space.sync_plan import SyncPlan
from hvd_autosync.search_space.trial import MIN_MEASURED_STEPS, OUT_OF_TIME
from hvd_autosync.util.variables import RESUMED_NOTE, STOPPED_VARIABLE, TUNING_ENDED_NOTE

FAST, ODD, BEST, PORTLESS, BEGUN = (Strategy({"buckets": n}) for n in (3, 5, 7, 9, 11))


class Optimizer:
    """What live tuning sees of a strategy optimizer."""

    backward_passes_per_step = 1
    process_set: Any
    part: Optimizer
    itself: Optimizer

    def __init__(self) -> None:
        self._sync = Synchronizer(SyncPlan())
        self._allreduce_delay = {"weight": 1}
        self.param_groups: list[dict[str, Any]] = []
        self.hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., None]] = OrderedDict()
        self.state: dict[Any, Any] = {}

    def register_state_dict_pre_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def register_load_state_dict_pre_hook(
        self, hook: Callable[..., None], prepend: bool
    ) -> RemovableHandle:
        handle = RemovableHandle(self.load_hooks)
        self.load_hooks[handle.id] = hook
        return handle

    def state_dict(self) -> None:
        for hook in self.hooks.values():
            hook(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for hook in self.load_hooks.values():
            hook(self, state)


class Helper:
    """Answers each message of rank 0 with the next of a list."""

    def __init__(self, *answers: Message | None) -> None:
        self._answers = list(answers)
        self.sent: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> None:
        self.sent.append(json.loads(json.dumps(message)))

    def next(self) -> Message | None:
        return self._answers.pop(0) if self._answers else None

    def close(self) -> None:
        self.closed = True

    def results(self) -> list[TrialResult]:
        return [TrialResult.from_json(m["result"]) for m in self.sent if m["type"] == "result"]


def named(strategy: Strategy) -> dict[str, Any]:
    return {"strategy": dict(strategy), "classes": {}}


def trial(strategy: Strategy, measured: int = 8, left_s: float = math.inf) -> Message:
    spec = TrialSpec("one", strategy, warmup_steps=3, measured_steps=measured)
    best = {"best": named(Strategy()), "left_s": left_s}
    return {"type": "trial", "spec": json.loads(spec.to_json()), **best}


class Attached:
    """The strategies that each rank has attached, with the number of its step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_rank: dict[int, list[tuple[int, Strategy]]] = {}
        self.tunings: dict[int, LiveTuning] = {}
        #: Numbers of the optimizers that were attached.
        self.counts: list[int] = []
        monkeypatch.setattr(live_tuning, "Attacher", lambda: self)
        #: Strategies that cannot be attached any more, and the step before which none can now.
        self.gone: set[Strategy] = set()
        self.not_before = 0

    def abilities(self) -> dict[str, bool]:
        return {"reinitializes": True, "adds_levels": True}

    def attach(self, optimizers: Any, strategy: Strategy, classes: Any) -> None:
        if strategy == ODD or strategy in self.gone:
            raise SpaceError("it does not fit")
        if strategy == PORTLESS:
            on_all(lambda: 1 // (1 - rank()), "ports", "ranks cannot serve", "Open a port.")
        steps = self.tunings[rank()]._steps
        if steps < self.not_before:
            raise NotNowError("not now: 1 operation is under way on rank 1", hint="Wait.")
        self.counts.append(len(optimizers))
        self.by_rank.setdefault(rank(), []).append((steps, strategy))


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Attached:
    return Attached(monkeypatch)


def train(
    attached: Attached,
    helper: Helper,
    steps: Callable[[int], list[int]],
    *,
    ranks: int = 2,
    seed: int = 0,
    before_step: Callable[[LiveTuning, Optimizer, int], None] = lambda *_: None,
) -> None:
    """Train epochs of ``steps(rank)`` steps each; ranks with fewer wait in ``join()``."""

    def body() -> None:
        tuning = LiveTuning(helper if rank() == 0 else None)  # type: ignore[arg-type]
        attached.tunings[rank()] = tuning
        optimizer = Optimizer()
        tuning.optimizer_created(optimizer, frozenset())
        number = 0
        for count in steps(rank()):
            for _ in range(count):
                number += 1
                before_step(tuning, optimizer, number)
                tuning.optimizer_stepped(optimizer)
            join()

    ThreadRanks(ranks, seed=seed).run(body)


def test_a_trial_and_the_training_under_its_winner(attached: Attached) -> None:
    helper = Helper(trial(FAST), {"type": "train", "expected_step_s": 0.0, **named(Strategy())})
    train(attached, helper, lambda _: [300])
    (result,) = helper.results()
    assert result.status is TrialStatus.COMPLETED
    assert [len(each.step_s) for each in result.ranks] == [11, 11]
    assert [each.rank for each in result.ranks] == [0, 1]
    assert result.steps_before == 1, "the one after which it could begin"
    assert [strategy for _, strategy in attached.by_rank[0]] == [FAST, Strategy()]
    assert attached.by_rank[0] == attached.by_rank[1]
    kinds = [m["type"] for m in helper.sent if m["type"] != "step"]
    assert kinds == ["begin", "begun", "result", "switched"]


def test_a_strategy_that_does_not_fit_is_the_result(attached: Attached) -> None:
    helper = Helper(trial(ODD), trial(FAST))
    train(attached, helper, lambda _: [200])
    first, second = helper.results()
    assert (first.status, first.reason) == (TrialStatus.CRASHED, "it does not fit")
    assert second.status is TrialStatus.COMPLETED


def test_the_cost_is_that_of_typical_steps_and_of_what_is_done_between_steps(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations take their time without tuning, too; the links after drift are its cost."""
    now, asked = [0.0], []

    def takes(seconds: float) -> None:
        now[0] += seconds if rank() == 0 else 0.0

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        takes(0.1)
        if number % 10 == 0:
            tuning.unlike_others()
            takes(60.0)

    def probe_links(hosts: object, device: object) -> None:
        takes(5.0)
        asked.append((attached.tunings[rank()]._steps, current.watch))

    attach = attached.attach
    monkeypatch.setattr(attached, "attach", lambda *args: (takes(1.0), attach(*args)))
    monkeypatch.setattr(live_tuning, "probe_in_place", probe_links)
    for module in (live_trial, live_tuning):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    monkeypatch.setattr(current, "watch", None)
    end = {"type": "train", "expected_step_s": 0.1, **named(Strategy())}
    helper = Helper(trial(FAST), end, {"type": "probe", "hosts": []}, trial(FAST), end)
    train(attached, helper, lambda _: [400], before_step=before)
    first, second = (m for m in helper.sent if m["type"] == "switched")
    assert first["steps"] > 8 and second["steps"] > 8
    assert first["spent_s"] == pytest.approx(0.1 * first["steps"] + 2 * 1.0)
    assert second["spent_s"] == pytest.approx(0.1 * second["steps"] + 5.0 + 2 * 1.0)
    for step, watch in asked:
        assert watch is None, "steps are not compared while the links are measured"
        begun = next(at for at, s in attached.by_rank[0] if at > step and s == FAST)
        assert begun - step <= 16


@pytest.mark.parametrize("step_s", [0.03, 0.4])
def test_a_trial_ends_with_the_time_of_the_tuning(
    attached: Attached, monkeypatch: pytest.MonkeyPatch, step_s: float
) -> None:
    """On all ranks after the same step, also if those are long, and the default goes on."""
    now, made = [0.0], []

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        if rank() == 0:
            now[0] += step_s
            if tuning._trial is not None:
                made.append(tuning._trial.steps)

    for module in (live_trial, live_tuning):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    use = {"type": "use", **named(Strategy())}
    helper = Helper(trial(FAST, measured=500, left_s=10 * step_s), use)
    train(attached, helper, lambda _: [200], before_step=before)
    (result,) = helper.results()
    assert result.status is TrialStatus.CUT_SHORT
    assert result.reason == OUT_OF_TIME
    assert len({len(each.step_s) for each in result.ranks}) == 1
    assert 10 <= made[-1] <= (11 if step_s > 0.25 else 20)
    assert attached.by_rank[0] == attached.by_rank[1]
    assert attached.by_rank[0][-1][1] == Strategy()


def test_the_profile_is_completed_though_the_time_is_up(attached: Attached) -> None:
    message = trial(Strategy(), measured=500, left_s=0.0)
    message["spec"] |= {"profile": True, "warmup_steps": 10}
    helper = Helper(message)
    train(attached, helper, lambda _: [100])
    (result,) = helper.results()
    assert result.status is TrialStatus.CUT_SHORT
    assert [len(each.step_s) for each in result.ranks] == [10, 10]
    assert attached.tunings[0].profiling.profiler is None


@pytest.mark.parametrize("lengths", [([8, 60], [12, 60]), ([12, 60], [7, 60])])
def test_the_model_is_profiled_where_ranks_have_no_step_in_which_that_begins_or_ends(
    attached: Attached, lengths: tuple[list[int], list[int]]
) -> None:
    """As an epoch ends in the warm-up, after fewer steps on some rank."""
    message = trial(Strategy(), measured=20)
    message["spec"] |= {"profile": True, "warmup_steps": 10}
    helper = Helper(message)
    train(attached, helper, lambda rank: lengths[rank])
    (result,) = helper.results()
    assert result.profile is not None
    assert attached.tunings[0].profiling.profiler is None
    for report in result.ranks:
        assert all(seconds > 0 for seconds in report.step_s), "all steps were made by all ranks"


def test_profiling_ends_with_its_trial(attached: Attached) -> None:
    """Though ranks always lack the step in which it would: its hooks must not stay."""
    message = trial(Strategy(), measured=20)
    message["spec"] |= {"profile": True, "warmup_steps": 10}
    helper = Helper(message)
    begun: list[int] = []

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        if tuning.profiling.profiler is not None:
            begun.append(number)

    train(attached, helper, lambda rank: [8 + 4 * rank] * 8 + [60], before_step=before)
    (result,) = helper.results()
    assert begun and result.profile is None
    assert attached.tunings[0].profiling.profiler is None


def test_profiling_ends_with_the_tuning(attached: Attached) -> None:
    """Also where the loss guard ends it in that trial."""
    message = trial(Strategy(), measured=20)
    message["spec"] |= {"profile": True, "warmup_steps": 10}
    begun: list[int] = []

    def fall_back(tuning: LiveTuning, _: Optimizer, number: int) -> None:
        if tuning._trial is not None and tuning._trial.steps == 7:
            begun.append(tuning.profiling.profiler is not None)
            tuning.lossy_ended()

    train(attached, Helper(message), lambda _: [60], before_step=fall_back)
    assert any(begun) and not all(begun), "on rank 0"
    assert attached.tunings[0].profiling.profiler is None
    assert attached.tunings[0]._trial is None


def test_a_wait_in_join_is_no_cost_of_the_tuning(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training waits there without it, too, where no loader begins an epoch after it."""
    now = [0.0]

    def takes(seconds: float) -> None:
        now[0] += seconds if rank() == 0 else 0.0

    def agree(steps: int, name: str) -> int:
        takes(30.0)
        return agree_steps(steps, name)

    monkeypatch.setattr(live_tuning, "agree_steps", agree)
    for module in (live_trial, live_tuning):
        monkeypatch.setattr(module, "perf_counter", lambda: now[0])
    end = {"type": "train", "expected_step_s": 0.0, **named(Strategy())}
    helper = Helper(trial(FAST, measured=40), end)
    train(attached, helper, lambda _: [8] * 20, before_step=lambda *_: takes(0.1))
    (switched,) = (each for each in helper.sent if each["type"] == "switched")
    assert switched["steps"] > 40
    assert switched["spent_s"] == pytest.approx(0.1 * switched["steps"])


def test_a_strategy_for_which_some_rank_has_no_port_is_the_result(attached: Attached) -> None:
    """And leaves no error in the script's own step."""
    helper = Helper(trial(PORTLESS), trial(FAST))
    train(attached, helper, lambda _: [200])
    first, second = helper.results()
    assert (first.status, second.status) == (TrialStatus.CRASHED, TrialStatus.COMPLETED)
    assert "ranks cannot serve; rank 1: ZeroDivisionError" in first.reason


def test_unlike_steps_are_not_measured(attached: Attached) -> None:
    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        if number % 5 == 0:
            optimizer.state_dict()

    helper = Helper(trial(FAST))
    train(attached, helper, lambda _: [60], before_step=before)
    (result,) = helper.results()
    assert {len(each.step_s) for each in result.ranks} in ({9}, {10}), "one or two were unlike"


@pytest.mark.parametrize(
    ("answers", "hooks"),
    [
        ((trial(FAST),), {1}),  # it goes on
        ((trial(FAST), LOST), {0}),
        # Steps with a checkpoint are not compared with others: the drift is still watched.
        (({"type": "train", "expected_step_s": 9.0, **named(FAST)},), {1}),
        (({"type": "train", "expected_step_s": 9.0, **named(FAST)}, LOST), {1}),
    ],
)
def test_no_hook_stays_in_an_optimizer_once_nothing_is_measured(
    answers: tuple[Message, ...],
    hooks: set[int],
    attached: Attached,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(current, "watch", None)
    kept: list[Optimizer] = []

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        if number == 100:
            kept.extend([optimizer, Optimizer()])
            tuning.optimizer_created(kept[-1], frozenset())  # late, with hooks as the other

    train(attached, Helper(*answers), lambda _: [200], before_step=before)
    assert len(kept) == 4 and {len(each.hooks) for each in kept} == hooks


def test_begun_gradients_are_waited_for(attached: Attached) -> None:
    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        optimizer._allreduce_delay["weight"] = int(rank() != 1 or number >= 70)

    helper = Helper(trial(FAST))
    train(attached, helper, lambda _: [200], before_step=before)
    ((step, _),) = attached.by_rank[0]
    assert step >= 70
    assert attached.by_rank[0] == attached.by_rank[1]


@pytest.mark.parametrize("every", [1, 4])
def test_two_optimizers_that_step_after_one_backward_pass_are_tuned(
    attached: Attached, every: int
) -> None:
    """At the step of the first, gradients of the second one's step are there.

    The second one steps after so many of the first one's.
    """
    helper = Helper(trial(FAST))

    def body() -> None:
        tuning = LiveTuning(helper if rank() == 0 else None)  # type: ignore[arg-type]
        attached.tunings[rank()] = tuning
        first, second = Optimizer(), Optimizer()
        for each in (first, second):
            tuning.optimizer_created(each, frozenset())
        for number in range(1, 200 * every + 1):
            for each in (first, second):
                each._allreduce_delay["weight"] = 0
            for each in (first, second) if number % every == 0 else (first,):
                each._allreduce_delay["weight"] = 1
                tuning.optimizer_stepped(each)

    ThreadRanks(2, seed=0).run(body)
    (result,) = helper.results()
    assert result.status is TrialStatus.COMPLETED
    assert attached.counts[0] == 2 and attached.by_rank[0] == attached.by_rank[1]


def test_an_accumulating_second_optimizer_does_not_become_the_one_that_counts(
    attached: Attached,
) -> None:
    """Its gradients are there at some boundaries of a trial, whose steps are the default's."""

    def body() -> list[int]:
        tuning = LiveTuning(helper if rank() == 0 else None)  # type: ignore[arg-type]
        attached.tunings[rank()] = tuning
        first, second = Optimizer(), Optimizer()
        second.backward_passes_per_step = second._allreduce_delay["weight"] = 4
        for each in (first, second):
            tuning.optimizer_created(each, frozenset())
        steps = []
        for number in range(1, 401):
            tuning.optimizer_stepped(first)
            second._allreduce_delay["weight"] -= 1
            if number % 4 == 0:
                second._allreduce_delay["weight"] = 4
                tuning.optimizer_stepped(second)
            steps.append(tuning._steps)
        return steps

    helper = Helper(trial(FAST), trial(BEST))
    for steps in ThreadRanks(2, seed=0).run(body):
        assert steps == [*range(1, 401)]
    assert helper.results()


def test_where_gradients_are_always_begun_tuning_ends(
    attached: Attached, capsys: pytest.CaptureFixture[str]
) -> None:
    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        optimizer._allreduce_delay["weight"] = int(rank() != 1)

    helper = Helper(trial(FAST))
    train(attached, helper, lambda _: [4000], before_step=before)
    assert not attached.by_rank
    assert [m["type"] for m in helper.sent] == ["refused"]
    assert helper.closed
    assert "before the end" in capsys.readouterr().err


def test_where_steps_are_made_in_several_threads_tuning_ends_with_that_reason(
    attached: Attached, capsys: pytest.CaptureFixture[str]
) -> None:
    """On all ranks, though one rank does so, which is not the one that says why."""

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        tuning._thread = rank()  # which is no thread's number on rank 1, and unknown yet on rank 0

    helper = Helper(trial(FAST))
    train(attached, helper, lambda _: [4000], before_step=before)
    assert not attached.by_rank
    (refused,) = helper.sent
    assert refused["type"] == "refused" and "in more than one thread" in refused["reason"]
    said = capsys.readouterr().err
    assert "in more than one thread" in said and "before the end" not in said


def test_where_gradients_are_begun_from_a_trial_on_tuning_ends_under_the_best(
    attached: Attached, capsys: pytest.CaptureFixture[str]
) -> None:
    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        optimizer._allreduce_delay["weight"] = int(rank() != 1 or not 20 <= number < 3000)

    helper = Helper(trial(FAST, measured=100))
    train(attached, helper, lambda _: [4000], before_step=before)
    assert [strategy for _, strategy in attached.by_rank[1]] == [FAST, Strategy()]
    assert helper.sent[-1]["type"] == "refused" and helper.closed
    said = capsys.readouterr().err
    assert said.count("the strategy of the last trial stays until it can be switched:") == 1
    assert "before the end" in said


def test_a_lost_helper_leaves_the_best_strategy(
    attached: Attached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STOPPED_VARIABLE, str(tmp_path / "stopped"))
    best = {**trial(ODD), "best": named(FAST)}
    train(attached, Helper(best, LOST), lambda _: [200])
    assert [strategy for _, strategy in attached.by_rank[1]] == [FAST]
    noted = (tmp_path / TUNING_ENDED_NOTE).read_text()
    assert noted.startswith("live tuning has ended: the process that tunes has ended"), noted


def test_a_helper_that_is_lost_after_a_faster_trial_leaves_its_strategy(attached: Attached) -> None:
    """Which is the best known, though no trial has followed."""
    train(attached, Helper(trial(FAST), {"type": "use", **named(FAST)}, LOST), lambda _: [200])
    assert [strategy for _, strategy in attached.by_rank[1]] == [FAST]


def test_a_helper_that_is_stopped_leaves_no_trial_on(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end, but says nothing after a result: the best that it has named goes on."""
    monkeypatch.setattr(helper_line, "_ANSWERS_S", 0.0)
    helper = Helper(trial(FAST))
    train(attached, helper, lambda _: [200])
    for rank_ in (0, 1):
        assert [strategy for _, strategy in attached.by_rank[rank_]] == [FAST, Strategy()]
    assert [m["type"] for m in helper.sent if m["type"] != "step"] == ["begin", "begun", "result"]


@pytest.mark.parametrize(
    "message", [{"type": "use"}, {"type": "train", "expected_step_s": 0.1}, LOST]
)
def test_where_the_best_cannot_be_attached_the_default_is(
    attached: Attached, message: Message, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the tuning ends with a word, instead of under the last trial's strategy."""
    attached.gone = {BEST}
    last = message if message == LOST else {**message, **named(BEST)}
    helper = Helper({**trial(FAST), "best": named(BEST)}, last, trial(FAST))
    train(attached, helper, lambda _: [300])
    assert [strategy for _, strategy in attached.by_rank[1]] == [FAST, Strategy()]
    assert [m["type"] for m in helper.sent if m["type"] != "step"] == [
        *("begin", "begun", "result", "refused")
    ]
    (line,) = capsys.readouterr().err.splitlines()
    assert "the best strategy cannot be attached: it does not fit" in line


def test_an_error_of_the_helper_leaves_the_best_strategy(
    attached: Attached, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the one on trial."""
    stop = {"type": "stop", "reason": "the store is full"}
    train(attached, Helper({**trial(FAST), "best": named(BEST)}, stop), lambda _: [200])
    assert [strategy for _, strategy in attached.by_rank[1]] == [FAST, BEST]
    assert "the store is full; the best strategy" in capsys.readouterr().err


def test_a_helper_that_is_lost_after_the_study_leaves_the_winner(attached: Attached) -> None:
    winner = {"type": "train", "expected_step_s": 0.0, **named(FAST)}
    helper = Helper({**trial(FAST), "best": named(BEST)}, winner, LOST)
    train(attached, helper, lambda _: [400])
    assert [strategy for _, strategy in attached.by_rank[0]] == [FAST]


def test_where_the_loss_guard_ends_the_codec_tuning_ends_under_the_best(
    attached: Attached, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a trial, on all ranks in the same step."""

    def fall_back(tuning: LiveTuning, _: Optimizer, number: int) -> None:
        if number == 20:
            assert tuning._trial is not None
            tuning.lossy_ended()

    tried = trial(FAST, measured=100) | {"best": named(BEST)}
    helper = Helper(tried, trial(ODD))
    train(attached, helper, lambda _: [200], before_step=fall_back)
    assert [strategy for _, strategy in attached.by_rank[0]] == [FAST, BEST]
    assert attached.by_rank[0] == attached.by_rank[1]
    assert not helper.results() and helper.closed
    (line,) = (each for each in capsys.readouterr().err.splitlines() if "live tuning" in each)
    assert line.endswith("the loss guard has ended its lossy strategy"), "only what is exact stays"


@pytest.mark.parametrize(
    ("goes_on", "fell_back", "watched"),
    [(None, False, True), (BEGUN, False, True), (FAST, False, False), (None, True, False)],
)
def test_a_training_whose_tuning_has_no_result_is_watched_as_it_began(
    attached: Attached,
    monkeypatch: pytest.MonkeyPatch,
    goes_on: Strategy | None,
    fell_back: bool,
    watched: bool,
) -> None:
    """Not under another strategy, nor once the loss guard has ended its codec."""
    monkeypatch.setattr(current, "strategy", BEGUN)
    monkeypatch.setattr(current, "watch", None)
    monkeypatch.setattr(Synchronizer, "make_exact", lambda *_, **__: None)
    known = DriftWatch(0.1, "")
    seen: list[object] = []

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        monkeypatch.setattr(current, "live", tuning)
        if number == 1:
            tuning.watch = known
        if number == 5 and fell_back:
            fall_back_to_exact(optimizer)
        seen.append(current.watch)

    use = [] if goes_on is None else [{"type": "use", **named(goes_on)}]
    stop = {"type": "stop", "reason": "the store is full"}
    train(attached, Helper(trial(FAST), *use, stop), lambda _: [300], before_step=before)
    assert seen[0] is None and (seen[-1] is known) is watched


def test_the_steps_that_are_watched_for_drift_are_those_of_the_trials(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of another optimizer, which may be the first to step after the study."""
    monkeypatch.setattr(current, "watch", None)
    second = Optimizer()

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        for _ in range(5 * (number > 1)):
            watch = current.watch
            tuning.optimizer_stepped(second)
            if watch is not None:
                watch.optimizer_stepped(second)

    helper = Helper(trial(FAST), {"type": "train", "expected_step_s": 0.1, **named(FAST)})
    train(attached, helper, lambda _: [300], before_step=before)
    (switched,) = (each for each in helper.sent if each["type"] == "switched")
    assert current.watch is not None
    assert len(current.watch._step_s) == 300 - switched["step"]


def test_a_training_that_cannot_be_tuned_is_watched_as_it_began(
    attached: Attached, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = DriftWatch(0.1, "")
    monkeypatch.setattr(current, "watch", known)
    seen: list[object] = []
    train(
        attached,
        Helper(),
        lambda _: [2],
        ranks=1,
        before_step=lambda *_: seen.append(current.watch),
    )
    assert seen == [None, known]


def test_ranks_that_left_out_other_steps_end_a_trial_together(attached: Attached) -> None:
    """One of them has too few typical ones; all go on then."""

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        if rank() == 0 and tuning._trial is not None and tuning._trial.steps == 5:
            tuning.unlike_others()

    helper = Helper(trial(FAST, measured=MIN_MEASURED_STEPS), trial(FAST))
    train(attached, helper, lambda _: [200], before_step=before)
    assert [result.status for result in helper.results()] == [TrialStatus.COMPLETED] * 2


def test_where_operations_are_always_under_way_tuning_ends(
    attached: Attached, capsys: pytest.CaptureFixture[str]
) -> None:
    attached.not_before = 10**9
    helper = Helper(trial(FAST))
    train(attached, helper, lambda _: [4000])
    assert not attached.by_rank
    assert {m["type"] for m in helper.sent} == {"begin", "begun", "postponed", "refused"}
    assert "after each step not now: 1 operation is" in capsys.readouterr().err


def test_operations_that_end_are_waited_for(attached: Attached) -> None:
    attached.not_before = 70
    helper = Helper(trial(FAST))
    train(attached, helper, lambda _: [200])
    ((step, _),) = attached.by_rank[0]
    assert step >= 70
    assert [result.status for result in helper.results()] == [TrialStatus.COMPLETED]
    kinds = [m["type"] for m in helper.sent if m["type"] != "step"]
    assert kinds.count("begun") == kinds.count("postponed") + 1 > 1
    assert kinds[-3:] == ["postponed", "begun", "result"]


class Left(Exception):
    """Instead of the end of the process."""


def refuse(attached: Attached, helper: Helper, path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Train on two ranks with a reason to hand over; return how many left."""

    def leave() -> NoReturn:
        raise Left

    left: list[int] = []

    def body() -> None:
        tuning = LiveTuning(helper if rank() == 0 else None, str(path))  # type: ignore[arg-type]
        attached.tunings[rank()] = tuning
        optimizer = Optimizer()
        tuning.optimizer_created(optimizer, frozenset())
        optimizer._allreduce_delay["weight"] = int(rank() != 1)
        try:
            for _ in range(400):
                tuning.optimizer_stepped(optimizer)
        except Left:
            left.append(tuning._steps)

    monkeypatch.setattr(live_tuning, "leave", leave)
    ThreadRanks(2, seed=0).run(body)
    assert len(set(left)) <= 1, "after the same step"
    return len(left)


def test_where_launched_trials_follow_the_training_ends_with_its_reason(
    attached: Attached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = Helper(trial(FAST))
    assert refuse(attached, helper, tmp_path / "refusal", monkeypatch) == 2
    assert "before the end" in (tmp_path / "refusal").read_text()
    assert helper.closed
    assert attached.tunings[0]._steps < 50


def test_a_reason_that_cannot_be_written_ends_no_training(
    attached: Attached,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    helper = Helper(trial(FAST))
    assert refuse(attached, helper, tmp_path / "nowhere" / "refusal", monkeypatch) == 0
    assert helper.closed
    assert "this training is not tuned" in capsys.readouterr().err


def test_one_rank_alone_is_refused(attached: Attached) -> None:
    helper = Helper(trial(FAST))
    train(attached, helper, lambda _: [50], ranks=1)
    assert "single rank" in helper.sent[0]["reason"]


def test_a_strategy_that_the_script_has_chosen_is_a_reason_for_launched_trials(
    attached: Attached, capsys: pytest.CaptureFixture[str]
) -> None:
    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        optimizer._sync.chosen = True

    helper = Helper()
    train(attached, helper, lambda _: [50], before_step=before)
    assert [m["type"] for m in helper.sent] == ["refused"]
    (line,) = capsys.readouterr().err.splitlines()
    assert "strategy=" in line and "--autosync-mode launched" in line


def test_a_strategy_that_the_script_chooses_later_stays(attached: Attached) -> None:
    """Though trials go on with the other optimizers."""
    later: dict[int, Optimizer] = {}

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        if number == 20:
            later[rank()] = Optimizer()
            later[rank()]._sync.chosen = True
            tuning.optimizer_created(later[rank()], frozenset())

    helper = Helper(trial(FAST), trial(BEST))
    train(attached, helper, lambda _: [100], before_step=before)
    assert len(helper.results()) == 2
    assert attached.counts and set(attached.counts) == {1}


def stay_together(lengths: list[list[int]], seed: int) -> list[TrialResult]:
    """Train epochs in each of which a rank has a length of its own; the results of three trials."""
    helper = Helper(trial(FAST), trial(Strategy(), 20), trial(FAST))
    with pytest.MonkeyPatch.context() as monkeypatch:
        attached = Attached(monkeypatch)
        ranks = len(lengths[0])
        train(attached, helper, lambda r: [epoch[r] for epoch in lengths], ranks=ranks, seed=seed)
        assert len({json.dumps(each) for each in map(repr, attached.by_rank.values())}) <= 1
        assert len({tuning._steps for tuning in attached.tunings.values()}) == 1
    for result in helper.results():
        assert len({len(each.step_s) for each in result.ranks}) == 1
        assert all(seconds >= 0 for each in result.ranks for seconds in each.step_s)
    return helper.results()


@given(seed=st.integers(0, 10**6), ranks=st.integers(2, 4), epochs=st.integers(1, 12))
def test_ranks_with_less_data_stay_together(seed: int, ranks: int, epochs: int) -> None:
    draws = random.Random(seed)
    stay_together([[draws.randint(1, 60) for _ in range(ranks)] for _ in range(epochs)], seed)


def test_ranks_with_less_data_end_all_trials() -> None:
    assert len(stay_together([[60, 40, 50]] * 6, 0)) == 3


def test_a_long_wait_in_join_does_not_end_tuning(attached: Attached) -> None:
    helper = Helper(trial(FAST))
    train(attached, helper, lambda r: [50 if r else 50 + 20 * 200, 100])
    (result,) = helper.results()
    assert result.status is TrialStatus.COMPLETED
    assert not any(tuning._ended for tuning in attached.tunings.values())


def test_ranks_collect_dropped_optimizers_at_different_times(attached: Attached) -> None:
    helper = Helper(trial(FAST), trial(Strategy(), 20), trial(FAST))
    kept: list[Optimizer] = []

    def body() -> None:
        tuning = LiveTuning(helper if rank() == 0 else None)  # type: ignore[arg-type]
        attached.tunings[rank()] = tuning
        for _ in range(4):
            optimizer = Optimizer()
            if rank() == 1:
                kept.append(optimizer)
            tuning.optimizer_created(optimizer, frozenset())
            for _ in range(70):
                tuning.optimizer_stepped(optimizer)

    ThreadRanks(2, seed=0).run(body)
    assert len(helper.results()) == 3
    assert attached.by_rank[0] == attached.by_rank[1]
    assert {*attached.counts} == {1}, "only the one that all ranks have"


@pytest.mark.parametrize("width", [3, 4])
def test_a_study_of_one_model_ends_where_another_is_trained(
    attached: Attached, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    """A model of the same shapes, as in cross-validation, is the same to a strategy."""
    helper = Helper(trial(FAST), {"type": "use", **named(FAST)}, *[None] * 20, trial(BEST, 100))

    def body() -> None:
        tuning = LiveTuning(helper if rank() == 0 else None)  # type: ignore[arg-type]
        attached.tunings[rank()] = tuning
        for number in (3, width):
            optimizer = Optimizer()
            optimizer.param_groups = [{"params": [torch.nn.Parameter(torch.zeros(number))]}]
            tuning.optimizer_created(optimizer, frozenset())
            for _ in range(70):
                tuning.optimizer_stepped(optimizer)

    ThreadRanks(2, seed=0).run(body)
    assert attached.by_rank[0] == attached.by_rank[1]
    ended = "the script trains another model now" in capsys.readouterr().err
    kinds = [m["type"] for m in helper.sent if m["type"] != "step"]
    if width == 3:
        assert not ended and "refused" not in kinds
    else:
        assert ended and kinds[-1] == "refused" and len(helper.results()) == 1


def test_ranks_with_less_data_end_with_the_others_where_another_model_is_trained(
    attached: Attached,
) -> None:
    """Rank 0 waits in ``join()`` when rank 1 sees that the first optimizer is used no more."""
    helper = Helper(trial(FAST), {"type": "use", **named(FAST)})

    def body() -> None:
        tuning = LiveTuning(helper if rank() == 0 else None)  # type: ignore[arg-type]
        attached.tunings[rank()] = tuning
        for number in (3, 4):
            optimizer = Optimizer()
            optimizer.param_groups = [{"params": [torch.nn.Parameter(torch.zeros(number))]}]
            tuning.optimizer_created(optimizer, frozenset())
            for _ in range(2 if number == 4 else 1):
                for _ in range(30 + 10 * rank()):
                    tuning.optimizer_stepped(optimizer)
                join()

    ThreadRanks(2, seed=0).run(body)
    assert all(each._ended for each in attached.tunings.values())
    assert helper.sent[-1]["type"] == "refused"


def test_another_model_after_the_study_is_no_drift(attached: Attached) -> None:
    train_message = {"type": "train", "expected_step_s": 1e-9, **named(FAST)}
    helper = Helper(trial(FAST), train_message)
    watches = []

    def body() -> None:
        tuning = LiveTuning(helper if rank() == 0 else None)  # type: ignore[arg-type]
        attached.tunings[rank()] = tuning
        for number in (3, 4):
            optimizer = Optimizer()
            optimizer.param_groups = [{"params": [torch.nn.Parameter(torch.zeros(number))]}]
            tuning.optimizer_created(optimizer, frozenset())
            for _ in range(200):
                tuning.optimizer_stepped(optimizer)
            watches.append(tuning._after_study._watch is not None)

    ThreadRanks(2, seed=0).run(body)
    assert sorted(watches) == [False, False, True, True]
    assert "switched" in [m["type"] for m in helper.sent]


def test_an_optimizer_of_frozen_parameters_is_left_alone() -> None:
    class Frozen(Optimizer):
        _sync = Synchronizer(SyncPlan())  # as of the class that is made for each optimizer

        def __init__(self) -> None:
            super().__init__()
            del self._sync

    other = Optimizer()
    assert switchable([Frozen(), other]) == [other]


def test_an_optimizer_that_is_created_later_follows_too(attached: Attached) -> None:
    helper = Helper(trial(FAST), {"type": "train", "expected_step_s": 0.0, **named(FAST)})
    later: list[Optimizer] = []

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        if number == 150:
            later.append(Optimizer())
            tuning.optimizer_created(later[-1], frozenset())

    train(attached, helper, lambda _: [300], before_step=before)
    assert [strategy for _, strategy in attached.by_rank[0]] == [FAST, FAST]
    assert sorted(attached.counts) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("before_step", "steps", "noted"), [(1, 9, True), (5, 9, False), (1, 0, False)]
)
def test_a_script_that_goes_on_from_a_checkpoint_leaves_a_note(
    attached: Attached,
    before_step: int,
    steps: int,
    noted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one that loads a state later, or that of an optimizer without a step."""
    monkeypatch.setenv(STOPPED_VARIABLE, str(tmp_path / "stopped"))

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        if number == before_step:
            optimizer.load_state_dict({"state": {0: {"step": steps}}})

    train(attached, Helper(trial(FAST)), lambda _: [100], before_step=before)
    assert (tmp_path / RESUMED_NOTE).exists() is noted


@pytest.mark.parametrize(
    ("in_trial", "not_before"), [(True, 0), (False, 0), (False, 60)], ids=["trial", "none", "later"]
)
def test_an_optimizer_that_cannot_follow_a_strategy_ends_its_trial_or_the_tuning(
    attached: Attached, in_trial: bool, not_before: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """No trial goes on in which optimizers follow two strategies.

    The default may have to wait for operations.
    """
    use = {"type": "use", **named(FAST)}
    helper = Helper(*([trial(FAST, measured=100)] if in_trial else [use]))

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        if number == 50:
            attached.gone, attached.not_before = {FAST}, not_before
            tuning.optimizer_created(Optimizer(), frozenset())

    train(attached, helper, lambda _: [200], before_step=before)
    said = capsys.readouterr().err
    if in_trial:
        (result,) = helper.results()
        assert (result.status, result.reason) == (TrialStatus.CRASHED, "it does not fit")
    else:
        assert attached.by_rank[1][-1][1] == Strategy()
        assert "live tuning has ended: the best strategy cannot be attached: it does not" in said


def test_the_step_before_which_an_optimizer_is_created_is_not_measured(attached: Attached) -> None:
    numbers: list[int] = []

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        running = tuning._trial
        if running is not None and running.steps == 5 and not running.recorder.untypical:
            tuning.optimizer_created(Optimizer(), frozenset())
            numbers.append(number)

    helper = Helper(trial(FAST))
    train(attached, helper, lambda _: [100], before_step=before)
    (result,) = helper.results()
    assert len({*numbers}) == 1
    assert [len(each.step_s) for each in result.ranks] == [10, 10]


def test_after_a_strategy_that_does_not_fit_the_best_is_attached_again(attached: Attached) -> None:
    use = {"type": "use", **named(Strategy())}
    train(attached, Helper(trial(ODD), use), lambda _: [200])
    assert [strategy for _, strategy in attached.by_rank[0]] == [Strategy()]


def test_steps_of_some_ranks_are_no_boundaries(attached: Attached) -> None:
    helper = Helper(trial(FAST))

    def before(tuning: LiveTuning, optimizer: Optimizer, number: int) -> None:
        if number == 1 and rank() == 1:
            optimizer.part = Optimizer()
            optimizer.part.process_set = "of rank 1"
            tuning.optimizer_created(optimizer.part, frozenset())
        if rank() == 1:
            for _ in range(3):
                tuning.optimizer_stepped(optimizer.part)

    train(attached, helper, lambda _: [100], before_step=before)
    assert len(helper.results()) == 1
    assert {tuning._steps for tuning in attached.tunings.values()} == {100}


def test_a_script_may_train_in_another_thread(attached: Attached) -> None:
    def body() -> None:
        tuning = LiveTuning(None)
        optimizer = Optimizer()
        thread = threading.Thread(target=tuning.optimizer_stepped, args=[optimizer])
        tuning._boundary_at = 2
        thread.start()
        thread.join()
        agreed = tuning._meet()
        found.append((tuning._thread == thread.ident, agreed.moved, agreed.possible))

    found: list[tuple[bool, bool, bool]] = []
    ThreadRanks(1, seed=0).run(body)
    assert found == [(True, True, False)], "in this thread strategies do not change"


def test_the_link_is_measured_where_the_gradients_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_device(device: object) -> None:
        raise AssertionError("the script has chosen its device, which may be the only one it sees")

    monkeypatch.setattr(probe, "_EACH_S", 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    links: list[Link | None] = []
    hosts = [("a", 1), ("b", 1)]
    ThreadRanks(2, seed=0).run(
        lambda: links.append(probe.probe_in_place(hosts, torch.device("cpu")))
    )
    assert [link and link.ranks for link in links] == [2, 2]


def test_no_link_of_a_part_of_the_ranks_is_measured_in_their_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Process sets would stay in it, and ranks would count different operations."""
    monkeypatch.setattr(probe, "_EACH_S", 0.0)
    parts = ([("a", 2), ("b", 2)], [("a", 2)], [("a", 1), ("b", 1)])
    ranks = ThreadRanks(4, seed=0, hosts=2)
    links = ranks.run(lambda: [probe.probe_in_place(each, torch.device("cpu")) for each in parts])
    for overall, within, across in links:
        assert overall is not None and overall.ranks == 4
        assert within is None and across is None
    assert "add_process_set" not in ranks.calls
    assert len({len(names) for names in ranks.names.values()}) == 1


@pytest.mark.parametrize(
    ("value", "sent"), [(None, ["end"]), (KeyboardInterrupt(), ["end"]), (ValueError(), [])]
)
def test_ctrl_c_is_no_failure_of_a_strategy(
    value: BaseException | None, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = Helper()

    def body() -> None:
        tuning = LiveTuning(helper)  # type: ignore[arg-type]
        monkeypatch.setattr(current, "live", tuning)
        tuning._script_ended()

    monkeypatch.setattr(sys, "last_value", value, raising=False)
    ThreadRanks(1, seed=0).run(body)
    assert [message["type"] for message in helper.sent] == sent


def fail_in_a_step() -> None:
    with pytest.raises(ValueError), current.noting_failure:
        raise ValueError


def fail_in_an_operation() -> None:
    """One of the script's own, outside of steps: another rank has ended."""
    with pytest.raises(HorovodInternalError, match="shut down"):
        raise HorovodInternalError(RuntimeError("Horovod has been shut down"))


@pytest.mark.parametrize("fail", [fail_in_a_step, fail_in_an_operation])
@pytest.mark.parametrize(("goes_on", "sent"), [(False, []), (True, ["end"])])
def test_a_script_may_catch_a_failure(
    goes_on: bool, sent: list[str], fail: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = Helper()
    watch_failed_operations()

    def body() -> None:
        tuning = LiveTuning(helper)  # type: ignore[arg-type]
        tuning._boundary_at = 2
        monkeypatch.setattr(current, "live", tuning)
        optimizer = Optimizer()
        tuning.optimizer_created(optimizer, frozenset())
        fail()
        if goes_on:
            tuning.optimizer_stepped(optimizer)
        tuning._script_ended()

    monkeypatch.setattr(sys, "last_value", None, raising=False)
    ThreadRanks(1, seed=0).run(body)
    assert [message["type"] for message in helper.sent] == sent


@pytest.mark.parametrize("dropped", [True, False])
def test_an_optimizer_that_is_made_again_after_a_reset_is_tuned_if_the_earlier_is_dropped(
    attached: Attached,
    dropped: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 was there before the reset, rank 1 is new."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    monkeypatch.setattr(Synchronizer, "check", lambda self: None)
    helper = Helper(None, trial(FAST))

    def body() -> None:
        attached.tunings[rank()] = tuning = LiveTuning(None)
        earlier = [Optimizer()] if rank() == 0 else []
        for each in earlier:
            tuning.optimizer_created(each, frozenset())
            each.itself = each  # as hooks of parameters do
        each = None
        tuning.start_over(helper if rank() == 0 else None)  # type: ignore[arg-type]
        optimizer = Optimizer()
        tuning.optimizer_created(optimizer, frozenset())
        if dropped:
            earlier.clear()
        for _ in range(60):
            tuning.optimizer_stepped(optimizer)

    ThreadRanks(2, seed=0).run(body)
    assert attached.counts == [1, 1] * dropped
    assert len(helper.results()) == dropped
    said = capsys.readouterr().err
    assert ("hold 2, 1: a script that makes its own again" in said) is not dropped


class Stop(Exception):
    """What a script's handler raises."""


@pytest.fixture
def raising() -> Iterator[list[str]]:
    """What was done when a handler has raised ``Stop``, which SIGUSR1 lets it do."""
    order: list[str] = []

    def handle(number: int, frame: FrameType | None) -> NoReturn:
        order.append("handled")
        raise Stop

    before = signal.signal(signal.SIGUSR1, handle)
    yield order
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("arrives", ["in the agreement", "in the switch"])
def test_a_signal_is_handled_when_the_switch_is_done(
    arrives: str, raising: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler that raises leaves no optimizer without a method, nor this rank behind."""

    def meet(**_: object) -> Agreement:
        if arrives == "in the agreement":
            signal.raise_signal(signal.SIGUSR1)
        return agreed

    def attach(*_: object) -> None:
        raising.append("detached")
        if arrives == "in the switch":
            signal.raise_signal(signal.SIGUSR1)
        raising.append("attached")

    use = {"type": "use", **named(FAST)}
    agreed = Agreement(True, True, False, False, False, 8, use)
    monkeypatch.setattr(live_tuning, "register_join_hook", lambda _: None)
    monkeypatch.setattr(live_tuning, "rank", lambda: 1)
    monkeypatch.setattr(live_tuning, "meet", meet)
    monkeypatch.setattr(live_tuning, "switchable_on_all", lambda optimizers: optimizers)
    monkeypatch.setattr(current, "watch", None)
    tuning = LiveTuning(None)
    tuning._attacher = SimpleNamespace(attach=attach)  # type: ignore[assignment]
    tuning._begun = True
    with pytest.raises(Stop):
        tuning.mark()
    assert raising == ["detached", "attached", "handled"]
    assert tuning._strategy == FAST and tuning._boundary_at == 9
