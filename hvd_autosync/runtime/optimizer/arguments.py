"""Arguments of ``DistributedOptimizer``: which are possible, and which knobs they fix."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from horovod.torch.compression import Compression as Compression
from horovod.torch.mpi_ops import Adasum, Sum, rocm_built
from horovod.torch.mpi_ops import Average as Average
from horovod.torch.mpi_ops import global_process_set as global_process_set

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.operations import size
from hvd_autosync.search_space.catalogue import REGISTRY
from hvd_autosync.search_space.horovod_settings import is_elastic
from hvd_autosync.search_space.sync_plan import SyncPlan

#: The knobs that decide how and when gradients are exchanged.
EXCHANGE_KNOBS = frozenset(spec.name for spec in REGISTRY if not spec.at_launch)
_SCHEDULE_KNOBS = frozenset(spec.name for spec in REGISTRY if spec.knob.group == "schedule")


def owned_knobs(arguments: dict[str, Any]) -> frozenset[str]:
    """Return the knobs that are fixed by the script's own call.

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


def by_adasum(arguments: Mapping[str, Any]) -> bool:
    """Return whether Horovod makes an optimizer for Adasum, which waits inside ``step()``."""
    return bool(arguments["op"] == Adasum and size() > 1)


def check_arguments(arguments: Mapping[str, Any], plan: SyncPlan) -> None:
    """Make the checks of Horovod's ``DistributedOptimizer``, for classes that are not its own.

    Raises:
        ConfigurationError: The job is elastic, and the plan is more than Horovod's own exchange.
        ValueError: As of ``horovod.torch.DistributedOptimizer``.
    """
    if is_elastic(os.environ) and plan != SyncPlan():
        raise ConfigurationError(
            "an elastic job cannot begin under a strategy with exchange, schedule or protocol "
            "knobs, because its ranks do not create their optimizers together",
            hint="Let it be tuned live, or run it with a fixed number of ranks.",
        )
    if arguments["gradient_predivide_factor"] != 1.0:
        if rocm_built():
            raise ValueError("gradient_predivide_factor not supported yet with ROCm")
        if arguments["op"] != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
    if arguments["backward_passes_per_step"] <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
