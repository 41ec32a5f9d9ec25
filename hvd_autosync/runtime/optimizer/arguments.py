"""Which calls of ``DistributedOptimizer`` leave a strategy any room."""

from __future__ import annotations

from typing import Any

from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, Sum, global_process_set

from hvd_autosync.search_space import CATALOGUE

#: The knobs that decide how gradients travel, and when.
EXCHANGE_KNOBS = frozenset(knob.name for knob in CATALOGUE if knob.group != "horovod")
_SCHEDULE_KNOBS = frozenset(knob.name for knob in CATALOGUE if knob.group == "schedule")


def owned_knobs(arguments: dict[str, Any]) -> frozenset[str]:
    """The knobs that the script's own call leaves no room for.

    What a script says about how its gradients travel is kept, and taken to Horovod's own optimizer.
    Where it sums gradients, its learning rate fits the sum of all ranks, and no single rank's step.

    Args:
        arguments: The call's arguments by name, defaults included.
    """
    decided = (
        arguments["compression"] is not Compression.none
        or arguments["groups"] is not None
        or arguments["num_groups"] != 0
        or arguments["op"] not in (Average, Sum)
        or arguments["sparse_as_dense"]
        or arguments["process_set"] != global_process_set
    )
    if decided:
        return EXCHANGE_KNOBS
    return _SCHEDULE_KNOBS if arguments["op"] == Sum else frozenset()
