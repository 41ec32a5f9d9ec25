"""Which calls of ``DistributedOptimizer`` leave a strategy any room."""

from __future__ import annotations

from typing import Any

from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, Sum, global_process_set

from hvd_autosync.search_space import CATALOGUE

#: The knobs that decide how gradients travel.
EXCHANGE_KNOBS = frozenset(knob.name for knob in CATALOGUE if knob.group != "horovod")


def owned_knobs(arguments: dict[str, Any]) -> frozenset[str]:
    """The knobs that the script's own call leaves no room for: all of the exchange, or none.

    What a script says about how its gradients travel is kept, and taken to Horovod's own optimizer.

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
    return EXCHANGE_KNOBS if decided else frozenset()
