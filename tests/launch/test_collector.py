"""What is made of a job's output."""

from __future__ import annotations

import math
import time
import zlib

import pytest

from hvd_autosync.launch.collector import Collector
from hvd_autosync.launch.limits import Limits
from hvd_autosync.runtime.driver.wire import encode_message
from hvd_autosync.search_space import RankReport, Strategy, TrialResult, TrialSpec, TrialStatus
from hvd_autosync.search_space.trial import OUT_OF_TIME, PRUNED

SPEC = TrialSpec("t", Strategy(), 2, 10)


def collected(*messages: dict[str, object]) -> TrialResult:
    collector = Collector(SPEC, world_size=1)
    say(collector, SPEC.key, *messages)
    return collector.result(0, "")


def say(
    collector: Collector, key: str, *messages: dict[str, object], rank: int = 0, first: int = 0
) -> None:
    for number, message in enumerate(messages, first):
        for line in encode_message(key, rank, number, message).split(b"\n"):
            collector.feed(line + b"\n")


HELLO = {"type": "hello", "host": "a", "device": "cpu"}
END = {"type": "end", "cause": "script", "peak_memory_bytes": 5}


def steps(first: int, count: int, losses: list[float | None]) -> dict[str, object]:
    return {
        "type": "steps",
        "first": first,
        "step_s": [0.1] * count,
        "blocked_s": [0.0] * count,
        "losses": losses,
    }


def test_losses_count_also_where_no_step_comes_with_them() -> None:
    """Those on an accelerator come in the last message, when every step was handed over."""
    result = collected(HELLO, steps(0, 8, []), steps(8, 0, [1.0, None]), END)
    (rank,) = result.ranks
    assert len(rank.step_s) == 8
    assert rank.losses[0] == 1.0 and math.isnan(rank.losses[1])
    assert result.diverged


def test_positions_of_losses_count_over_all_messages() -> None:
    """What is not there cannot have been in a round."""
    first = steps(0, 4, [1.0] * 4) | {"in_round": [1, 3]}
    second = steps(4, 4, [1.0] * 2) | {"in_round": [0, 2, -1]}
    assert collected(HELLO, first, second, END).ranks[0].in_round == (1, 3, 4)


def test_steps_unlike_the_others_are_those_that_are_there() -> None:
    first = steps(0, 4, []) | {"untypical": [0, 9, -1]}
    second = steps(4, 4, []) | {"untypical": [3, 5]}
    assert collected(HELLO, first, second, END).ranks[0].untypical == (0, 5)


def test_several_losses_are_none_once_the_script_reports() -> None:
    first, second = steps(0, 4, [1.0] * 4), steps(4, 4, [1.0] * 4)
    (rank,) = collected(HELLO, first, second | {"several_losses": True}, END).ranks
    assert rank.several_losses and RankReport.from_json(rank.to_json()) == rank
    (rank,) = collected(HELLO, first | {"several_losses": True}, second, END).ranks
    assert not rank.several_losses and "several_losses" not in rank.to_json()


def test_steps_behind_a_lost_message_are_left_out() -> None:
    last = steps(10, 0, [3.0])
    (rank,) = collected(HELLO, steps(0, 4, [1.0] * 4), steps(6, 4, [2.0] * 4), last, END).ranks
    assert len(rank.step_s) == 4 and rank.losses == (1.0,) * 4


def test_a_trial_that_runs_into_the_end_of_the_minutes_is_cut_short() -> None:
    """What it has measured by then counts."""
    collector = Collector(SPEC, world_size=1)
    say(collector, SPEC.key, HELLO, steps(0, 9, []))
    assert collector.overdue(Limits(total_s=60.0)) == ""
    why = collector.overdue(Limits(total_s=0.0))
    result = collector.result(-9, why)
    assert (result.status, result.reason) == (TrialStatus.CUT_SHORT, OUT_OF_TIME)
    assert result.step_time is not None and result.step_time.steps == 7


def test_an_evaluation_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """None was in the steps of the default, from which the limit of a step is derived."""
    now, said = 1000.0, 0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    collector, limits = Collector(SPEC, world_size=1), Limits(silence_s=11.0)

    def tell(message: dict[str, object]) -> None:
        nonlocal said
        say(collector, SPEC.key, message, first=said)
        said += 1

    def overdue_after(seconds: int, **news: int) -> str:
        nonlocal now
        for _ in range(seconds):  # somebody looks each second
            now += 1
            if why := collector.overdue(limits):
                return why
        if news:
            tell(steps(4, 0, []) | news)
        return collector.overdue(limits)

    tell(HELLO)
    tell(steps(0, 4, []))

    assert not overdue_after(10)
    assert not overdue_after(0, unlike=1)
    assert not overdue_after(170, unlike=1)
    # Another epoch of its loader begins, or another module is evaluated.
    assert not overdue_after(9, unlike=2)
    assert not overdue_after(170)
    assert overdue_after(11) == "no step for 180 s after step 4"
    tell(steps(4, 1, []))
    assert not overdue_after(10)
    assert overdue_after(2) == "no step for 11 s after step 5"


