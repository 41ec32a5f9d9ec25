"""Which knobs a call owns; what that does to training is in ``workers/cases_arguments.py``."""

from __future__ import annotations

from typing import Any

import pytest
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Adasum, Average, Max, ProcessSet, Sum, global_process_set

from hvd_autosync.runtime.optimizer.arguments import owned_knobs
from hvd_autosync.search_space import CATALOGUE

DEFAULTS: dict[str, Any] = {
    "compression": Compression.none,
    "backward_passes_per_step": 1,
    "op": Average,
    "gradient_predivide_factor": 1.0,
    "num_groups": 0,
    "groups": None,
    "sparse_as_dense": False,
    "process_set": global_process_set,
}


@pytest.mark.parametrize(
    "arguments", [{}, {"backward_passes_per_step": 4}, {"gradient_predivide_factor": 2.0}]
)
def test_calls_that_leave_the_exchange_open(arguments: dict[str, Any]) -> None:
    assert owned_knobs(DEFAULTS | arguments) == frozenset()


def test_a_call_that_sums_owns_the_schedule_alone() -> None:
    schedule = {knob.name for knob in CATALOGUE if knob.group == "schedule"}
    assert owned_knobs(DEFAULTS | {"op": Sum}) == schedule


@pytest.mark.parametrize(
    "arguments",
    [
        {"compression": Compression.fp16},
        {"groups": 2},
        {"groups": 0},
        {"groups": [[]]},
        {"num_groups": 2},
        {"op": Adasum},
        {"op": Max},
        {"sparse_as_dense": True},
        {"process_set": ProcessSet([0])},
    ],
)
def test_calls_that_decide_the_exchange(arguments: dict[str, Any]) -> None:
    owned = owned_knobs(DEFAULTS | arguments)
    assert {"buckets", "rest_exchange", "large_codec"} <= owned
    assert "cycle_time_ms" not in owned
