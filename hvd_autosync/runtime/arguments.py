"""Which arguments of ``DistributedOptimizer`` a strategy may set, and which the script decides."""

from __future__ import annotations

from typing import Any

import torch
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Adasum, global_process_set

from hvd_autosync.search_space.horovod_settings import OPTIMIZER_ARGUMENTS
from hvd_autosync.search_space.knobs import Value


def owned_knobs(optimizer: torch.optim.Optimizer, arguments: dict[str, Any]) -> frozenset[str]:
    """The knobs that the script's own call leaves no room for.

    The reasons are those of ``horovod/torch/optimizer.py``: its grouped path ignores
    ``gradient_predivide_factor`` and ``sparse_as_dense``, asks rank 0 for the order of the
    parameters whatever the process set, and does not exist for Adasum; sparse gradients break
    it, and break decompression.

    Args:
        optimizer: The optimizer to be wrapped.
        arguments: The call's other arguments by name, defaults included.

    Returns:
        Names of knobs, out of ``compression`` and ``tensor_groups``.
    """
    sparse = isinstance(optimizer, torch.optim.SparseAdam)
    owned = set()
    if arguments["compression"] is not Compression.none or sparse:
        owned.add("compression")
    if (
        arguments["groups"] is not None
        or arguments["num_groups"] != 0
        or arguments["op"] == Adasum
        or arguments["gradient_predivide_factor"] != 1.0
        or arguments["sparse_as_dense"]
        or arguments["process_set"] != global_process_set
        or sparse
    ):
        owned.add("tensor_groups")
    return frozenset(owned)


def with_strategy(
    arguments: dict[str, Any], owned: frozenset[str], strategy: dict[str, Value]
) -> dict[str, Any]:
    """``arguments`` with those of the strategy that the script does not own.

    Args:
        arguments: The script's arguments by name.
        owned: As :func:`owned_knobs` returned.
        strategy: The strategy's arguments: ``groups`` (a number) and ``compression`` (a name).
    """
    given = dict(arguments)
    for knob, name in OPTIMIZER_ARGUMENTS.items():
        if name in strategy and knob not in owned:
            value = strategy[name]
            given[name] = getattr(Compression, str(value)) if name == "compression" else value
    return given