def test_a_job_that_was_suspended_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system stops driver and ranks, and may let the driver go on first."""
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    collector = Collector(SPEC, world_size=1)
    limits = Limits(setup_s=30.0, silence_s=11.0, exit_s=10.0)
    for first, message in enumerate((HELLO, steps(0, 4, []), END)):
        now += 1000
        assert not collector.overdue(limits)
        say(collector, SPEC.key, message, first=first)
    now += 1000
    assert not collector.overdue(limits)
    for _ in range(12):
        now += 1
        why = collector.overdue(limits)
    assert why.startswith("ranks did not exit within 10 s")


def test_a_trial_that_was_pruned_is_cut_short() -> None:
    result = collected(HELLO, steps(0, 9, []), {**END, "cause": "pruned"})
    assert (result.status, result.reason) == (TrialStatus.CUT_SHORT, PRUNED)
    assert result.step_time is not None and result.step_time.steps == 7


def test_the_script_begins_when_the_slowest_rank_has_been_launched() -> None:
    collector = Collector(SPEC, world_size=2)
    collector._started -= 10.0
    for rank, script_s in ((0, 7.0), (1, 2.0)):
        say(collector, SPEC.key, {**HELLO, "script_s": script_s}, steps(0, 9, []), rank=rank)
    result = collector.result(0, "")
    assert 8.0 <= result.launch_s < result.setup_s
    assert math.isnan(collected(HELLO, steps(0, 9, [])).launch_s)


def test_the_rank_with_the_fewest_cores_counts() -> None:
    def cores(*hellos: tuple[str, list[int]]) -> int:
        collector = Collector(SPEC, world_size=len(hellos))
        for rank, (host, numbers) in enumerate(hellos):
            hello = {**HELLO, "host": host, "cores": numbers}
            say(collector, SPEC.key, hello, steps(0, 9, []), rank=rank)
        return collector.result(0, "").cores

    assert cores(("a", [0, 1, 2, 3, 4, 5]), ("b", [0, 1])) == 2
    # Two ranks share four cores, or are bound to two each.
    assert cores(("a", [0, 1, 2, 3]), ("a", [0, 1, 2, 3])) == 2
    assert cores(("a", [0, 1]), ("a", [2, 3])) == 2
    assert cores(("a", [0, 1]), ("b", [])) == 0
    assert collected(HELLO, steps(0, 9, [])).cores == 0
    assert collected({**HELLO, "cores": "many"}, steps(0, 9, [])).cores == 0


def test_a_profile_that_is_none_is_left_out() -> None:
    profile = {"type": "profile", "profile": {"parameters": 5}, "owned": []}
    link = {"type": "link", "ranks": 1, "latency_s": 0.1, "bandwidth_bytes_per_s": 1.0}
    result = collected(HELLO, profile, link, steps(0, 12, []), END)
    assert result.profile is None and result.link is None


def test_what_a_script_prints_completes_no_trial() -> None:
    """As where it shows the output of another trial of the same job, or of an older version."""
    another = TrialSpec("t", Strategy(), 2, 10)
    collector = Collector(SPEC, world_size=1)
    end = {**END, "cause": "steps"}
    say(collector, another.key, HELLO, steps(0, 12, []), end)
    for text in ("eJyrVipJLS5RslJQKjE0VNJRUCrOSC0qVrJSMNBRUCpILElVslIwqgUA0nUKkw==",):
        collector.feed(f"@hvd-autosync@ 0 0 0/1 {zlib.crc32(text.encode()):08x} {text}\n".encode())
    result = collector.result(0, "")
    assert (result.status, result.ranks) == (TrialStatus.ENDED_EARLY, ())
    assert collected(HELLO, steps(0, 12, []), end).status is TrialStatus.COMPLETED


def test_a_trial_has_no_more_steps_than_it_was_asked_for() -> None:
    messages = [steps(first, 5, [1.0] * 500) for first in range(0, 5000, 5)]
    collector = Collector(SPEC, world_size=1)
    say(collector, SPEC.key, HELLO, *messages, END)
    say(collector, SPEC.key, HELLO, rank=1)
    (rank,) = collector.result(0, "").ranks
    assert len(rank.step_s) == len(rank.blocked_s) == len(rank.losses) == 12


def test_the_output_of_ranks_that_are_not_there_costs_nothing() -> None:
    collector = Collector(SPEC, world_size=1)
    for number in range(2000):
        collector.feed(b"[%d]<stderr>:%s\n" % (number, b"x" * 400))
    collector.feed(b"[%s]<stderr>:y\n" % (b"9" * 5000))
    assert len(collector.result(0, "").stderr_tail) < 40_000
    assert collector._tail.ranks() == [0]
    assert sum(map(len, collector._tail._lines.values())) < 200
