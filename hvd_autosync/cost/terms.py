"""The terms of the cost model, by the names that declarations of knobs give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvd_autosync.cost.async_transfers import async_transfers
from hvd_autosync.cost.bucketing import bucketed
from hvd_autosync.cost.columns import Columns
from hvd_autosync.cost.exchange_costs import exchange_costs
from hvd_autosync.cost.prepared import Prepared
from hvd_autosync.cost.timeline import communication

#: Name of a term (:attr:`hvd_autosync.search_space.knob_spec.KnobSpec.cost`) -> what computes it. A
#: knob without a term does not change a prediction.
TERMS: dict[str, Callable[..., Any]] = {
    "background loop": communication,
    "buckets": bucketed,
    "deferred updates": Prepared.seconds,
    "exchange": exchange_costs,
    "replicas": Columns.exchanges,
    "rounds": Columns.rounds,
    "steps without a barrier": async_transfers,
}
