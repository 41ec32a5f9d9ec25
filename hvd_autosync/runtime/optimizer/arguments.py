"""Which knobs the arguments of ``DistributedOptimizer`` fix."""

from __future__ import annotations

from typing import Any

from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, Sum, global_process_set

from hvd_autosync.search_space.catalogue import REGISTRY

#: The knobs that decide how and when gradients are exchanged.
EXCHANGE_KNOBS = frozenset(spec.name for spec in REGISTRY if not spec.at_launch)
_SCHEDULE_KNOBS = frozenset(spec.name for spec in REGISTRY if spec.knob.group == "schedule")


def owned_knobs(arguments: dict[str, Any]) -> frozenset[str]:
    """The knobs that are fixed by the script's own call.

    Arguments that say how gradients are exchanged are kept, and passed to Horovod's own optimizer.
    If a script sums gradients, its learning rate fits the sum over all ranks, and no single rank's
    step.

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
