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
        all_over: Whether every rank has made the steps of its trial.
        all_slow: Whether every rank votes to end the trial as too slow.
        clear: Whether rank 0 ends its trial: the step time is known well enough, or time is up.
        wait_steps: Steps until the next boundary, 1 or more.
        message: What rank 0 has received; ``None`` if nothing, or if it is not ``possible``.
        moved: Whether some rank has made this step in another thread than its first one.
        other_model: Whether some rank has seen that the script trains another model.
    """

    complete: bool
    possible: bool
    all_over: bool
    all_slow: bool
    clear: bool
    wait_steps: int
    message: Message | None
    moved: bool = False
    other_model: bool = False

    @property
    def obstacle(self) -> str:
        """Why ranks cannot act now, although all are there and nothing is under way."""
        if self.moved:
            return "some rank makes its steps in more than one thread"
        return "in each step some rank computes gradients of the next one before the end"


def meet(
    *,
    ready: bool,
    over: bool,
    slow: bool,
    clear: bool,
    wait_steps: int,
    moved: bool,
    other_model: bool,
    receive: Callable[[], Message | None] | None,
) -> Agreement:
    """Agree with the other ranks; a collective, also beside ``join()``.

    A rank that waits in ``join()`` counts as zeros.

    Args:
        ready: Whether this rank can act now.
        over: Whether this rank has made the steps of its trial.
        slow: Whether this rank votes to end the trial as too slow.
        clear: As in :class:`Agreement`; from rank 0.
        wait_steps: Steps until the next boundary; from rank 0.
        moved: Whether this rank has made the step in another thread than its first one.
        other_model: Whether this rank has seen that the script trains another model.
        receive: On rank 0: returns what it has to tell; elsewhere ``None``.
    """
    root = receive is not None
    told = [1, ready, over, slow, clear and root, wait_steps if root else 0, moved, other_model]
    present, are_ready, are_over, are_slow, is_clear, wait, have_moved, have_other = allreduce(
        torch.tensor(told, device="cpu"), name="hvd_autosync.live.boundary", op=Sum
    ).tolist()
    everyone = size()
    complete = present == everyone
    possible = complete and are_ready == everyone
    message = None
    if possible:  # only then other collectives are allowed
        received = receive() if receive is not None else None
        text = tell_all(json.dumps(received).encode() if received else b"", "live")
        message = json.loads(text) if text else None
    over, slow = are_over == everyone, are_slow == everyone
    clear, wait = is_clear > 0, max(wait, 1)
    return Agreement(
        complete, possible, over, slow, clear, wait, message, have_moved > 0, have_other > 0
    )
