"""Hypothetical clusters, extrapolated from a measured one."""

from __future__ import annotations

from dataclasses import replace

from hvd_autosync.search_space import Host, Link, Links, Resources

#: Memory bandwidth of an ordinary server, bytes per second, if no host with several ranks was
#: measured.
_MEMORY_BYTES_PER_S = 5e9
#: Default seconds of a message between two ranks of a host, and of different hosts. The rest of an
#: allreduce without bytes is Horovod's own: its background loop and its negotiation.
_LOCAL_HOP_S, _HOP_S = 1e-5, 5e-5


def hypothetical_resources(
    resources: Resources,
    hosts: int | None,
    slots: int | None,
    rate_bytes_per_s: float | None = None,
    hop_s: float | None = None,
) -> Resources:
    """Return ``resources`` with another layout and network.

    A ring allreduce of n ranks has 2 (n - 1) steps, each as slow as the slowest message between
    neighbours, and sends 2 (n - 1) / n bytes per byte over every link (Patarasuk and Yuan 2009).
    Neighbours in the ring are on the same host, except for one pair between consecutive hosts. The
    time of Horovod's negotiation is assumed to be the same in every layout.

    Args:
        resources: The cluster whose links were measured.
        hosts: Number of hosts; ``None``: as many as measured.
        slots: Ranks on each host; ``None``: as on the first measured one. If ``hosts`` is ``None``,
            too, the hosts stay as they are.
        rate_bytes_per_s: Network bandwidth of a host; ``None``: as measured.
        hop_s: Seconds of a message between hosts; ``None``: 50 microseconds.
    """
    layout = resources.hosts
    if hosts is not None or slots is not None:
        ranks = slots or layout[0].slots
        layout = tuple(Host(f"host{number}", ranks) for number in range(hosts or len(layout)))
    largest = max(host.slots for host in layout)
    links = resources.links
    across = links.across or links.overall
    within = links.within if resources.several_hosts else links.overall
    rate = rate_bytes_per_s or (across.bus_bytes_per_s if across else _MEMORY_BYTES_PER_S)
    memory = within.bus_bytes_per_s if within else _MEMORY_BYTES_PER_S
    hop = hop_s or _HOP_S
    measured_hop = _HOP_S if resources.several_hosts else _LOCAL_HOP_S
    own = _own_s(links.overall, measured_hop)
    own_across = _own_s(across, measured_hop)
    own_within = _own_s(within, _LOCAL_HOP_S) if within else own
    inside = _ring(largest, memory, _LOCAL_HOP_S, own_within)
    several = len(layout) > 1
    slowest = min(rate, memory) if largest > 1 else rate
    extrapolated = Links(
        overall=_ring(sum(host.slots for host in layout), slowest, hop, own) if several else inside,
        within=inside if several else None,
        across=_ring(len(layout), rate, hop, own_across),
    )
    most = max(host.slots for host in resources.hosts)
    cores = resources.cores * most // largest
    return replace(resources, hosts=layout, links=extrapolated, cores=cores)


def _own_s(link: Link | None, hop_s: float) -> float:
    """Return Horovod's own part of the latency of an allreduce on a measured link."""
    return max(link.latency_s - 2 * (link.ranks - 1) * hop_s, 0.0) if link else 0.0


def _ring(ranks: int, rate_bytes_per_s: float, hop_s: float, own_s: float) -> Link | None:
    if ranks < 2:
        return None
    steps = 2 * (ranks - 1)
    return Link(ranks, own_s + steps * hop_s, rate_bytes_per_s * ranks / steps)
