"""Tries become rarer while they do not pay."""

from __future__ import annotations

from hvd_autosync.runtime.exchange.backoff import Backoff


def steps_between_tries(backoff: Backoff, tries: int) -> list[int]:
    """Steps from one try that does not pay to the next."""
    found, since = [], 0
    while len(found) < tries:
        since += 1
        if not backoff.skips():
            found.append(since)
            since = 0
            backoff.tried(paid=False)
    return found


def test_steps_without_a_try_double_up_to_a_limit() -> None:
    assert steps_between_tries(Backoff(), 9) == [1, 1, 2, 4, 8, 16, 32, 64, 64]


def test_a_try_that_pays_is_followed_by_another() -> None:
    backoff = Backoff()
    steps_between_tries(backoff, 5)
    for _ in range(8):
        backoff.skips()
    backoff.tried(paid=True)
    assert [backoff.skips() for _ in range(3)] == [False] * 3
    backoff.tried(paid=False)
    assert not backoff.skips()
