from __future__ import annotations

from hvd_autosync.runtime.collectives.shutdown import GOODBYE, LEAVE, THANKS, ShutdownProtocol


def test_a_rank_leaves_when_nothing_is_under_way_and_ends_when_all_leave() -> None:
    farewell = ShutdownProtocol(range(3))
    for rank in range(3):
        farewell.heard(GOODBYE, rank)
    assert not farewell.awaited and not farewell.may_leave()
    for rank in (0, 1):
        farewell.heard(THANKS, rank)
    assert farewell.has_parted(1) and not farewell.has_parted(2)
    assert not farewell.may_leave()
    farewell.heard(THANKS, 2)
    assert farewell.may_leave() and not farewell.is_over(set())
    farewell.heard(LEAVE, 0)
    farewell.heard(LEAVE, 1)
    assert not farewell.is_over({1}) and farewell.is_over({2})


def test_thanks_for_a_goodbye_are_no_thanks_for_a_failure() -> None:
    farewell = ShutdownProtocol(range(3))
    farewell.heard(THANKS, 1)
    farewell.failed()
    assert not farewell.is_known(0, {2})
    farewell.heard(THANKS, 1)
    assert farewell.is_known(0, {2}) and not farewell.is_known(0, set())
