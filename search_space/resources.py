"""What a job runs on: hosts, slots, devices, links, and what this Horovod build offers."""

from __future__ import annotations

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
    """Cost of an allreduce between ranks, as seconds = latency + bytes / bandwidth.

    Attributes:
        latency_s: Seconds of an allreduce of no bytes, Horovod's negotiation included.
        bandwidth_bytes_per_s: Bytes of gradient reduced per second, in large messages.
    """

    latency_s: float
    bandwidth_bytes_per_s: float

    def allreduce_s(self, size_bytes: float) -> float:
        """Seconds to reduce ``size_bytes``."""
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Host:
    """One host and how many of its slots the job uses."""

    name: str
    slots: int


@dataclass(frozen=True)
class Resources:
    """The cluster as the job sees it.

    Attributes:
        hosts: Hosts in rank order, with the slots in use.
        device: ``"cpu"`` or the accelerator's name.
        build: What the installed Horovod offers.
        within: Measured link between the ranks of one host; ``None`` where not measured.
        across: Measured link between hosts; ``None`` on one host or where not measured.
    """

    hosts: tuple[Host, ...]
    device: str
    build: HorovodBuild
    within: Link | None = None
    across: Link | None = None

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
    def has_gpu(self) -> bool:
        """Whether ranks compute on accelerators."""
        return self.device != "cpu"

    def identity(self) -> list[Any]:
        """What makes two clusters the same for tuning: layout, device, build; no host names."""
        return [sorted(host.slots for host in self.hosts), self.device, asdict(self.build)]

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
            within=Link(**fields["within"]) if fields["within"] else None,
            across=Link(**fields["across"]) if fields["across"] else None,
        )
