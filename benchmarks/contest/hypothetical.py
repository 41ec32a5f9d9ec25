"""A hypothetical task of many tensors: its step times are those of the cost model."""

from __future__ import annotations

import math

import numpy as np

from hvd_autosync.cost import CostModel
from hvd_autosync.learner import Observation
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    Link,
    Links,
    ModelProfile,
    ParameterProfile,
    Resources,
    SearchSpace,
    Strategy,
    Task,
    build_space,
)

_NOISE = 0.02


class HypotheticalTask:
    """One task, two ranks on each of two hosts.

    Args:
        tensors: Number of tensors of its model.
        bytes_per_s: Bus bandwidth of a ring among all ranks.
    """

    def __init__(self, tensors: int, bytes_per_s: float = 1e7) -> None:
        parameters = tuple(
            ParameterProfile(f"p{i}", (256, 64 + i), "float32", ready_order=i, ready_s=1e-4 * i)
            for i in range(tensors)
        )
        links = Links(
            Link(4, 1e-3, bytes_per_s), Link(2, 1e-4, 1e9), Link(2, 1e-3, 1.2 * bytes_per_s)
        )
        build = HorovodBuild("0.28.1", gloo=True, mpi=False)
        resources = Resources((Host("a", 2), Host("b", 2)), "cpu", build, links)
        self.task = Task(ModelProfile(parameters, 0.05, 0.1), resources)
        self.cost = CostModel(self.task.model, resources)
        self.space: SearchSpace = build_space(self.task.model, resources, allow=("codec", "order"))

    def measure(self, strategy: Strategy, seed: int) -> Observation:
        """One noisy trial."""
        noise = np.random.default_rng(seed).normal(0, _NOISE)
        return Observation(strategy, float(self.cost.predict([strategy])[0]) * math.exp(noise))

    def source(self, name: str, trials: int) -> Source:
        """A study of so many trials of this task, as a source."""
        points = sobol_points(self.space, trials, len(name))
        seen = tuple(self.measure(self.space.decode(p), i) for i, p in enumerate(points))
        return Source(name, self.task, self.space, seen, 0.9)


def problem(tensors: int, related: int, trials: int) -> tuple[HypotheticalTask, Problem]:
    """A task, and its problem: the sources are studies of it on other networks."""
    here = HypotheticalTask(tensors)
    others = [HypotheticalTask(tensors, 1e7 * 1.5 ** (k + 1)) for k in range(related)]
    sources = tuple(other.source(f"study {k}", trials) for k, other in enumerate(others))
    return here, Problem(here.space, here.task, sources)
