"""The cost model: the time of one step under a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from hvd_autosync.cost.async_transfers import ASYNC_PASSES, async_transfers
from hvd_autosync.cost.bucketing import bucketed, deferrable_share
from hvd_autosync.cost.coefficients import (
    CONTENTION,
    DEVICE_SHARE,
    ITEM_S,
    PASS_S_PER_BYTE,
    UNCACHED,
    UNCALIBRATED,
    Coefficients,
)
from hvd_autosync.cost.columns import Columns
from hvd_autosync.cost.exchange_costs import exchange_costs
from hvd_autosync.cost.gradients import Gradients
from hvd_autosync.cost.phases import Phases
from hvd_autosync.cost.prepared import Prepared
from hvd_autosync.cost.timeline import FloatArray, Items, Loop
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.search_space import ModelProfile, Resources, Value
from hvd_autosync.search_space.exchange_plan import LARGE, PARAMETER_CLASSES

#: Passes over the parameters' memory of an averaging (``runtime/sync/averaging.py``).
_AVERAGE_PASSES = 8.0
#: Largest product of gradients, strategies and sets of coefficients that are simulated at once; a
#: simulation keeps about ten numbers for each.
_CELLS_AT_ONCE = 4_000_000


class CostModel:
    """Simulates steps of one model on one cluster.

    Args:
        model: The model's profile, with times.
        resources: The cluster, with the link among all ranks.

    Raises:
        ConfigurationError: The profile has no times, or the links are not known.
    """

    def __init__(self, model: ModelProfile, resources: Resources) -> None:
        if resources.world_size > 1 and resources.links.overall is None:
            raise ConfigurationError(
                "the links between the ranks are not known",
                hint="Tune a job on this cluster first; that measures them.",
            )
        if not np.isfinite([model.forward_s, model.backward_s]).all():
            raise ConfigurationError(
                "the profile of the model has no times of forward and backward",
                hint="Tune the job first; its default trial measures them.",
            )
        self._model = model
        self._resources = resources
        self._gradients = Gradients.of(model)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters whose gradients are exchanged, in the order of their arrival."""
        return self._gradients.names

    def predict(
        self, strategies: Sequence[Mapping[str, Value]], coefficients: Coefficients = UNCALIBRATED
    ) -> FloatArray:
        """Predict the seconds of a step under each strategy, shape ``(c,)``.

        Args:
            strategies: Values of knobs by name; absent knobs have their default.
            coefficients: The factors, as calibrated on trials of the task.
        """
        (seconds,) = self.seconds(Columns.of(strategies), [coefficients])
        return np.asarray(seconds)

    def seconds(self, columns: Columns, coefficients: Sequence[Coefficients]) -> FloatArray:
        """Predict the seconds of a step, shape ``(b, c)`` for ``b`` sets of coefficients.

        Args:
            columns: The ``c`` strategies.
            coefficients: At least one set.
        """
        each = max(len(self._gradients.size_bytes), 1) * len(coefficients)
        found = [
            self.phases(part).seconds(coefficients)
            for part in columns.parts(max(_CELLS_AT_ONCE // each, 1))
        ]
        return np.concatenate([np.empty((len(coefficients), 0)), *found], axis=1)

    def phases(self, columns: Columns) -> Phases:
        """Return the part of a prediction that does not depend on coefficients."""
        sync, share = self.prepare(columns), columns.bsp_share()
        return Phases(sync, self._without_barrier(sync) if (share < 1).any() else None, share)

    def _without_barrier(self, sync: Prepared) -> Prepared:
        """Return the same steps without a barrier; other knobs matter only by the cycle time."""
        if sync.items is None:
            return sync
        count = len(sync.host_s)
        nothing, once = np.zeros(count), np.ones(count)
        sent_s = ASYNC_PASSES * float(self._gradients.size_bytes.sum()) * PASS_S_PER_BYTE
        return replace(
            sync,
            items=async_transfers(self._gradients, self._resources, count),
            loop=Loop(nothing, nothing, self._latency_s * once),
            host_s=sent_s * once,
            after_s=nothing,
            local=once,
            deferrable=nothing,
        )

    def prepare(self, columns: Columns) -> Prepared:
        """Return the steps under BSP, up to the coefficients."""
        items, host_s = None, np.zeros(len(columns))
        after_s, deferrable = np.zeros((2, len(columns)))
        waits = (columns.words("order") == "priority") & ~columns.replicated
        local = columns.rounds()
        device = "accelerator" if self._resources.has_gpu else "cpu"
        if self._resources.world_size > 1 and len(self._gradients.size_bytes):
            items, after_s, passes = self._items(columns)
            if waits.any():
                deferrable = deferrable_share(self._gradients, columns, self._resources)
            large = int((self._gradients.classes == LARGE).sum())
            slices = large * (columns.numbers("large_slices") - 1)
            sent = (items.size_bytes > 0).sum(axis=0) + slices
            over_all = _AVERAGE_PASSES * DEVICE_SHARE[device] * self._gradients.size_bytes.sum()
            averaged = np.where(local > 1, over_all, 0.0)
            host_s = ((passes + averaged) * PASS_S_PER_BYTE + sent * ITEM_S) / local
        loop = self._loop(columns)
        fused = np.minimum(loop.fusion_bytes / max(float(self._gradients.size_bytes.sum()), 1.0), 1)
        return Prepared(
            items,
            loop,
            host_s,
            after_s,
            local,
            np.where(waits, (1.0 - fused) * deferrable, 0.0),
            CONTENTION[device],
            self._model.forward_s,
            self._model.backward_s,
            loop.cycle_s,
            self._latency_s,
        )

    @property
    def _latency_s(self) -> float:
        overall = self._resources.links.overall
        return overall.latency_s if overall is not None else 0.0

    def _loop(self, columns: Columns) -> Loop:
        uncached = columns.numbers("cache_capacity") == 0
        return Loop(
            columns.numbers("cycle_time_ms") / 1e3,
            columns.numbers("fusion_threshold_bytes"),
            self._latency_s * np.where(uncached, UNCACHED, 1.0),
        )

    def _items(self, columns: Columns) -> tuple[Items, FloatArray, FloatArray]:
        """Return the items on the wire, with what follows them, as of :class:`Prepared`.

        The third is the bytes of passes over memory, shape ``(c,)``.
        """
        gradients = self._gradients
        shape = (len(gradients.size_bytes), len(columns))
        wire_s, operations, alone = np.zeros(shape), np.ones(shape), np.zeros(shape)
        latency = np.ones(shape)
        after_s, passes = np.zeros((2, len(columns)))
        for name in PARAMETER_CLASSES:
            own = np.flatnonzero(gradients.classes == name)
            if len(own):
                costs = exchange_costs(name, gradients, own, columns, self._resources)
                wire_s[own], operations[own] = costs.wire_s, costs.operations
                alone[own], latency[own] = costs.alone, costs.latency
                after_s += costs.after_s.sum(axis=0)
                passes += gradients.size_bytes[own] @ costs.passes
        # Parameters to average are all ready at once.
        every_step = columns.rounds() == 1
        arrival_s = np.where(every_step, gradients.ready_s[:, None], 0.0)
        size = np.broadcast_to(gradients.size_bytes[:, None], shape)
        items = Items(arrival_s, size, wire_s, operations, alone, latency)
        return bucketed(gradients, columns, self._resources, items), after_s, passes
