"""The links between a job's ranks: loaded from the store, or measured by a probe."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable
from dataclasses import asdict

from hvd_autosync.launch.facts import horovod_build
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.runner import TrialProgress, TrialRunner
from hvd_autosync.search_space import Host, Link, Links, Strategy, TrialSpec
from hvd_autosync.traces import TraceStore

_PLACES = {"overall": "of all ranks", "within": "within a host", "across": "across hosts"}
#: Longest time from a launch to the measurement.
_LIMIT_S = 90.0


def cluster_key(job: Job) -> str:
    """Twelve hexadecimal digits, equal for the same hosts, options, settings and Horovod.

    ``localhost`` is a different host on each machine.
    """
    identity = [
        [(host.name, host.slots) for host in job.hosts],
        sorted(job.options),
        job.controller,
        dict(job.held),
        asdict(horovod_build()),
        job.machine,
    ]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def links_of(
    job: Job,
    store: TraceStore,
    runner: TrialRunner,
    say: Callable[[str], None],
    progress: Callable[[TrialProgress], None],
    *,
    remeasure: bool,
) -> Links:
    """Return the links between the ranks of ``job``, without those that cannot be measured.

    Args:
        job: The job.
        store: The store that keeps measured links.
        runner: Runs the probe (:mod:`hvd_autosync.runtime.trial.probe`).
        say: Prints a line for the user.
        progress: Called several times a second during the measurement.
        remeasure: Measure the links even if they are in the store.
    """
    if job.world_size == 1:
        return Links()
    key = cluster_key(job)
    known = None if remeasure else store.find_links(key)
    if known is not None:
        return known
    say(f"measuring the links between the {job.world_size} ranks (takes some seconds)")
    measured: dict[tuple[Host, ...], Link | None] = {}
    parts = _parts(job.hosts)
    for name, part in parts.items():
        if part not in measured:
            spec = TrialSpec(f"probe-{uuid.uuid4().hex}", Strategy(), 0, 0, probe=part)
            result = runner.run(spec, Limits(setup_s=_LIMIT_S), progress)
            measured[part] = result.link
            if result.link is None:
                say(
                    f"the link {_PLACES[name]} could not be measured, tuning continues without "
                    f"it: {result.reason}"
                )
    links = Links(**{name: measured[part] for name, part in parts.items()})
    if None not in measured.values():
        store.keep_links(key, links)
    return links


def _parts(hosts: tuple[Host, ...]) -> dict[str, tuple[Host, ...]]:
    """Return the hosts and slots between which each link is measured.

    Only the ranks of that part run, so that no other ranks load processors and networks.
    """
    parts = {"overall": hosts}
    inside = next((host for host in hosts if host.slots > 1), None)
    if inside is not None:
        parts["within"] = (inside,)
    if len(hosts) > 1:
        parts["across"] = tuple(Host(host.name, 1) for host in hosts)
    return parts
