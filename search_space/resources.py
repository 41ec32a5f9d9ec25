"""What a job runs on: hosts, slots, devices, links, and what this Horovod build offers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class HorovodBuild:
    """What the installed Horovod was built with (``horovodrun --check-build``)."""

    version: str
    gloo: bool
    mpi: bool
    nccl: bool = False


@dataclass(frozen=True)
class Link:
    """Cost of an allreduce among some ranks, as seconds = latency + bytes / bandwidth.

    Attributes:
        ranks: How many ranks took part.
        latency_s: Seconds of an allreduce of no bytes, Horovod's negotiation included.
        bandwidth_bytes_per_s: Bytes of gradient reduced per second, in large messages.

    Raises:
        ValueError: The numbers are impossible.
    """

    ranks: int
    latency_s: float
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        latency_s, bandwidth = float(self.latency_s), float(self.bandwidth_bytes_per_s)
        if self.ranks < 2 or not 0 <= latency_s < math.inf or not 0 < bandwidth < math.inf:
            raise ValueError(f"{self} is impossible")

    @property
    def bus_bytes_per_s(self) -> float:
        """What each rank sends per second meanwhile: comparable with the rate of a network.

        A ring allreduce of n ranks sends 2 (n - 1) / n bytes for each byte reduced ("bus
        bandwidth" in ``doc/PERFORMANCE.md`` of nccl-tests).
        """
        return self.bandwidth_bytes_per_s * 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Links:
    """What was measured between the ranks; ``None`` where nothing was, or there is no such pair.

    Attributes:
        overall: Among all ranks.
        within: Among the ranks of one host, the first that has several.
        across: Between one rank of each host.
    """

    overall: Link | None = None
    within: Link | None = None
    across: Link | None = None

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Links:
        """The links that :meth:`to_json` wrote."""
        return cls(**{name: Link(**link) if link else None for name, link in fields.items()})


@dataclass(frozen=True)
class Host:
    """One host and how many of its slots the job uses."""

    name: str
    slots: int


#: Rates of networks, Mbit/s. A link belongs to the class of the nearest.
_NETWORKS_MBIT = (10, 100, 1_000, 10_000, 25_000, 100_000, 400_000)


def network_class(link: Link) -> int:
    """The rate of the network that a link across hosts resembles most, in Mbit/s."""
    mbit = link.bus_bytes_per_s * 8 / 1e6
    return min(_NETWORKS_MBIT, key=lambda rate: abs(math.log(mbit / rate)))


@dataclass(frozen=True)
class Resources:
    """The cluster as the job sees it.

    Attributes:
        hosts: Hosts in rank order, with the slots in use.
        device: ``"cpu"`` or the accelerator's name.
        build: What the installed Horovod offers.
        links: The links between the ranks.
    """

    hosts: tuple[Host, ...]
    device: str
    build: HorovodBuild
    links: Links = Links()

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(host.slots for host in self.hosts)

    @property
    def several_hosts(self) -> bool:
        """Whether ranks are on more than one host."""
        return len(self.hosts) > 1

    @property
    def two_levels(self) -> bool:
        """Whether there are several hosts with several ranks each (anything hierarchical)."""
        return self.several_hosts and all(host.slots > 1 for host in self.hosts)

    @property
    def even_levels(self) -> bool:
        """Whether there are two levels and all hosts have the same number of ranks."""
        return self.two_levels and len({host.slots for host in self.hosts}) == 1

    @property
    def has_gpu(self) -> bool:
        """Whether ranks compute on accelerators."""
        return self.device != "cpu"

    def identity(self) -> list[Any]:
        """What makes two clusters the same for tuning: layout, device, build, class of network.

        Names of hosts are left out, and so is what no two measurements agree on.
        """
        across = self.links.across
        return [
            sorted(host.slots for host in self.hosts),
            self.device,
            asdict(self.build),
            network_class(across) if across else None,
        ]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Resources:
        """The resources that :meth:`to_json` wrote."""
        return cls(
            hosts=tuple(Host(**host) for host in fields["hosts"]),
            device=fields["device"],
            build=HorovodBuild(**fields["build"]),
            links=Links.from_json(fields["links"]),
        )
