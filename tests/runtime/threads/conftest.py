"""Ranks as threads: what of the runtime would leave the process, or pause, is replaced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch

from hvd_autosync.runtime.collectives import agreement
from hvd_autosync.runtime.collectives.operations import collectives, rank
from hvd_autosync.runtime.exchange import dispatcher, gradient_exchange
from hvd_autosync.runtime.guard import snapshots
from hvd_autosync.runtime.patches.epochs import Epochs
from hvd_autosync.runtime.state import rank_states, replicas
from hvd_autosync.runtime.sync import local_steps, phases


class StateServerOfThreads:
    """As ``StateServer``, for ranks of one process."""

    _answers: ClassVar[weakref.WeakKeyDictionary[Any, dict[tuple[str, int], Any]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, name: str, answer: Callable[[], bytes]) -> None:
        self._name, self._rank = name, rank()
        self._of_all = self._answers.setdefault(collectives().ranks, {})
        self._of_all[name, self._rank] = answer

    def close(self) -> None:
        pass

    def fetch_all(self) -> list[bytes]:
        others = sorted(key for key in self._of_all if key[0] == self._name)
        return [self._of_all[key]() for key in others if key[1] != self._rank]


@pytest.fixture(autouse=True)
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradient_exchange, rank_states, phases):
        monkeypatch.setattr(module, "StateServer", StateServerOfThreads)
    # The search through all objects of a process takes 50 ms, and finds those of all ranks.
    nothing: list[torch.Tensor] = []
    for owner, name in (
        (local_steps, "running_statistics"),
        (replicas, "running_statistics"),
        (snapshots, "statistics_beside"),
        (replicas, "_schedulers"),
    ):
        monkeypatch.setattr(owner, name, lambda _: nothing)
    monkeypatch.setattr(dispatcher, "_PAUSE_S", 0)
    monkeypatch.setattr(agreement, "_LOOK_S", 0)


class Loader:
    """An epoch of so many batches, whose iterator ``Epochs`` follows.

    Args:
        epochs: Those of this rank.
        batches: How many.
        batch_size: Samples of each.
    """

    def __init__(self, epochs: Epochs, batches: int, batch_size: int = 4) -> None:
        self._epochs, self._batches, self.batch_size = epochs, batches, batch_size

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[int]:
        iterator = _Iterator()
        key = id(iterator)
        self._epochs.on_begin(self, iterator)
        for batch in range(self._batches):
            if self._epochs.is_truncated(key):
                break
            iterator._num_yielded += 1
            self._epochs.on_batch(key, batch)
            yield batch
        self._epochs.on_exhausted(key)
        self._epochs.check()


class _Iterator:
    def __init__(self) -> None:
        self._num_yielded = 0


@pytest.fixture
def loader() -> type[Loader]:
    """The class of loaders."""
    return Loader


class Wrapped(torch.optim.SGD):
    """As Horovod's, a class that was derived from the script's."""


@pytest.fixture
def wrapped() -> type[Wrapped]:
    """A class of optimizers as Horovod makes them."""
    return Wrapped
