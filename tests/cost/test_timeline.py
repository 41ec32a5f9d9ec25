from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_autosync.cost.timeline import Items, Loop, communication, round_s

ITEM = st.tuples(
    st.floats(0, 0.1),
    st.sampled_from([0, 100, 1000, 5000]),
    st.floats(0, 0.02),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 0, 1]),
    st.sampled_from([1.0, 0.25]),
)
Item = tuple[float, int, float, int, int, float]
SECONDS = st.floats(1e-4, 0.05)


def one_by_one(
    cycle: float, fusion: float, response: float, items: list[Item], backward: float
) -> tuple[float, float]:
    """The same loop for one strategy, batch by batch."""
    waiting = [item for item in items if item[1]]
    begin, end, later, overlapped = -float("inf"), 0.0, 0.0, 0.0
    while waiting:
        look = max(begin + cycle, end)
        begin = look if waiting[0][0] <= look else waiting[0][0] + cycle / 2
        batch = [item for item in waiting if item[0] <= begin]
        waiting = waiting[len(batch) :]
        end, fused = begin, fusion + 1.0
        for _, size, wire, operations, alone, latency in batch:
            own = response * latency
            if alone or fused + size > fusion:
                end, fused = end + (1 + alone) * own, 0.0
            end, fused = end + wire, fusion + 1.0 if alone else fused + size
            each = own + wire / operations
            later = max(later, (operations - 1) * max(cycle - each, own))
        overlapped += max(min(end, backward) - begin, 0.0)
    return end + later, overlapped


@settings(max_examples=300, deadline=None)
@given(
    st.lists(ITEM, min_size=1, max_size=12),
    st.lists(
        st.tuples(SECONDS, st.sampled_from([0, 1500, 10**9]), SECONDS), min_size=1, max_size=4
    ),
    st.floats(0, 0.3),
)
def test_all_at_once_is_one_by_one(
    items: list[Item], loops: list[tuple[float, int, float]], backward: float
) -> None:
    items = sorted(items)
    columns = [np.array([[each[i]] * len(loops) for each in items], float) for i in range(6)]
    loop = Loop(*(np.array([each[i] for each in loops], float) for i in range(3)))
    found, overlapped = communication(loop, Items(*columns), np.full(len(loops), backward))
    expected = np.array([one_by_one(*each, items, backward) for each in loops])
    assert found == pytest.approx(expected[:, 0], abs=1e-12)
    assert overlapped == pytest.approx(expected[:, 1], abs=1e-12)
    assert (overlapped <= np.minimum(found, backward) + 1e-12).all()


def test_nothing_to_send_takes_no_time() -> None:
    none = np.zeros((3, 2))
    loop = Loop(np.full(2, 1e-3), np.full(2, 1e6), np.full(2, 1e-3))
    found = communication(loop, Items(none, none, none, none + 1, none, none + 1), np.ones(2))
    assert [each.tolist() for each in found] == [[0, 0]] * 2


@pytest.mark.parametrize(
    ("cycle", "forward", "backward", "steps", "seconds"),
    [
        # Each of three operations waits for the next cycle.
        (1.0, 0.01, 0.02, 4, 3.0),
        # The length is found half a cycle into a backward of two, and the end as well.
        (1.0, 3.0, 2.0, 4, 0.7 + 20.0 + 0.5),
        # A backward of a quarter of a cycle hides some of each; the average waits for a cycle.
        (1.0, 3.0, 0.25, 2, 0.7 + 2 * (3.0 + 0.5 + 0.1) + 0.9),
    ],
)
def test_a_round(cycle: float, forward: float, backward: float, steps: int, seconds: float) -> None:
    one = np.ones(1)
    loop = Loop(cycle * one, 1e9 * one, 0.1 * one)
    found = round_s(loop, 0.7 * one, forward * one, backward * one, steps * one)
    assert found == pytest.approx(seconds)
