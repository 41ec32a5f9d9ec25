"""What is made of a job's output."""

from __future__ import annotations

import math

from hvd_autosync.launch.collector import Collector
from hvd_autosync.runtime.wire import encode_message
from hvd_autosync.search_space import Strategy, TrialResult, TrialSpec


def collected(*messages: dict[str, object]) -> TrialResult:
    collector = Collector(TrialSpec("t", Strategy(), 2, 10), world_size=1)
    for number, message in enumerate(messages):
        for line in encode_message(0, number, message).split(b"\n"):
            collector.feed(line + b"\n")
    return collector.result(0, "")


HELLO = {"type": "hello", "host": "a", "device": "cpu"}
END = {"type": "end", "cause": "script", "peak_memory_bytes": 5}


def steps(first: int, count: int, losses: list[float | None]) -> dict[str, object]:
    return {"type": "steps", "first": first, "step_s": [0.1] * count, "blocked_s": [0.0] * count,
            "losses": losses}  # fmt: skip


def test_losses_count_also_where_no_step_comes_with_them() -> None:
    """Those on an accelerator come in the last message, when every step was handed over."""
    result = collected(HELLO, steps(0, 8, []), steps(8, 0, [1.0, None]), END)
    (rank,) = result.ranks
    assert len(rank.step_s) == 8
    assert rank.losses[0] == 1.0 and math.isnan(rank.losses[1])
    assert result.diverged


def test_steps_behind_a_lost_message_are_left_out() -> None:
    result = collected(HELLO, steps(0, 4, []), steps(6, 4, []), END)
    assert len(result.ranks[0].step_s) == 4


def test_a_profile_that_is_none_is_left_out() -> None:
    profile = {"type": "profile", "profile": {"parameters": 5}, "owned": []}
    link = {"type": "link", "ranks": 1, "latency_s": 0.1, "bandwidth_bytes_per_s": 1.0}
    result = collected(HELLO, profile, link, steps(0, 12, []), END)
    assert result.profile is None and result.link is None
