"""What is measured of a cluster, and what of it tells two clusters apart."""

import math
from dataclasses import replace

import pytest

from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    Link,
    Links,
    ModelProfile,
    ParameterProfile,
    Resources,
    Task,
)


def across(mbit: float, ranks: int = 2) -> Links:
    """A link across hosts that sends ``mbit`` per second."""
    reduced = mbit * 1e6 / 8 * ranks / (2 * (ranks - 1))
    return Links(across=Link(ranks, 1e-3, reduced))


MODEL = ModelProfile((ParameterProfile("weight", (8, 4), "float32"),))
CLUSTER = Resources(
    (Host("a", 2), Host("b", 1)), "cpu", HorovodBuild("0.28.1", gloo=True, mpi=False), across(95)
)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_bus_carries_what_a_ring_sends(ranks: int) -> None:
    """Each of n ranks sends 2 (n - 1) parts of n of the message."""
    link = Link(ranks, 0.0, 1e6)
    assert link.bus_bytes_per_s == pytest.approx(sum(1e6 / ranks for _ in range(2 * (ranks - 1))))


@pytest.mark.parametrize(
    "values",
    [
        (1, 0.0, 1e6),
        (0, 0.0, 1e6),
        (2, -1e-9, 1e6),
        (2, math.nan, 1e6),
        (2, 0.0, 0.0),
        (2, 0.0, math.inf),
    ],
)
def test_impossible_links(values: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError, match="impossible"):
        Link(*values)


def test_json_round_trip() -> None:
    links = Links(Link(3, 2e-3, 5e6), Link(2, 1e-4, 1e9), Link(2, 1e-3, 1e7))
    resources = replace(CLUSTER, links=links)
    assert Resources.from_json(resources.to_json()) == resources
    assert "cores" not in resources.to_json()  # as in traces of earlier versions
    spare = replace(resources, cores=3)
    assert Resources.from_json(spare.to_json()) == spare
    assert spare.identity() == resources.identity()


@pytest.mark.parametrize(
    "changed",
    [
        replace(CLUSTER, hosts=(Host("x", 1), Host("y", 2))),
        replace(CLUSTER, links=across(106)),
        replace(CLUSTER, links=across(80, ranks=3)),
        replace(CLUSTER, links=replace(across(95), overall=Link(3, 5e-3, 1e6))),
    ],
    ids=["other names", "a bit faster", "more ranks", "another overall link"],
)
def test_the_fingerprint_stays(changed: Resources) -> None:
    assert Task(MODEL, changed).fingerprint == Task(MODEL, CLUSTER).fingerprint


@pytest.mark.parametrize(
    "changed",
    [
        Task(replace(MODEL, parameters=(ParameterProfile("weight", (8, 5), "float32"),)), CLUSTER),
        Task(MODEL, replace(CLUSTER, hosts=(Host("a", 2), Host("b", 2)))),
        Task(MODEL, replace(CLUSTER, hosts=(Host("a", 3),))),
        Task(MODEL, replace(CLUSTER, links=across(940))),
        Task(MODEL, replace(CLUSTER, links=Links())),
        Task(MODEL, replace(CLUSTER, device="H100")),
    ],
    ids=["shapes", "world size", "layout", "network", "no network measured", "device"],
)
def test_the_fingerprint_differs(changed: Task) -> None:
    assert changed.fingerprint != Task(MODEL, CLUSTER).fingerprint
