"""The task that was tuned: the model, the cluster, and the blocked share of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from hvd_autosync.reporting.words import seconds_text, size_text, step_time_text
from hvd_autosync.search_space import Link, Links, ModelProfile, Resources, Task
from hvd_autosync.traces import TrialRecord, default_result
from hvd_autosync.util.amounts import amount


def task_table(task: Task, trials: Sequence[TrialRecord]) -> Table:
    """Return the task as a table with one fact per line.

    Args:
        task: The task.
        trials: All trials.
    """
    table = Table.grid(padding=(0, 2))
    table.add_row("model", model_text(task.model))
    resources = task.resources
    table.add_row("cluster", _cluster_text(resources))
    table.add_row("device", resources.device)
    for name, link in _distinct_links(resources.links):
        table.add_row(name, link_text(link))
    build = resources.build
    offers = [name for name in ("gloo", "mpi", "nccl") if getattr(build, name)]
    table.add_row("Horovod", f"{build.version} with {', '.join(offers) or 'no controller'}")
    default = default_result(trials)
    if default is not None and default.step_time is not None:
        table.add_row("default", f"{step_time_text(default.step_time)} per step")
        if math.isfinite(default.blocked_share):
            share = 100 * default.blocked_share
            table.add_row("blocked", f"{share:.0f} % of the step, waiting for communication")
    return table


def model_text(model: ModelProfile) -> str:
    """Size of the model: parameters, tensors, bytes of gradients."""
    if not model.parameters:
        return "unknown: the job does not use hvd.DistributedOptimizer"
    elements = sum(parameter.elements for parameter in model.parameters)
    largest = max(model.parameters, key=lambda parameter: parameter.size_bytes)
    sparse = sum(parameter.sparse for parameter in model.parameters)
    text = (
        f"{elements:,} parameters in {amount(len(model.parameters), 'tensor')}, "
        f"{size_text(model.size_bytes)} of gradients per step; "
        f"the largest is {largest.name} with {size_text(largest.size_bytes)}"
    )
    return f"{text}; {sparse} with sparse gradients" if sparse else text


def link_text(link: Link) -> str:
    """Return the cost of an allreduce: latency and bandwidth."""
    return (
        f"allreduce over {link.ranks} ranks: latency {seconds_text(link.latency_s)}, bandwidth "
        f"{size_text(link.bandwidth_bytes_per_s)}/s"
    )


def _distinct_links(links: Links) -> list[tuple[str, Link]]:
    """Return the links by name; the link of all ranks is omitted if it equals another one."""
    overall = None if links.overall in (links.within, links.across) else links.overall
    places = (("all ranks", overall), ("within hosts", links.within), ("across", links.across))
    return [(name, link) for name, link in places if link is not None]


def _cluster_text(resources: Resources) -> str:
    hosts = ", ".join(f"{host.name}:{host.slots}" for host in resources.hosts)
    count = len(resources.hosts)
    return f"{amount(resources.world_size, 'rank')} on {amount(count, 'host')} ({hosts})"
