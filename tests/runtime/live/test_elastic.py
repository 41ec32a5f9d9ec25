"""Live tuning of an elastic job, as a process sees it whose ranks change."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import pytest
from torch.utils.hooks import RemovableHandle

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.live.elastic import ElasticTuning
from hvd_autosync.runtime.live.helper import Message
from hvd_autosync.runtime.live.live_trial import LiveTrial
from hvd_autosync.runtime.live.live_tuning import LiveTuning
from hvd_autosync.search_space import Strategy, TrialResult, TrialSpec, TrialStatus


class Helper:
    """Takes messages, and sends none."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.closed = False

    def send(self, message: Message) -> None:
        self.sent.append(message["type"])
        self.last = message

    def next(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


class Synchronizer:
    """Counts how often it has started over."""

    starts = 0

    def start_over(self) -> None:
        self.starts += 1


class Optimizer:
    """What is seen of a wrapped optimizer."""

    def __init__(self) -> None:
        self._sync = Synchronizer()
        self.hooks: OrderedDict[int, Any] = OrderedDict()

    def register_state_dict_pre_hook(self, hook: Any) -> RemovableHandle:
        handle = RemovableHandle(self.hooks)
        self.hooks[handle.id] = hook
        return handle

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool) -> RemovableHandle:
        return self.register_state_dict_pre_hook(hook)


def in_trial(tuning: LiveTuning, strategy: Strategy) -> None:
    spec = TrialSpec("one", strategy, warmup_steps=3, measured_steps=8)
    tuning._trial, tuning._strategy = LiveTrial(spec, 0.0, 1.0), strategy
    tuning.vanished.trial_begins(strategy)


def test_all_but_the_optimizers_starts_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    helpers = [Helper(), Helper()]

    def body() -> None:
        left = iter(helpers)
        tuning = LiveTuning(None)
        monkeypatch.setattr(current, "live", tuning)
        elastic = ElasticTuning(tuning, lambda: next(left))  # type: ignore[arg-type, return-value]
        elastic.ranks_are_there()
        assert tuning._helper is helpers[0]
        kept, dropped = Optimizer(), Optimizer()
        for each in (kept, dropped):
            tuning.optimizer_created(each, frozenset({"buckets"}))
        tuning.optimizer_stepped(kept)
        in_trial(tuning, Strategy({"buckets": 3}))
        del dropped, each
        elastic.ranks_change()
        assert helpers[0].sent[-1] == "reset" and helpers[0].closed
        elastic.ranks_are_there()
        assert tuning._helper is helpers[1] and not helpers[1].sent
        assert (tuning._steps, tuning._trial, tuning._strategy) == (0, None, Strategy())
        assert tuning.living() == [kept] and kept._sync.starts == 1
        assert tuning._optimizers.fixed == ("buckets",)
        assert len(kept.hooks) == 2, "of saves and of loads, and none twice"

    ThreadRanks(1, seed=0).run(body)
    assert "goes on with 1 rank, and its tuning starts over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("strategy", "failed", "barred"),
    [({"buckets": 3}, True, True), ({"buckets": 3}, False, False), ({}, True, False)],
)
def test_tuning_does_not_outlive_three_trials_in_which_ranks_vanish(
    strategy: dict[str, Any], failed: bool, barred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body() -> None:
        tuning = LiveTuning(None)
        monkeypatch.setattr(current, "live", tuning)
        elastic = ElasticTuning(tuning, lambda: None)
        for _ in range(3):
            assert not tuning.barred
            in_trial(tuning, Strategy(strategy))
            tuning.failed = failed
            elastic.ranks_change()
            elastic.ranks_are_there()
        assert bool(tuning.barred) is barred

    ThreadRanks(1, seed=0).run(body)


HOROVODS = Strategy({"buckets": 0, "cache_capacity": 1024})


@pytest.mark.parametrize(
    ("strategy", "measured", "barred"),
    [
        (Strategy({"buckets": 5}), True, False),
        (Strategy({"buckets": 5}), False, True),
        (HOROVODS, True, True),
        (Strategy(), True, True),
    ],
)
def test_a_trial_with_a_step_time_between_them_shows_that_ranks_can_stay(
    strategy: Strategy, measured: bool, barred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not one under Horovod's own exchange, such as the default after each reset."""

    def body() -> None:
        tuning = LiveTuning(None)
        monkeypatch.setattr(current, "live", tuning)
        elastic = ElasticTuning(tuning, lambda: None)
        for _ in range(3):
            in_trial(tuning, strategy)
            assert tuning._trial is not None
            status = TrialStatus.COMPLETED if measured else TrialStatus.CRASHED
            tuning._finish(tuning._trial, status, "")
            in_trial(tuning, Strategy({"buckets": 3}))
            tuning.failed = True
            elastic.ranks_change()
            elastic.ranks_are_there()
        assert bool(tuning.barred) is barred

    ThreadRanks(1, seed=0).run(body)


@pytest.mark.parametrize("attached", [True, False])
def test_what_ranks_have_vanished_in_is_said_and_not_tried_again_by_other_ranks(
    attached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their study is another one. Ranks may also vanish while the strategy is being attached."""
    helpers = [Helper(), Helper()]
    lost, other = Strategy({"buckets": 3}), Strategy({"buckets": 5})

    def trial(strategy: Strategy) -> Message:
        spec = TrialSpec("one", strategy, warmup_steps=3, measured_steps=8)
        return {"type": "trial", "spec": json.loads(spec.to_json())}

    def body() -> None:
        left = iter(helpers)
        tuning = LiveTuning(None)
        monkeypatch.setattr(current, "live", tuning)
        elastic = ElasticTuning(tuning, lambda: next(left))  # type: ignore[arg-type, return-value]
        elastic.ranks_are_there()
        in_trial(tuning, lost)
        if not attached:
            tuning._trial, tuning._strategy = None, Strategy()
        tuning.failed = True
        elastic.ranks_change()
        assert helpers[0].last == {"type": "reset", "vanished": True}
        elastic.ranks_are_there()
        messages = [trial(lost), allowed := trial(other)]
        monkeypatch.setattr(helpers[1], "next", lambda: messages.pop(0))
        assert tuning._receive() is None
        result = TrialResult.from_json(helpers[1].last["result"])
        assert result.status is TrialStatus.CRASHED and "vanished" in result.reason
        assert tuning._receive() is allowed
        elastic.ranks_change()
        assert helpers[1].last == {"type": "reset", "vanished": False}

    ThreadRanks(1, seed=0).run(body)
