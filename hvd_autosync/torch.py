"""``import hvd_autosync.torch as hvd``: all of ``horovod.torch``, with an optional strategy.

For scripts whose own arguments decide how gradients are exchanged, and for users who want no import
hooks::

    import hvd_autosync.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy="tuned")

``hvd.init()`` fixes the settings of the launch (fusion threshold, cycle time, controller).
:func:`DistributedOptimizer` warns about knobs of a strategy that it cannot set.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

#: All that this module does not define. Under the flag its import brings what acts there, which
#: imports modules of the runtime: before any of them is imported here. It is not imported by a
#: statement, which would be refused: what is used here comes through the runtime.
_horovod = import_module("horovod.torch")

from hvd_autosync import extensions
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.operation_names import name_operations
from hvd_autosync.runtime.collectives.operations import rank as _rank
from hvd_autosync.runtime.optimizer.arguments import (
    EXCHANGE_KNOBS,
    Average,
    Compression,
    global_process_set,
    owned_knobs,
)
from hvd_autosync.runtime.optimizer.optimizer import (
    broadcast_optimizer_state as broadcast_optimizer_state,
)
from hvd_autosync.runtime.optimizer.optimizer import distribute
from hvd_autosync.runtime.optimizer.tuned import best_known, of_rank_0
from hvd_autosync.search_space import Strategy, Value
from hvd_autosync.search_space.documents import read_toml
from hvd_autosync.search_space.exchange_plan import Classes
from hvd_autosync.search_space.horovod_settings import horovod_settings
from hvd_autosync.search_space.strategy_file import read_strategy
from hvd_autosync.search_space.sync_plan import sync_plan

if TYPE_CHECKING:
    import torch

    from hvd_autosync.runtime.collectives.operations import ProcessSet

#: Name of the best strategy in the store for this model on the same number of ranks per host.
TUNED = "tuned"


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    strategy: Mapping[str, Value] | str | os.PathLike[str] | None = None,
    classes: Classes | None = None,
) -> torch.optim.Optimizer:
    """Wrap an optimizer as Horovod's ``DistributedOptimizer`` does, under a strategy.

    Args:
        optimizer: As in ``horovod.torch.DistributedOptimizer``.
        named_parameters: As in Horovod.
        compression: As in Horovod; cannot be combined with a strategy, nor can ``groups`` and
            ``process_set``.
        backward_passes_per_step: As in Horovod.
        op: As in Horovod.
        gradient_predivide_factor: As in Horovod.
        num_groups: As in Horovod.
        groups: As in Horovod.
        sparse_as_dense: As in Horovod.
        process_set: As in Horovod.
        strategy: Knobs by name; the path of a strategy file; ``"tuned"`` for the best exact
            strategy in the store for this model on the same devices and number of ranks per host;
            ``None`` for the strategy of the launch, if there is one.
        classes: Class -> names of parameters, if ``strategy`` is a mapping of knobs.

    Raises:
        ConfigurationError: The strategy cannot be read or does not fit; raised on all ranks.
    """
    named = None if named_parameters is None else list(named_parameters)
    arguments = {
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups,
        "groups": groups,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    if strategy is None:
        owned = owned_knobs(arguments)
        return distribute(optimizer, named, arguments, current.sync_plan, owned)
    if "buckets" in owned_knobs(arguments):
        raise ConfigurationError(
            "strategy= cannot be combined with op=Adasum, or with an own compression, groups or "
            "process set, which say how gradients are exchanged",
            hint="Remove strategy=, or these arguments.",
        )
    name_operations()
    chosen, members = _chosen(strategy, classes, optimizer, named)
    return distribute(optimizer, named, arguments, sync_plan(chosen, members), EXCHANGE_KNOBS)


def _chosen(
    strategy: Mapping[str, Value] | str | os.PathLike[str],
    classes: Classes | None,
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]] | None,
) -> tuple[Strategy, Classes]:
    extensions.load()  # only a job under the flag has loaded them
    if isinstance(strategy, Mapping):
        tables = {k: v if isinstance(v, str) else list(v) for k, v in (classes or {}).items()}
        chosen, members = read_strategy({"knobs": dict(strategy), "classes": tables})
    elif classes is not None:
        raise ConfigurationError(
            f"classes={classes!r} given with strategy={strategy!r}, which has its own classes",
            hint="Remove classes=, or pass the strategy as a mapping of knobs.",
        )
    elif strategy == TUNED:
        chosen, members = best_known(optimizer, named)
    else:
        path = os.fspath(strategy)
        chosen, members = of_rank_0(
            lambda: read_strategy(read_toml(path, "the strategy file")), "file"
        )
    _warn_of_launch_knobs(chosen)
    return chosen, members


def _warn_of_launch_knobs(strategy: Strategy) -> None:
    """Warn about knobs that only the launch can set and has not set."""
    settings = horovod_settings(strategy)
    missing = [f"{k}={v}" for k, v in settings.environment if os.environ.get(k) != v]
    if settings.options:
        missing.append(f"{' '.join(settings.options)} of horovodrun")
    if missing and _rank() == 0:
        warnings.warn(
            f"the strategy has settings that cannot be changed after the launch: "
            f"{', '.join(missing)}; start the job with them, as hvd-autosync run does",
            stacklevel=4,
        )


def __getattr__(name: str) -> Any:
    if name.startswith("__"):  # with its path, modules in it would be there twice
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_horovod, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_horovod)})
