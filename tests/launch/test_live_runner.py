"""The helper's side of live trials: what rank 0 sends, and what is made of its silence."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from hvd_autosync.errors import LiveTuningError
from hvd_autosync.launch import live_runner
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.live_runner import (
    LOST_IN_TRIAL,
    LiveRunner,
    RanksChanged,
    Training,
    TrainingEnded,
    TrainingLost,
    train_under,
)
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.search_space import (
    Host,
    RankReport,
    Strategy,
    TrialResult,
    TrialSpec,
    TrialStatus,
)
from hvd_autosync.search_space.exchange_plan import Classes
from hvd_autosync.search_space.trial import PRUNED
from hvd_autosync.util import awake_clock

FAST = Strategy({"buckets": 3})
CRASHED = TrialResult(TrialStatus.CRASHED).to_json()
TOO_SLOW = TrialResult(TrialStatus.CUT_SHORT, PRUNED).to_json()
UNLIMITED = Limits()


class Rank:
    """Rank 0: it takes messages and answers each by a function, until that returns ``None``."""

    def __init__(self) -> None:
        self.stopped = False
        to_helper, self._from_helper = os.pipe(), os.pipe()
        self._write = os.fdopen(to_helper[1], "wb")
        self.received: list[dict[str, Any]] = []
        self._sent = os.fdopen(self._from_helper[1], "wb")
        received = os.fdopen(to_helper[0], "rb")
        self.training = Training(received, self._sent, stopped=lambda: self.stopped)
        self._thread: threading.Thread | None = None

    def say(self, message: dict[str, Any]) -> None:
        self._write.write(json.dumps(message).encode() + b"\n")
        self._write.flush()

    def die(self) -> None:
        self._write.close()

    def die_in_trial(self) -> None:
        self.say({"type": "begun"})
        self.die()

    def hang_up(self) -> None:
        """Return when all that was sent has been received."""
        assert self._thread is not None
        self._sent.close()
        self._thread.join()

    def answer(self, react: Callable[[dict[str, Any]], None]) -> None:
        def run() -> None:
            with os.fdopen(self._from_helper[0], "rb") as lines:
                for line in lines:
                    self.received.append(json.loads(line))
                    react(self.received[-1])

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()


@pytest.fixture
def rank() -> Iterator[Rank]:
    yield Rank()


def spec(strategy: Strategy = FAST, **fields: Any) -> TrialSpec:
    return TrialSpec("one", strategy, **fields)


def result(step_s: float, status: TrialStatus = TrialStatus.COMPLETED) -> dict[str, Any]:
    steps = (step_s,) * 20
    report = RankReport(0, "a", steps, (0.0,) * 20)
    done = TrialResult(status, ranks=(report,), warmup_steps=3)
    return {"type": "result", "result": done.to_json()}


def run(runner: LiveRunner, strategy: Strategy = FAST, limits: Limits = UNLIMITED) -> TrialResult:
    return runner.run(spec(strategy), limits, lambda _: None)


def test_trials_and_what_the_training_goes_on_with(rank: Rank) -> None:
    times = iter([0.2, 0.1, 0.3])

    def react(message: dict[str, Any]) -> None:
        if message["type"] == "trial":
            rank.say({"type": "step", "steps": 1})
            rank.say(result(next(times)))

    rank.answer(react)
    runner = LiveRunner(rank.training)
    slower = Strategy({"buckets": 9})
    for strategy in (Strategy(), FAST, slower):
        assert run(runner, strategy).status is TrialStatus.COMPLETED
    train_under(rank.training, FAST, {"large": ("w",)}, 0.1)
    rank.hang_up()
    kinds = [message["type"] for message in rank.received]
    assert kinds == [*["trial", "use"] * 3, "train"]
    trials, uses = rank.received[:6:2], rank.received[1:6:2]
    assert [message["best"]["strategy"] for message in trials] == [{}, {}, dict(FAST)]
    assert [message["strategy"] for message in uses] == [{}, dict(FAST), dict(FAST)], (
        "also of the best itself; the last one was slower"
    )
    assert rank.received[6]["classes"] == {"large": ["w"]}


def test_a_trial_that_was_cut_short_is_not_the_best_so_far(rank: Rank) -> None:
    short = result(0.1, TrialStatus.CUT_SHORT)
    answers = iter([result(0.2), short, result(0.15), result(0.16)])

    def react(message: dict[str, Any]) -> None:
        if message["type"] == "trial":
            rank.say(next(answers))

    rank.answer(react)
    runner = LiveRunner(rank.training)
    for strategy in (Strategy(), Strategy({"buckets": 9}), FAST, Strategy()):
        assert run(runner, strategy).step_time is not None
    rank.hang_up()
    trials = [message for message in rank.received if message["type"] == "trial"]
    assert [message["best"]["strategy"] for message in trials] == [{}, {}, {}, dict(FAST)]
    uses = [message["strategy"] for message in rank.received if message["type"] == "use"]
    assert uses == [{}, {}, dict(FAST), dict(FAST)], "not the one that was cut short"


def best_after(
    rank: Rank,
    *trials: tuple[Strategy, dict[str, Any]],
    confirmed: tuple[Strategy, Classes] | None = None,
) -> list[dict[str, Any]]:
    """Run trials with these results; return the strategies with which the training went on."""
    results = iter([each for _, each in trials])

    def react(message: dict[str, Any]) -> None:
        if message["type"] == "trial":
            rank.say(next(results))

    rank.answer(react)
    runner = LiveRunner(rank.training, confirmed=confirmed)
    for strategy, _ in trials:
        run(runner, strategy)
    rank.hang_up()
    return [each["strategy"] for each in rank.received if each["type"] == "use"]


def test_a_lucky_measurement_is_refuted_by_later_ones(rank: Rank) -> None:
    """Also where they name knobs at their defaults, as those of a confirmation do."""
    default, fast = Strategy({"buckets": 0}), Strategy({**FAST, "cache_capacity": 1024})
    trials = [(Strategy(), 0.2), (FAST, 0.1), (default, 0.2), (fast, 0.3)]
    uses = best_after(rank, *((each, result(step_s)) for each, step_s in trials))
    assert uses == [{}, dict(FAST), dict(FAST), {}]


@pytest.mark.parametrize(
    "again", [result(0.4), *({"type": "result", "result": each} for each in (CRASHED, TOO_SLOW))]
)
def test_a_confirmed_winner_is_the_best_until_it_has_another_result(
    rank: Rank, again: dict[str, Any]
) -> None:
    """If this tuning fails, the training goes on under it."""
    slower = Strategy({"buckets": 9})
    trials = (Strategy(), result(0.3)), (slower, result(0.35)), (FAST, again)
    confirmed = FAST, {"large": ("w",)}
    uses = best_after(rank, *trials, confirmed=confirmed)
    assert uses == [dict(FAST), dict(FAST), {}]
    first = next(each for each in rank.received if each["type"] == "trial")
    assert first["best"] == {"strategy": dict(FAST), "classes": {"large": ["w"]}}


def test_a_strategy_that_fails_later_is_not_the_best(rank: Rank) -> None:
    crashed = {"type": "result", "result": CRASHED}
    trials = (Strategy(), result(0.2)), (FAST, result(0.1)), (FAST, crashed)
    assert best_after(rank, *trials) == [{}, dict(FAST), {}]


@pytest.mark.parametrize("by_itself", [True, False])
def test_why_the_training_ended_is_known_also_where_a_message_meets_its_end(
    rank: Rank, by_itself: bool
) -> None:
    os.close(rank._from_helper[0])
    if by_itself:
        rank.say({"type": "end", "steps": 7})
    rank.die()
    with pytest.raises(TrainingEnded if by_itself else TrainingLost):
        rank.training.send({"type": "probe", "hosts": []})
    assert rank.training.steps == (7 if by_itself else 0)


def test_few_steps_warm_up(rank: Rank) -> None:
    rank.answer(lambda message: rank.say(result(0.1)))
    runner = LiveRunner(rank.training)
    runner.run(spec(warmup_steps=10, profile=True), Limits(), lambda _: None)
    runner.run(spec(warmup_steps=10), Limits(), lambda _: None)
    rank.hang_up()
    trials = [message["spec"] for message in rank.received if message["type"] == "trial"]
    assert [each["warmup_steps"] for each in trials] == [10, 3], "the first one is the first"


def test_progress_is_that_of_the_steps_that_are_made(rank: Rank) -> None:
    def react(_: dict[str, Any]) -> None:
        rank.say({"type": "step", "steps": 3})
        rank.say(result(0.1))

    rank.answer(react)
    seen: list[TrialProgress] = []
    runner = LiveRunner(rank.training)
    runner.run(spec(warmup_steps=10, measured_steps=20), Limits(), seen.append)
    (at_third,) = {(each.phase, each.of) for each in seen if each.steps == 3}
    assert at_third == ("measuring", 23)


def test_a_trial_knows_the_time_that_is_left(rank: Rank) -> None:
    rank.answer(lambda message: rank.say(result(0.1)))
    runner = LiveRunner(rank.training)
    for limits in (Limits(), Limits(total_s=7.5)):
        run(runner, limits=limits)
    rank.hang_up()
    left = [message["left_s"] for message in rank.received if message["type"] == "trial"]
    assert left == [math.inf, 7.5]


@pytest.mark.parametrize("strategy", [FAST, Strategy({"buckets": 0, "cache_capacity": 0})])
def test_a_rank_that_dies_in_a_trial_is_its_result(strategy: Strategy, rank: Rank) -> None:
    """Also where gradients are exchanged by Horovod, which was initialized again."""
    rank.answer(lambda _: rank.die_in_trial())
    runner = LiveRunner(rank.training)
    lost = run(runner, strategy)
    assert lost.status is TrialStatus.CRASHED
    assert lost.reason.endswith(LOST_IN_TRIAL)
    with pytest.raises(TrainingLost):
        run(runner)


def test_a_rank_that_dies_before_the_trial_begins_is_not_its_result(rank: Rank) -> None:
    """It has failed while the trial was chosen, for a reason of its own."""
    rank.answer(lambda _: rank.die())
    runner = LiveRunner(rank.training)
    with pytest.raises(TrainingLost):
        run(runner)
    assert not runner.lost


def test_a_rank_that_dies_while_a_trial_is_postponed_is_not_its_result(rank: Rank) -> None:
    """The training is still under the strategy before."""

    def postpone(_: dict[str, Any]) -> None:
        rank.say({"type": "begun"})
        rank.say({"type": "postponed"})
        rank.die()

    rank.answer(postpone)
    runner = LiveRunner(rank.training)
    with pytest.raises(TrainingLost):
        run(runner)
    assert not runner.lost


@pytest.mark.parametrize("late_s", [0.0, 0.3])
def test_a_rank_that_is_stopped_in_a_trial_is_no_result(
    rank: Rank, late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_runner, "_STOPPED_S", 60.0)

    def stop(_: dict[str, Any]) -> None:
        rank.die()
        time.sleep(late_s)
        rank.stopped = True

    rank.answer(stop)
    runner = LiveRunner(rank.training)
    with pytest.raises(TrainingEnded):
        run(runner)
    assert not runner.lost


@pytest.mark.parametrize("default", [Strategy(), Strategy({"buckets": 0, "cache_capacity": 1024})])
def test_under_the_default_nothing_is_to_blame(default: Strategy, rank: Rank) -> None:
    rank.answer(lambda _: rank.die_in_trial())
    with pytest.raises(TrainingLost):
        run(LiveRunner(rank.training), default)


def test_the_end_of_the_script_is_no_failure(rank: Rank) -> None:
    rank.answer(lambda _: rank.say({"type": "end"}))
    with pytest.raises(TrainingEnded):
        run(LiveRunner(rank.training))


@pytest.mark.parametrize("says_so", [True, False])
def test_ranks_of_an_elastic_job_that_change_in_a_trial_are_no_result(
    rank: Rank, says_so: bool
) -> None:
    rank.say({"type": "begin", "process": 1, "elastic": True})
    rank.training.wait("begin")
    rank.answer(lambda _: rank.say({"type": "reset"}) if says_so else rank.die())
    runner = LiveRunner(rank.training)
    with pytest.raises(RanksChanged):
        run(runner)
    assert not runner.lost


def test_ranks_that_vanish_in_a_trial_count_against_it_and_the_next_is_not_chosen(
    rank: Rank,
) -> None:
    """But no mechanism is left out of other jobs."""
    rank.say({"type": "begin", "process": 1, "elastic": True})
    rank.training.wait("begin")
    rank.answer(lambda _: rank.say({"type": "reset", "vanished": True}))
    runner = LiveRunner(rank.training)
    runner.check()
    lost = run(runner)
    assert lost.status is TrialStatus.CRASHED
    assert "vanished" in lost.reason and not lost.reason.endswith(LOST_IN_TRIAL)
    assert [message["type"] for message in rank.received] == ["trial"]
    with pytest.raises(RanksChanged):
        runner.check()
    with pytest.raises(RanksChanged):
        run(runner)


def test_ranks_that_vanish_under_the_default_are_no_result(rank: Rank) -> None:
    rank.answer(lambda _: rank.say({"type": "reset", "vanished": True}))
    with pytest.raises(RanksChanged):
        run(LiveRunner(rank.training), Strategy({"buckets": 0}))


def test_a_refusal_says_why(rank: Rank) -> None:
    rank.say({"type": "refused", "reason": "a single rank"})
    with pytest.raises(LiveTuningError, match="a single rank"):
        rank.training.wait("begin")


def test_a_job_that_hangs_is_killed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_runner, "_GRACE_S", 0.1)
    monkeypatch.setattr(live_runner, "_LEAST_SILENCE_S", 0.0)
    with subprocess.Popen(["sleep", "1000"]) as sleeper:
        rank.say({"type": "begin", "process": sleeper.pid})
        rank.training.wait("begin")
        rank.answer(lambda _: rank.say({"type": "begun"}))
        hung = run(LiveRunner(rank.training), limits=Limits(silence_s=0.5))
        assert sleeper.wait(120) == -signal.SIGTERM
    assert hung.status is TrialStatus.HUNG
    assert hung.total_s >= 0.5, "its time is used"
    assert "no step for" in hung.reason


def test_the_end_of_a_killed_rank_does_not_end_the_helper_before_the_hang_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In an elastic job it would, within a second."""
    monkeypatch.setattr(live_runner, "_GRACE_S", 0.0)
    ended: list[str] = []
    to_helper = os.pipe()
    with os.fdopen(to_helper[1], "wb"), open(os.devnull, "wb") as sent:
        received = os.fdopen(to_helper[0], "rb")
        training = Training(received, sent, on_end=lambda: ended.append("ended"))
        training.kill()
    with pytest.raises(TrainingLost):
        training.wait()
    training._reader.join()
    assert not ended


