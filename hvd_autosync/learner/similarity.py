"""The similarity of two tasks, by what their models demand of their clusters.

Two tasks are similar if their step times depend on the same knobs in the same way. That depends on
the bytes sent, the number of tensors and their parameter classes, the ratio of communication to
computation, and the number of ranks and levels. The descriptor has a number for each, scaled so
that a difference of 1 matters.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from hvd_autosync.learner.points import FloatArray
from hvd_autosync.search_space import Resources, Task
from hvd_autosync.search_space.exchange_plan import PARAMETER_CLASSES, REST, parameter_classes

#: Logarithms of the factors that are a difference of 1: large for bytes, small for most counts and
#: times.
_LARGE_FACTOR, _FACTOR = math.log(10), math.log(4)
#: Shares of bytes that differ by this are a difference of 1.
_SHARE = 0.3
#: Substitutes for what was not measured: a network of 1 Gbit/s, a latency of 1 ms, 10 ms of
#: computation.
_BYTES_PER_S, _LATENCY_S, _COMPUTE_S = 1.25e8, 1e-3, 1e-2


def similarity(one: Task, other: Task) -> float:
    """Return the similarity from 0, nothing in common, to 1, alike; 0 across kinds of devices.

    It is 0 if a model has no parameters: jobs that reduce gradients by hand show none, so they
    cannot be told apart.
    """
    if one.resources.device != other.resources.device:
        return 0.0
    if not one.model.parameters or not other.model.parameters:
        return 0.0
    difference = descriptor(one) - descriptor(other)
    return math.exp(-0.5 * float(difference @ difference))


@lru_cache(maxsize=8)  # one task is compared with many
def descriptor(task: Task) -> FloatArray:
    """Return the numbers that are compared, shape ``(11,)``; a difference of 1 matters."""
    model, resources = task.model, task.resources
    sent = [p for p in model.parameters if p.ready_order >= 0]
    members = parameter_classes(model)
    classes = {name: each for each, names in members.items() for name in names}
    sizes = [p.size_bytes for p in sent]
    size = dict.fromkeys(PARAMETER_CLASSES, 0.0)
    for parameter, size_bytes in zip(sent, sizes, strict=True):
        size[classes.get(parameter.name, REST)] += size_bytes
    total = float(max(sum(sizes), 1))
    touched = sum(s * p.touched_rows for p, s in zip(sent, sizes, strict=True)) / total
    compute_s = float(np.nan_to_num(model.forward_s + model.backward_s, nan=_COMPUTE_S))
    bytes_per_s, latency_s = _network(resources)
    return np.array(
        [
            math.log(total) / _LARGE_FACTOR,
            math.log(max(*sizes, 1, 1)) / _LARGE_FACTOR,
            math.log(max(len(sent), 1)) / _FACTOR,
            *(size[name] / total / _SHARE for name in PARAMETER_CLASSES),
            touched / _SHARE,
            math.log(total / bytes_per_s / max(compute_s, 1e-6)) / _FACTOR,
            math.log(max(len(sent), 1) * latency_s / max(compute_s, 1e-6)) / _LARGE_FACTOR,
            math.log(resources.world_size) / _FACTOR,
            float(resources.several_hosts) + float(resources.two_levels),
        ]
    )


def _network(resources: Resources) -> tuple[float, float]:
    """Bandwidth and latency of an allreduce among all ranks, measured or substituted."""
    link = resources.links.overall
    if link is None:
        return _BYTES_PER_S, _LATENCY_S
    return link.bandwidth_bytes_per_s, max(link.latency_s, 1e-6)
