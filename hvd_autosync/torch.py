"""``import hvd_autosync.torch as hvd``: all of ``horovod.torch``, and a strategy by choice.

For scripts that say themselves how their gradients travel, and for those who want no import hooks::

    import hvd_autosync.torch as hvd

    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), strategy="tuned")

What belongs to the launch (fusion threshold, cycle time, controller) is fixed when ``hvd.init()``
is called; :func:`DistributedOptimizer` says which of a strategy's knobs it could not set.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import horovod.torch as _horovod
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, ProcessSet, global_process_set

from hvd_autosync.documents import read_toml
from hvd_autosync.runtime import current
from hvd_autosync.runtime.arguments import EXCHANGE_KNOBS
from hvd_autosync.runtime.optimizer import distribute
from hvd_autosync.runtime.tuned import best_known
from hvd_autosync.search_space import Strategy, Value
from hvd_autosync.search_space.exchange_plan import Classes, ExchangePlan, exchange_plan
from hvd_autosync.search_space.horovod_settings import horovod_settings
from hvd_autosync.search_space.strategy_file import read_strategy

if TYPE_CHECKING:
    import torch

#: Word for the best strategy that the store has for this model on these hosts.
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
    """Horovod's ``DistributedOptimizer``, under a strategy.

    Args:
        optimizer: As of ``horovod.torch.DistributedOptimizer``, like all up to ``process_set``.
        named_parameters: As there.
        compression: As there; like ``groups`` and ``process_set``, it leaves no room for a
            strategy.
        backward_passes_per_step: As there.
        op: As there.
        gradient_predivide_factor: As there.
        num_groups: As there.
        groups: As there.
        sparse_as_dense: As there.
        process_set: As there.
        strategy: Knobs by name; the path of a strategy file; ``"tuned"`` for the best known for
            this model on these hosts, by the store; ``None`` for that of the job, if it is tuned.
        classes: Class -> names of parameters, where ``strategy`` is given as knobs.

    Raises:
        ConfigurationError: The strategy cannot be read, or does not fit; on all ranks.
    """
    named = None if named_parameters is None else list(named_parameters)
    plan, members, owned = current.plan, current.classes, frozenset[str]()
    if strategy is not None:
        plan, members = _chosen(strategy, classes or {}, optimizer, named)
        owned = EXCHANGE_KNOBS
    arguments = {
        "compression": compression, "backward_passes_per_step": backward_passes_per_step,
        "op": op, "gradient_predivide_factor": gradient_predivide_factor,
        "num_groups": num_groups, "groups": groups, "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }  # fmt: skip
    return distribute(optimizer, named, arguments, plan, members, owned)


def _chosen(
    strategy: Mapping[str, Value] | str | os.PathLike[str], classes: Classes,
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]] | None,
) -> tuple[ExchangePlan | None, Classes]:  # fmt: skip
    if isinstance(strategy, Mapping):
        document = {"knobs": dict(strategy), "classes": {k: list(v) for k, v in classes.items()}}
        chosen, members = read_strategy(document)
    elif strategy == TUNED:
        chosen, members = best_known(optimizer, named)
    else:
        chosen, members = read_strategy(read_toml(os.fspath(strategy), "the strategy file"))
    _tell_what_is_late(chosen)
    return exchange_plan(chosen), members


def _tell_what_is_late(strategy: Strategy) -> None:
    """Warn about knobs that only a launch can set, unless it has."""
    settings = horovod_settings(strategy)
    missing = [f"{k}={v}" for k, v in settings.environment if os.environ.get(k) != v]
    if missing and _horovod.rank() == 0:
        warnings.warn(
            f"the strategy needs {' '.join(missing)} in the environment of every rank, set before "
            "hvd.init(): run it with hvd-autosync run, or set them yourself", stacklevel=3,
        )  # fmt: skip


def __getattr__(name: str) -> Any:
    return getattr(_horovod, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_horovod)})
