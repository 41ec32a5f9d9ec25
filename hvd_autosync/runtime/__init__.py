"""The runtime inside each rank of a job.

``install.hooks.install`` waits for ``horovod.torch``. From then on ``DistributedOptimizer`` is
ours: it exchanges gradients as the strategy says, except where the script's own arguments decide.
In a trial the run also counts and times its steps, reports to the driver, and ends on all ranks
together at a step boundary. Importing this package imports neither torch nor Horovod.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvd_autosync.runtime.current import average, in_trial, mark_step, outcome, report
    from hvd_autosync.runtime.install.activation import activate
    from hvd_autosync.runtime.optimizer.optimizer import DistributedOptimizer

__all__ = [
    "DistributedOptimizer",
    "activate",
    "average",
    "in_trial",
    "mark_step",
    "outcome",
    "report",
]

_MODULES = {
    "DistributedOptimizer": "optimizer.optimizer",
    "activate": "install.activation",
    "average": "current",
    "in_trial": "current",
    "mark_step": "current",
    "outcome": "current",
    "report": "current",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
