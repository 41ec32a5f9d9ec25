"""Which knobs a call owns; what that does to training is in ``workers/cases_arguments.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Adasum, Average, ProcessSet, Sum, global_process_set

from hvd_autosync.runtime.arguments import owned_knobs, with_strategy

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
BOTH = frozenset({"compression", "tensor_groups"})
SGD = torch.optim.SGD([torch.zeros(1)])


@pytest.mark.parametrize(
    "arguments, owned",
    [
        ({}, set()),
        ({"backward_passes_per_step": 4}, set()),
        ({"op": Sum}, set()),
        ({"compression": Compression.fp16}, {"compression"}),
        ({"groups": 2}, {"tensor_groups"}),
        ({"groups": 0}, {"tensor_groups"}),
        ({"groups": [[]]}, {"tensor_groups"}),
        ({"num_groups": 2}, {"tensor_groups"}),
        ({"op": Adasum}, {"tensor_groups"}),
        ({"gradient_predivide_factor": 2.0}, {"tensor_groups"}),
        ({"sparse_as_dense": True}, {"tensor_groups"}),
        ({"process_set": ProcessSet([0])}, {"tensor_groups"}),
        ({"groups": 2, "compression": Compression.fp16}, BOTH),
    ],
)
def test_owned_knobs(arguments: dict[str, Any], owned: set[str]) -> None:
    assert owned_knobs(SGD, DEFAULTS | arguments) == owned


def test_sparse_adam_owns_both() -> None:
    optimizer = torch.optim.SparseAdam([torch.zeros(1)])
    assert owned_knobs(optimizer, DEFAULTS) == BOTH


def test_strategy_fills_what_is_not_owned() -> None:
    strategy: dict[str, Any] = {"groups": 4, "compression": "fp16"}
    filled = with_strategy(DEFAULTS, frozenset(), strategy)
    assert filled == DEFAULTS | {"groups": 4, "compression": Compression.fp16}
    assert with_strategy(DEFAULTS, BOTH, strategy) == DEFAULTS
    assert with_strategy(DEFAULTS, frozenset(), {}) == DEFAULTS
