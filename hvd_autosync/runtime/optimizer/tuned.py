"""A strategy that rank 0 reads for all: from a file, or the best known for a model.

A separate process reads the trace store, so that workers do not import its libraries.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_autosync import extensions
from hvd_autosync.errors import AutosyncError, ConfigurationError
from hvd_autosync.runtime.collectives.agreement import tell_all
from hvd_autosync.runtime.collectives.operations import allgather, local_rank, local_size, rank
from hvd_autosync.runtime.trial.profiling import device_name
from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.exchange_plan import Classes
from hvd_autosync.search_space.strategy_file import read_strategy
from hvd_autosync.util.print_line import print_line
from hvd_autosync.util.program import run_code
from hvd_autosync.util.variables import STORE_VARIABLE

#: Winners may have knobs and choices of extensions, and those may print.
_LOOK_UP = run_code(
    "import sys; answers, sys.stdout = sys.stdout, sys.stderr; "
    "from hvd_autosync import extensions; extensions.load(); "
    "from hvd_autosync.engine.best_known import main; main(answers)"
)
_LIMIT_S = 60.0
#: Environment variables passed to the look-up, which is no rank.
_KEPT = (
    "HOME",
    STORE_VARIABLE,
    extensions.VARIABLE,
    "LD_LIBRARY_PATH",
    "PATH",
    "PYTHONPATH",
    "XDG_DATA_HOME",
)


def of_rank_0(read: Callable[[], tuple[Strategy, Classes]], name: str) -> tuple[Strategy, Classes]:
    """Return what ``read`` returns on rank 0, on every rank; a collective.

    Args:
        read: Reads the strategy; called on rank 0 alone.
        name: Name of the operation.

    Raises:
        ConfigurationError: ``read`` failed; raised on every rank.
    """
    reply = b""
    if rank() == 0:
        try:
            strategy, classes = read()
            reply = json.dumps({"knobs": dict(strategy), "classes": classes}).encode()
        except AutosyncError as error:
            reply = json.dumps({"message": error.message, "hint": error.hint}).encode()
    document = json.loads(tell_all(reply, name))
    if "message" in document:
        raise ConfigurationError(document["message"], hint=document["hint"])
    return read_strategy(document)


def best_known(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.Tensor]] | None
) -> tuple[Strategy, Classes]:
    """Return the winner of the newest study of this model on such a layout of ranks; a collective.

    If there is none, the strategy is empty and rank 0 prints a message.

    Args:
        optimizer: Holds the parameters.
        named: Their names, as given to ``DistributedOptimizer``.
    """
    own = torch.tensor([local_size() if local_rank() == 0 else 0], device="cpu")
    slots = [count for count in allgather(own, name="hvd_autosync.slots").tolist() if count]
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    query = {
        "parameters": _parameters(optimizer, named),
        "slots": slots,
        "device": device_name(device),
    }
    return of_rank_0(lambda: read_strategy(_look_up(query)), "tuned")


def _parameters(
    optimizer: torch.optim.Optimizer, named: Sequence[tuple[str, torch.Tensor]] | None
) -> list[list[Any]]:
    """Name, shape and type of each parameter; names as in Horovod's optimizer."""
    names = {id(parameter): name for name, parameter in named or ()}
    return [
        [
            names.get(id(parameter), f"allreduce.noname.{i}.{j}"),
            list(parameter.shape),
            str(parameter.dtype).removeprefix("torch."),
        ]
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    ]


def _look_up(query: dict[str, Any]) -> dict[str, Any]:
    """Return the document of the best known strategy; without knobs if none is known.

    Raises:
        ConfigurationError: The store cannot be used.
    """
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    try:
        done = subprocess.run(
            _LOOK_UP,
            input=json.dumps(query).encode(),
            env=environment,
            stdout=subprocess.PIPE,
            timeout=_LIMIT_S,
            check=True,
        )
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigurationError(
            f"the best known strategy could not be looked up: {error}",
            hint="Run hvd-autosync traces list to see whether the store can be read.",
        ) from None
    if not found:
        print_line(
            "no strategy is known for this model on these hosts; tune it with horovodrun --autosync"
        )
        return {"knobs": {}}
    if "message" in found:
        raise ConfigurationError(found["message"], hint=found["hint"])
    return found
