"""The time of one step under a strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hvd_autosync.cost.coefficients import (
    ITEM_S,
    PASS_S_PER_BYTE,
    UNCACHED,
    UNCALIBRATED,
    Coefficients,
)
from hvd_autosync.cost.columns import Columns
from hvd_autosync.cost.exchange_costs import exchange_costs
from hvd_autosync.cost.gradients import Gradients
from hvd_autosync.cost.prepared import Prepared
from hvd_autosync.cost.timeline import FloatArray, Items, Loop
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.search_space import ModelProfile, Resources, Value
from hvd_autosync.search_space.exchange_plan import PARAMETER_CLASSES


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

    def predict(
        self, strategies: Sequence[Mapping[str, Value]], coefficients: Coefficients = UNCALIBRATED
    ) -> FloatArray:
        """Seconds of a step under each strategy, shape ``(c,)``.

        Args:
            strategies: Knobs by name; what is absent stands at its default.
            coefficients: What trials of the task have taught.
        """
        (seconds,) = self.prepare(Columns.of(strategies)).seconds([coefficients])
        return np.asarray(seconds)

    def prepare(self, columns: Columns) -> Prepared:
        """All of a prediction that does not depend on coefficients."""
        items, host_s = None, np.zeros(len(columns))
        if self._resources.world_size > 1 and len(self._gradients.size_bytes):
            items, passes = self._items(columns)
            sent = (items.size_bytes > 0).sum(axis=0)
            host_s = passes * PASS_S_PER_BYTE + sent * ITEM_S
        return Prepared(
            items, self._loop(columns), host_s, columns.words("order") == "priority",
            self._model.forward_s, self._model.backward_s,
        )  # fmt: skip

    def _loop(self, columns: Columns) -> Loop:
        overall = self._resources.links.overall
        uncached = columns.numbers("cache_capacity") == 0
        latency_s = overall.latency_s if overall is not None else 0.0
        return Loop(
            columns.numbers("cycle_time_ms") / 1e3, columns.numbers("fusion_threshold_bytes"),
            latency_s * np.where(uncached, UNCACHED, 1.0),
        )  # fmt: skip

    def _items(self, columns: Columns) -> tuple[Items, FloatArray]:
        """What travels, and the bytes passed over in memory, shape ``(c,)``."""
        gradients = self._gradients
        shape = (len(gradients.size_bytes), len(columns))
        wire_s, operations, alone = np.zeros(shape), np.ones(shape), np.zeros(shape)
        passes = np.zeros(len(columns))
        for name in PARAMETER_CLASSES:
            own = np.flatnonzero(gradients.classes == name)
            if len(own):
                costs = exchange_costs(name, gradients, own, columns, self._resources)
                wire_s[own], operations[own] = costs.wire_s, costs.operations
                alone[own] = costs.alone
                passes += gradients.size_bytes[own] @ costs.passes
        arrival_s = np.broadcast_to(gradients.ready_s[:, None], shape)
        size = np.broadcast_to(gradients.size_bytes[:, None], shape)
        return self._gathered(columns, Items(arrival_s, size, wire_s, operations, alone)), passes

    def _gathered(self, columns: Columns, items: Items) -> Items:
        """Buckets in place of gradients, where a strategy has some.

        They are closed at equal shares of the bytes; one by size holds gradients of all of
        backward, so that all of them are complete at its end.
        """
        count = columns.numbers("buckets")
        some, by_size = count > 0, columns.words("bucket_rule") == "size"
        if not some.any():
            return items
        arrival_s = np.array(items.arrival_s)
        arrival_s[:, some & by_size] = arrival_s[-1, 0]
        reached = np.cumsum(self._gradients.size_bytes) / self._gradients.size_bytes.sum()
        size, wire_s, operations, alone = map(
            np.array, (items.size_bytes, items.wire_s, items.operations, items.alone)
        )
        open_size, open_wire = np.zeros(len(count)), np.zeros(len(count))
        open_operations, open_alone = np.ones(len(count)), np.zeros(len(count))
        closed = np.zeros(len(count))
        for k, share in enumerate(reached):
            open_size += items.size_bytes[k]
            open_wire += items.wire_s[k]
            open_operations = np.maximum(open_operations, items.operations[k])
            open_alone = np.maximum(open_alone, items.alone[k])
            closes = (share * count >= closed + 1 - 1e-9) | (k == len(reached) - 1)
            size[k, some] = np.where(closes, open_size, 0.0)[some]
            wire_s[k, some] = np.where(closes, open_wire, 0.0)[some]
            operations[k, some] = open_operations[some]
            alone[k, some] = open_alone[some]
            closed = np.where(closes, closed + 1, closed)
            open_size = np.where(closes, 0.0, open_size)
            open_wire = np.where(closes, 0.0, open_wire)
            open_operations = np.where(closes, 1.0, open_operations)
            open_alone = np.where(closes, 0.0, open_alone)
        return Items(arrival_s, size, wire_s, operations, alone)
