"""Clusters that were not measured, from one that was."""

from __future__ import annotations

from dataclasses import replace

from hvd_autosync.search_space import Host, Link, Links, Resources

#: Where no host with several ranks was measured: memory of an ordinary server, bytes per second.
_MEMORY_BYTES_PER_S = 5e9
#: Seconds of a message between two ranks of a host, and of different hosts, unless told otherwise.
#: The rest of an allreduce without bytes is Horovod's own: its loop and its negotiation.
_LOCAL_HOP_S, _HOP_S = 1e-5, 5e-5


def hypothetical_resources(
    resources: Resources,
    hosts: int,
    slots: int,
    rate_bytes_per_s: float | None = None,
    hop_s: float | None = None,
) -> Resources:
    """``resources`` with another layout and network.

    A ring allreduce of n ranks makes 2 (n - 1) steps, each as slow as the slowest message between
    neighbours, and sends 2 (n - 1) / n bytes through every link for each byte (Patarasuk and Yuan
    2009). Neighbours are ranks of one host but for one pair between any two hosts. What Horovod
    takes to agree on a tensor is taken for the same in every layout.

    Args:
        resources: The cluster whose links were measured.
        hosts: Number of hosts.
        slots: Ranks on each.
        rate_bytes_per_s: What a host sends to others; as measured if ``None``.
        hop_s: Seconds of a message between hosts; 50 microseconds if ``None``.
    """
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
    inside = _ring(slots, memory, _LOCAL_HOP_S, own_within)
    several = hosts > 1
    imagined = Links(
        overall=_ring(hosts * slots, rate, hop, own) if several else inside,
        within=inside if several else None,
        across=_ring(hosts, rate, hop, own_across),
    )
    names = tuple(Host(f"host{number}", slots) for number in range(hosts))
    return replace(resources, hosts=names, links=imagined)


def _own_s(link: Link | None, hop_s: float) -> float:
    """What Horovod itself takes for an allreduce, by a measured link."""
    return max(link.latency_s - 2 * (link.ranks - 1) * hop_s, 0.0) if link else 0.0


def _ring(ranks: int, rate_bytes_per_s: float, hop_s: float, own_s: float) -> Link | None:
    if ranks < 2:
        return None
    steps = 2 * (ranks - 1)
    return Link(ranks, own_s + steps * hop_s, rate_bytes_per_s * ranks / steps)
