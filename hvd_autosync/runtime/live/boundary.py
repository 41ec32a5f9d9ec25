"""Boundaries: steps after which all ranks learn together what rank 0 has received."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hvd_autosync.runtime.collectives.agreement import tell_all
from hvd_autosync.runtime.collectives.operations import Sum, allreduce, size
from hvd_autosync.runtime.live.helper import Message


@dataclass(frozen=True)
class Agreement:
    """What all ranks know at a boundary.

    Attributes:
        complete: Whether all ranks are there: none waits in ``join()``.
        possible: Whether every rank is there and can act now: none has begun a step.
        all_slow: Whether every rank votes to end the trial as too slow.
        clear: Whether rank 0 finds its steps known well enough.
        wait_steps: Steps until the next boundary, 1 or more.
        message: What rank 0 has received; ``None`` if nothing, or if it is not ``possible``.
    """

    complete: bool
    possible: bool
    all_slow: bool
    clear: bool
    wait_steps: int
    message: Message | None


def meet(
    *,
    ready: bool,
    slow: bool,
    clear: bool,
    wait_steps: int,
    receive: Callable[[], Message | None] | None,
) -> Agreement:
    """Agree with the other ranks; a collective, also beside ``join()``.

    A rank that waits in ``join()`` counts as zeros.

    Args:
        ready: Whether this rank can act now.
        slow: Whether this rank votes to end the trial as too slow.
        clear: As in :class:`Agreement`; from rank 0.
        wait_steps: Steps until the next boundary; from rank 0.
        receive: On rank 0: returns what it has to tell; elsewhere ``None``.
    """
    root = receive is not None
    own = torch.tensor([1, ready, slow, clear and root, wait_steps if root else 0], device="cpu")
    present, are_ready, are_slow, is_clear, wait = allreduce(
        own, name="hvd_autosync.live.boundary", op=Sum
    ).tolist()
    everyone = size()
    complete = present == everyone
    possible = complete and are_ready == everyone
    message = None
    if possible:  # only then other collectives are allowed
        told = receive() if receive is not None else None
        text = tell_all(json.dumps(told).encode() if told else b"", "live")
        message = json.loads(text) if text else None
    return Agreement(complete, possible, are_slow == everyone, is_clear > 0, max(wait, 1), message)
