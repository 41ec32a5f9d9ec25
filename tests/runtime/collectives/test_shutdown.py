from __future__ import annotations

from hvd_autosync.runtime.collectives.shutdown import ACK, FIN, LEAVE, ShutdownProtocol


def test_a_rank_leaves_when_nothing_is_under_way_and_ends_when_all_leave() -> None:
    protocol = ShutdownProtocol(range(3))
    for rank in range(3):
        protocol.received(FIN, rank)
    assert not protocol.awaited and not protocol.may_leave()
    for rank in (0, 1):
        protocol.received(ACK, rank)
    assert protocol.is_acknowledged(1) and not protocol.is_acknowledged(2)
    assert not protocol.may_leave()
    protocol.received(ACK, 2)
    assert protocol.may_leave() and not protocol.is_over(set())
    protocol.received(LEAVE, 0)
    protocol.received(LEAVE, 1)
    assert not protocol.is_over({1}) and protocol.is_over({2})


def test_an_ack_of_a_fin_is_no_ack_of_a_failure() -> None:
    protocol = ShutdownProtocol(range(3))
    protocol.received(ACK, 1)
    protocol.failed()
    assert not protocol.is_failure_known(0, {2})
    protocol.received(ACK, 1)
    assert protocol.is_failure_known(0, {2}) and not protocol.is_failure_known(0, set())
