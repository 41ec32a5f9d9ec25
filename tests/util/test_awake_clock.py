"""A clock that stands still while its process is stopped."""

import time

import pytest

from hvd_autosync.util.awake_clock import AwakeClock


def test_the_time_between_two_looks_counts_up_to_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock, seen = AwakeClock(), []
    for passed in (0.0, 3.0, 5.0, 1000.0, 1.0):
        now += passed
        seen.append(clock.now())
    assert seen == [0.0, 3.0, 8.0, 13.0, 14.0]
