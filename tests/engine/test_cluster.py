"""When the links of a cluster are measured, and when they are known."""

from dataclasses import replace

import pytest

from hvd_autosync.engine.cluster import cluster_key, links_of
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host, Link, Links, TrialResult, TrialSpec, TrialStatus
from hvd_autosync.traces import TraceStore

JOB = Job(("-np", "2"), ("python", "train.py"), (Host("a", 1), Host("b", 1)))


class Probe:
    """A runner whose probes measure another bandwidth each time, or fail."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails
        self.runs = 0
        self.parts: list[list[tuple[str, int]]] = []

    def run(self, spec: TrialSpec, limits: object, progress: object) -> TrialResult:
        assert spec.probe and spec.measured_steps == 0
        self.runs += 1
        self.parts.append([(host.name, host.slots) for host in spec.probe])
        if self.fails:
            return TrialResult(TrialStatus.CRASHED, "rank 1 was killed by SIGKILL")
        link = Link(2, 1e-3, 1e7 * self.runs)
        return TrialResult(TrialStatus.COMPLETED, link=link)

    def close(self) -> None:
        raise AssertionError("the probe does not own the runner")


@pytest.fixture
def store() -> TraceStore:
    return TraceStore("sqlite://")


def ask(
    store: TraceStore,
    probe: Probe,
    job: Job = JOB,
    *,
    remeasure: bool = False,
    said: list[str] | None = None,
) -> Links:
    say = [].append if said is None else said.append
    return links_of(job, store, probe, say, lambda progress: None, remeasure=remeasure)


def test_each_link_is_measured_alone(store: TraceStore) -> None:
    probe = Probe()
    links = ask(store, probe, replace(JOB, hosts=(Host("a", 1), Host("b", 2), Host("c", 3))))
    assert probe.parts == [
        [("a", 1), ("b", 2), ("c", 3)],
        [("b", 2)],
        [("a", 1), ("b", 1), ("c", 1)],
    ]
    found = [links.overall, links.within, links.across]
    assert [link and link.bandwidth_bytes_per_s for link in found] == [1e7, 2e7, 3e7]


@pytest.mark.parametrize(
    ("hosts", "same"), [((Host("a", 2),), "within"), ((Host("a", 1), Host("b", 1)), "across")]
)
def test_what_is_the_same_is_measured_once(
    store: TraceStore, hosts: tuple[Host, ...], same: str
) -> None:
    probe = Probe()
    links = ask(store, probe, replace(JOB, hosts=hosts))
    assert probe.parts == [[(host.name, host.slots) for host in hosts]]
    assert links == Links(links.overall, **{same: links.overall}) != Links()


def test_a_cluster_is_measured_once(store: TraceStore) -> None:
    probe = Probe()
    assert ask(store, probe) == ask(store, probe) != Links()
    assert probe.runs == 1


def test_other_hosts_are_measured_too(store: TraceStore) -> None:
    probe = Probe()
    ask(store, probe)
    ask(store, probe, replace(JOB, hosts=(Host("a", 1), Host("c", 1))))
    ask(store, probe, replace(JOB, hosts=(Host("a", 2),)))
    ask(store, probe, replace(JOB, options=("-np", "2", "--network-interfaces", "ib0")))
    runs = probe.runs
    ask(store, probe, replace(JOB, command=("python", "other.py")))
    assert probe.runs == runs == 4


def test_measuring_again_replaces_the_stored_links(store: TraceStore) -> None:
    probe = Probe()
    first, second = ask(store, probe), ask(store, probe, remeasure=True)
    assert first != second == ask(store, probe)


def test_links_that_cannot_be_measured_are_reported_and_tried_again(store: TraceStore) -> None:
    said: list[str] = []
    assert ask(store, Probe(fails=True), said=said) == Links()
    assert "rank 1 was killed by SIGKILL" in said[-1]
    assert ask(store, Probe()) != Links()


def test_one_rank_has_no_links(store: TraceStore) -> None:
    probe = Probe()
    assert ask(store, probe, replace(JOB, hosts=(Host("a", 1),))) == Links()
    assert probe.runs == 0


@pytest.mark.parametrize("damaged", [[], {"across": 5}, {"across": {"ranks": 1}}, {"nobody": None}])
def test_damaged_links_are_measured_again(store: TraceStore, damaged: object) -> None:
    class Damaged(Links):
        def to_json(self) -> object:  # type: ignore[override]
            return damaged

    probe = Probe()
    store.keep_links(cluster_key(JOB), Damaged())
    assert ask(store, probe) != Links()
    assert probe.runs == 1
