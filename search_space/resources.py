"""The resources of a job: hosts, slots, devices, links and Horovod's build."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from hvd_autosync.search_space.records import LEFT_OUT, Real, Record


@dataclass(frozen=True)
class HorovodBuild:
    """The capabilities of the installed Horovod (``horovodrun --check-build``)."""

    version: str
    gloo: bool
    mpi: bool
    nccl: bool = False


@dataclass(frozen=True)
class Link(Record):
    """Cost of an allreduce among some ranks, as seconds = latency + bytes / bandwidth.

    Attributes:
        ranks: Number of ranks in the allreduce.
        latency_s: Seconds of an allreduce without data, including Horovod's negotiation.
        bandwidth_bytes_per_s: Bytes of gradients reduced per second, in large messages.

    Raises:
        ValueError: A number is impossible.
    """

    ranks: int
    latency_s: Real
    bandwidth_bytes_per_s: Real

    def __post_init__(self) -> None:
        latency_s, bandwidth = float(self.latency_s), float(self.bandwidth_bytes_per_s)
        if self.ranks < 2 or not 0 <= latency_s < math.inf or not 0 < bandwidth < math.inf:
            raise ValueError(f"{self} is impossible")

    @property
    def bus_bytes_per_s(self) -> float:
        """Bytes that each rank sends per second, comparable with a network's rate.

        A ring allreduce of n ranks sends 2 (n - 1) / n bytes for each byte reduced ("bus
        bandwidth" in ``doc/PERFORMANCE.md`` of nccl-tests).
        """
        return self.bandwidth_bytes_per_s * 2 * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class Links(Record):
    """The measured links between the ranks; ``None`` if not measured or not present.

    Attributes:
        overall: Link among all ranks.
        within: Link among the ranks of one host, the first with several ranks.
        across: Link among one rank of each host.
    """

    overall: Link | None = None
    within: Link | None = None
    across: Link | None = None


@dataclass(frozen=True)
class Host:
    """One host and the number of its slots that the job uses."""

    name: str
    slots: int


#: Classes of networks by rate, Mbit/s; a link belongs to the nearest.
_NETWORKS_MBIT = (10, 100, 1_000, 10_000, 25_000, 100_000, 400_000)


def network_class(link: Link) -> int:
    """Return the class of a link across hosts: the nearest network rate, in Mbit/s."""
    mbit = link.bus_bytes_per_s * 8 / 1e6
    return min(_NETWORKS_MBIT, key=lambda rate: abs(math.log(mbit / rate)))


@dataclass(frozen=True)
class Resources(Record):
    """The cluster of a job.

    Attributes:
        hosts: Hosts in rank order, with the slots in use.
        device: ``"cpu"`` or the accelerator's name.
        build: Capabilities of the installed Horovod.
        links: The links between the ranks.
        cores: Least number of cores that a rank has to itself; 0: unknown.
    """

    hosts: tuple[Host, ...]
    device: str
    build: HorovodBuild
    links: Links = Links()
    cores: int = field(default=0, metadata=LEFT_OUT)

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
        """Whether there are several hosts with several ranks each, as hierarchical knobs need."""
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
        """Return the fields by which tuning compares clusters.

        These are layout, device, build and network class; host names and exact measurements are
        left out.
        """
        across = self.links.across
        return [
            sorted(host.slots for host in self.hosts),
            self.device,
            asdict(self.build),
            network_class(across) if across else None,
        ]
