"""Optimizer states that differ between ranks while replicas train separately.

A script saves the optimizer on one rank. That rank fetches the states of the others, and each gets
its own back when the checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from hvd_autosync.errors import AutosyncError, ConfigurationError
from hvd_autosync.runtime.collectives.agreement import tell_all
from hvd_autosync.runtime.collectives.operations import rank, size
from hvd_autosync.runtime.collectives.state_rpc import StateServer
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.state.states import (
    Entry,
    check_states,
    decode_entries,
    encode_entries,
    parameters_of,
    to_device,
)
from hvd_autosync.util.weak_methods import once_gone

#: Longest wait for the end of a step, seconds. It may wait for the rank that asks, in an operation
#: of a closure or a hook of the script's.
_LONGEST_STEP_S = 600.0

#: Place of a parameter among those of the optimizer -> its state.
States = dict[int, dict[str, Any]]


class RankStates:
    """The states of one optimizer on all ranks; creating it is a collective.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        optimizer: The optimizer.

    Attributes:
        rank: This rank; Horovod does not tell it once a script that saves has shut it down.
        lock: Held while the optimizer changes its state.
    """

    def __init__(self, name: str, optimizer: Any) -> None:
        self.rank, self._ranks = rank(), size()
        self.lock = threading.Lock()
        #: The thread within :meth:`changing`.
        self._changing: int | None = None
        self._name = f"states.{name}"
        self._optimizer = weakref.ref(optimizer)
        self._loaded: dict[int, States] = {}
        self._warned = False
        self._state_server = StateServer(self._name, self._answer)
        #: Other ranks may ask until all have called this, or dropped the optimizer.
        self.close = once_gone(optimizer, self._state_server.close)

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Let no other rank read the states meanwhile."""
        with self.lock:
            self._changing = threading.get_ident()
            try:
                yield
            finally:
                self._changing = None

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Let other ranks read the states meanwhile, as this one waits for them in a step."""
        if self._changing != threading.get_ident():
            yield
            return
        self._changing = None
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()
            self._changing = threading.get_ident()

    def can_be_sent(self) -> bool:
        """Return whether this rank could send its states to others; rank 0 prints once why not."""
        try:
            check_states(self._optimizer())
        except ConfigurationError as error:
            if not self._warned:
                warn_on_rank_0(f"local steps do not begin: {error.message}")
            self._warned = True
            return False
        return True

    def save(self) -> dict[int, States]:
        """Return the states of all ranks by rank; this rank's are not copied.

        Raises:
            AutosyncError: A rank cannot be reached, or cannot send its states.
        """
        others = [each for each in range(self._ranks) if each != self.rank]
        with self.waiting():  # a hook of a step may save on every rank
            answers = zip(others, self._state_server.fetch_all(), strict=True)
        return {self.rank: self._own(), **{other: _states(answer) for other, answer in answers}}

    def load(self, saved: dict[int, States]) -> States | None:
        """Return this rank's states of a checkpoint; ``None`` if it has none.

        Args:
            saved: What :meth:`save` returned.
        """
        self._loaded = saved
        return saved.get(self.rank)

    def share(self, root: int) -> None:
        """Distribute to every rank its states from the checkpoint that rank ``root`` has loaded.

        A collective.

        Args:
            root: The rank.
        """
        for each in range(self._ranks):
            states = self._loaded.get(each, {}) if self.rank == root else {}
            text = tell_all(_encoded(states), f"{self._name}.{each}", root)
            if each == self.rank != root:
                self._take(_states(text))
        self.forget_loaded()

    def forget_loaded(self) -> None:
        """Drop a checkpoint's states, which are outdated."""
        self._loaded = {}

    def _take(self, states: States) -> None:
        optimizer = self._optimizer()
        assert optimizer is not None, "its owner is alive"
        for place, parameter in enumerate(parameters_of(optimizer)):
            own = optimizer.state.get(parameter, {})
            for name, value in states.get(place, {}).items():
                if isinstance(own.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
                    own[name].copy_(value)
                else:
                    own[name] = to_device(value, parameter.device) if name != "step" else value

    def _own(self) -> States:
        optimizer = self._optimizer()
        if optimizer is None:
            return {}
        return {
            place: dict(optimizer.state[parameter])
            for place, parameter in enumerate(parameters_of(optimizer))
            if optimizer.state.get(parameter)
        }

    def _answer(self) -> bytes:
        if not self.lock.acquire(timeout=_LONGEST_STEP_S):
            raise AutosyncError(
                f"it has been in optimizer.step() for {_LONGEST_STEP_S:.0f} s",
                hint="If a closure or a hook of the step calls an operation of Horovod's, call "
                "hvd.barrier() on all ranks after optimizer.state_dict().",
            )
        try:
            return _encoded(self._own())
        finally:
            self.lock.release()


def _encoded(states: States) -> bytes:
    return encode_entries([Entry(place, 0, state) for place, state in states.items()])


def _states(data: bytes) -> States:
    return {entry.place: entry.state for entry in decode_entries(data)}
