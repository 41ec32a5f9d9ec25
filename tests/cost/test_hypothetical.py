from __future__ import annotations

import pytest

from hvd_autosync.cost.hypothetical import hypothetical_resources
from hvd_autosync.search_space import Resources


def test_more_hosts_take_longer_for_nothing_and_as_long_for_bytes(slow_network: Resources) -> None:
    large = hypothetical_resources(slow_network, 64, 8, 10e9 / 8)
    assert large.world_size == 512 and large.even_levels
    overall, across, within = large.links.overall, large.links.across, large.links.within
    assert overall is not None and across is not None and within is not None
    assert (overall.ranks, across.ranks, within.ranks) == (512, 64, 8)
    assert overall.bus_bytes_per_s == pytest.approx(10e9 / 8)
    assert across.bus_bytes_per_s == pytest.approx(10e9 / 8)
    assert within.bus_bytes_per_s == pytest.approx(slow_network.links.within.bus_bytes_per_s)  # type: ignore[union-attr]
    # What Horovod itself took among four ranks and among two, and the ring's steps.
    own_s = (2e-3 - 6 * 5e-5) - (1e-3 - 2 * 5e-5)
    assert overall.latency_s - across.latency_s == pytest.approx(own_s + 2 * (511 - 63) * 5e-5)


def test_a_flat_ring_is_no_faster_than_its_links_inside_a_host(slow_network: Resources) -> None:
    for slots, bus in ((8, 2e9), (1, 100e9 / 8)):
        links = hypothetical_resources(slow_network, 64, slots, 100e9 / 8).links
        assert links.overall is not None and links.across is not None
        assert links.overall.bus_bytes_per_s == pytest.approx(bus)
        assert links.across.bus_bytes_per_s == pytest.approx(100e9 / 8)


def test_the_same_layout_has_the_same_network(slow_network: Resources) -> None:
    same = hypothetical_resources(slow_network, 2, 2).links
    for name in ("overall", "across", "within"):
        estimated, measured = getattr(same, name), getattr(slow_network.links, name)
        assert estimated.bus_bytes_per_s == pytest.approx(measured.bus_bytes_per_s), name
        assert estimated.latency_s == pytest.approx(measured.latency_s), name


def test_a_slower_message_takes_longer(slow_network: Resources) -> None:
    quick, slow = (
        hypothetical_resources(slow_network, 2, 2, None, hop).links.across for hop in (5e-6, 5e-4)
    )
    assert quick is not None and slow is not None
    assert slow.latency_s - quick.latency_s == pytest.approx(2 * (5e-4 - 5e-6))


def test_one_host_has_no_network(slow_network: Resources) -> None:
    alone = hypothetical_resources(slow_network, 1, 4).links
    assert alone.across is None and alone.within is None
    assert alone.overall is not None and alone.overall.ranks == 4
    assert hypothetical_resources(slow_network, 1, 1).links.overall is None