def test_a_hanging_rank_that_ends_by_the_first_signal_gets_no_second(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be another process's then; and the hang is recorded at once."""
    signalled: list[int] = []
    parent = os.getppid()

    def kill(_: int, number: int) -> None:
        signalled.append(number)
        monkeypatch.setattr(live_runner.os, "getppid", lambda: parent + 1)

    rank.say({"type": "begin", "process": parent})
    rank.training.wait("begin")
    monkeypatch.setattr(live_runner.os, "kill", kill)
    monkeypatch.setattr(live_runner.time, "sleep", lambda _: None)
    rank.training.kill()
    assert signalled == [signal.SIGTERM]


class Late:
    """Lines of rank 0 that are read only after its end was seen."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self._messages = messages
        self.readable = threading.Event()

    def __iter__(self) -> Iterator[bytes]:
        self.readable.wait()
        for message in self._messages:
            yield json.dumps(message).encode() + b"\n"


def test_the_last_word_of_a_rank_is_read_though_its_end_was_seen_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where this process was suspended: the end of the script is no failure of a strategy."""
    late = Late({"type": "end", "steps": 7})
    ours = os.getppid()

    def getppid() -> int:
        threading.Timer(0.1, late.readable.set).start()
        return ours + 1

    with open(os.devnull, "wb") as sent:
        training = Training(late, sent)  # type: ignore[arg-type]
        monkeypatch.setattr(live_runner.os, "getppid", getppid)
        with pytest.raises(TrainingEnded):
            training.wait()
    assert training.steps == 7


def test_before_it_has_begun_no_process_is_signalled(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number 0 would be the process group of this helper: the whole job."""
    signalled: list[tuple[int, int]] = []
    monkeypatch.setattr(live_runner, "_GRACE_S", 0.0)
    monkeypatch.setattr(live_runner, "_LEAST_SILENCE_S", 0.0)
    monkeypatch.setattr(live_runner.os, "kill", lambda *each: signalled.append(each))
    rank.answer(lambda _: rank.say({"type": "begun"}))
    hung = run(LiveRunner(rank.training), limits=Limits(silence_s=0.1))
    assert hung.status is TrialStatus.HUNG and not signalled


def must_not_kill(runner: LiveRunner, reason: str) -> NoReturn:
    raise AssertionError(reason)


def test_a_job_that_was_suspended_does_not_hang(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended_s = 0.0

    def monotonic(clock: Callable[[], float] = time.monotonic) -> float:
        return clock() + suspended_s

    def react(_: dict[str, Any]) -> None:
        nonlocal suspended_s
        time.sleep(2 * live_runner._REPORT_S)
        suspended_s = 1000.0
        time.sleep(2 * live_runner._REPORT_S)
        rank.say(result(0.1))

    monkeypatch.setattr(live_runner.time, "monotonic", monotonic)
    monkeypatch.setattr(LiveRunner, "_kill", must_not_kill)
    rank.answer(react)
    done = run(LiveRunner(rank.training), limits=Limits(silence_s=1.0))
    assert done.status is TrialStatus.COMPLETED


@pytest.mark.parametrize("strategy", [Strategy(), Strategy({"cycle_time_ms": 2.0})])
def test_under_horovods_own_exchange_a_rank_may_wait_for_others(
    strategy: Strategy, rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_runner, "_LEAST_SILENCE_S", 0.0)

    def react(_: dict[str, Any]) -> None:
        time.sleep(4 * live_runner._REPORT_S)
        rank.say(result(0.1))

    rank.answer(react)
    waited = run(LiveRunner(rank.training), strategy, Limits(silence_s=live_runner._REPORT_S))
    assert waited.status is TrialStatus.COMPLETED


def test_a_line_that_was_cut_is_the_end(rank: Rank) -> None:
    rank._write.write(b'{"type": "res')
    rank.die()
    with pytest.raises(TrainingLost):
        rank.training.wait("result")


def test_links_are_measured_in_place(rank: Rank) -> None:
    link = {"ranks": 2, "latency_s": 1e-3, "bandwidth_bytes_per_s": 1e7}
    answers = iter([link, None])
    rank.answer(lambda _: rank.say({"type": "link", "link": next(answers)}))
    runner = LiveRunner(rank.training)
    probe = spec(Strategy(), probe=(Host("a", 1), Host("b", 1)))
    measured = runner.run(probe, Limits(), lambda _: None)
    assert measured.link is not None
    assert math.isclose(measured.link.bandwidth_bytes_per_s, 1e7)
    assert rank.received[0] == {"type": "probe", "hosts": [["a", 1], ["b", 1]]}
    assert "process set" in runner.run(probe, Limits(), lambda _: None).reason


def test_a_job_that_evaluates_in_a_trial_is_not_killed(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of the test, which goes on when what rank 0 said has been taken in."""
    now_s, looked = 0.0, threading.Semaphore(0)
    monkeypatch.setattr(live_runner, "_LEAST_SILENCE_S", 0.0)
    monkeypatch.setattr(live_runner, "_REPORT_S", 0.01)
    monkeypatch.setattr(awake_clock, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(LiveRunner, "_kill", must_not_kill)

    def evaluate(_: dict[str, Any]) -> None:
        nonlocal now_s
        for _ in range(10):
            rank.training.tell_self("alive")
            while not rank.training._queue.empty():
                time.sleep(0.001)
            while looked.acquire(blocking=False):
                pass
            for _ in range(2):  # the first one may be that of the word itself
                looked.acquire()
            now_s += 0.6
        rank.say(result(0.1))

    rank.answer(evaluate)
    runner = LiveRunner(rank.training)
    done = runner.run(spec(), Limits(silence_s=1.0), lambda _: looked.release())
    assert done.status is TrialStatus.COMPLETED
