"""Trains one copy of a model under one plan, a step at a time."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import horovod.torch as hvd
import torch

from hvd_autosync.runtime.optimizer.strategy_optimizer import make_strategy_optimizer
from hvd_autosync.search_space.exchange_plan import ExchangePlan
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.sync_plan import SyncPlan

from .models import Workload


class Trainer:
    """A model and its distributed optimizer.

    Args:
        name: Distinguishes it from other trainers of the same job.
        workload: The model.
        plan: How its gradients travel; ``None``: by Horovod's own optimizer.
        protocol: Whether ranks wait for each other; ``None``: in every step.
        autocast: Whether forward computes in bfloat16.
    """

    def __init__(
        self,
        name: str,
        workload: Workload,
        plan: ExchangePlan | None,
        protocol: Protocol | None = None,
        *,
        autocast: bool = False,
    ) -> None:
        self.name = name
        self._autocast = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
        self.model, self._losses = workload.make()
        base = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        named = [(f"{name}.{each}", p) for each, p in self.model.named_parameters()]
        if plan is None:
            self.optimizer = hvd.DistributedOptimizer(base, named)
        else:
            classes = {
                each: tuple(f"{name}.{pattern}" for pattern in patterns)
                for each, patterns in workload.classes.items()
            }
            arguments: dict[str, Any] = {
                "compression": hvd.Compression.none,
                "backward_passes_per_step": 1,
                "op": hvd.Average,
                "gradient_predivide_factor": 1.0,
            }
            self.optimizer = make_strategy_optimizer(
                base, named, SyncPlan(plan, classes, None, protocol), arguments
            )

    def step(self) -> float:
        """Make one step; its seconds."""
        begin = perf_counter()
        self.optimizer.zero_grad()
        with self._autocast:
            loss = next(self._losses)
        loss.backward()
        self.optimizer.step()
        return perf_counter() - begin

    @property
    def bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())
