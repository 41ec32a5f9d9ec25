"""What ranks know of each other's speed, with and without a barrier."""

from __future__ import annotations

import pytest

from hvd_autosync.runtime.measure.compute_timer import WINDOW, ComputeTimer
from hvd_autosync.runtime.stragglers.policy import StragglerPolicy


def noticed(policy: str) -> StragglerPolicy:
    stragglers = StragglerPolicy(policy, 3)
    for _ in range(8):
        slow = stragglers.window([1.0, 1.0, 3.0])
    assert slow == ({2} if policy != "none" else set())
    return stragglers


@pytest.mark.parametrize("policy", ["none", "greedy", "elastic"])
def test_only_greedy_has_to_look_whether_it_is_still_there(policy: str) -> None:
    assert noticed(policy).present is (policy == "greedy")


def test_without_a_barrier_the_steps_of_the_straggler_count_for_windows() -> None:
    """However many steps the others make meanwhile, or none at all."""
    stragglers = noticed("greedy")
    for _ in range(3):
        assert not stragglers.stepped(0, 1.0)
    ended = []
    for _ in range(10 * WINDOW):
        ended.append(stragglers.stepped(2, 1.1))
    assert any(ended) and ended.index(True) % WINDOW == WINDOW - 1


def test_one_that_stays_slow_stays_one() -> None:
    stragglers = noticed("greedy")
    for _ in range(10 * WINDOW):
        assert not any(stragglers.stepped(rank, 1.0) for rank in (0, 1))
        assert not stragglers.stepped(2, 3.0)
    assert stragglers.present


def test_elastic_lets_one_that_seems_to_have_recovered_take_part() -> None:
    stragglers = noticed("elastic")
    assert stragglers.window([1.0, 1.0, 1.1]) == set()
    assert stragglers.window([1.0, 1.0, 3.0]) == {2}, "known for a straggler, it is one at once"
    for _ in range(5):
        assert stragglers.window([1.0, 1.0, 1.1]) == set()
    assert stragglers.window([1.0, 1.0, 3.0]) == set(), "it had recovered: one window is not enough"


def test_what_one_rank_has_seen_alone_is_forgotten() -> None:
    stragglers = noticed("greedy")
    stragglers.forget()
    assert not stragglers.present
    assert stragglers.window([1.0, 1.0, 3.0]) == set(), "one window is not enough"


def test_waiting_is_no_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("hvd_autosync.runtime.measure.compute_timer.perf_counter", lambda: now[0])
    compute_timer = ComputeTimer()
    assert compute_timer.seconds == 0
    for took in [5.0] * (WINDOW // 2 + 1) + [50.0] * (WINDOW // 2 - 1):
        now[0] += took + 2.0
        compute_timer.waited(2.0)
        assert compute_timer.stepped() == took
    assert compute_timer.seconds == 5.0, "a stall or two do not count"
