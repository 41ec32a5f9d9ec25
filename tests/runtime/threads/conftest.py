"""Ranks as threads: what of the runtime would leave the process, or pause, is replaced."""

from __future__ import annotations

import json
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")
import torch

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives import agreement
from hvd_autosync.runtime.collectives.operations import collectives, rank, using
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.exchange import dispatcher, gradient_exchange
from hvd_autosync.runtime.guard import snapshots
from hvd_autosync.runtime.patches.epochs import Epochs
from hvd_autosync.runtime.state import normalization, rank_states, replicas
from hvd_autosync.runtime.sync import asynchronous, no_barrier
from hvd_autosync.runtime.sync.asynchronous import Asynchronous
from hvd_autosync.runtime.sync.synchronizer import Synchronizer
from hvd_autosync.search_space.sync_plan import SyncPlan
from hvd_autosync.util import patches


class StateServerOfThreads:
    """As ``StateServer``, for ranks of one process."""

    _answers: ClassVar[weakref.WeakKeyDictionary[Any, dict[tuple[str, int], Any]]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, name: str, answer: Callable[[], bytes]) -> None:
        self._name, self._rank = name, rank()
        agreement.agree_any([False], f"server.{name}")  # to create it is a collective
        self._of_all = self._answers.setdefault(collectives().ranks, {})
        self._of_all[name, self._rank] = answer

    def close(self) -> None:
        pass

    def fetch_all(self) -> list[bytes]:
        others = sorted(key for key in self._of_all if key[0] == self._name)
        return [self._of_all[key]() for key in others if key[1] != self._rank]


class Network:
    """Messages between the ranks of one process, which any of them may deliver."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        #: Name of endpoints, source and destination -> messages.
        self._queues: dict[tuple[str, int, int], deque[tuple[bytes, Any]]] = defaultdict(deque)
        self.endpoints: dict[tuple[str, int], ThreadEndpoint] = {}
        #: Ranks that wait for messages, and hold their locks: nobody else may deliver to them.
        self.waiting: set[int] = set()
        self._delivering = False

    def send(self, name: str, source: int, to: int, head: bytes, body: Any) -> None:
        self._queues[name, source, to].append((head, body))

    def deliver(self, own: int) -> bool:
        """Deliver a message to some rank; returns whether there was one."""
        able = [
            (name, source, to)
            for (name, source, to), queue in sorted(self._queues.items())
            if queue and (to == own or to not in self.waiting)
            if (endpoint := self.endpoints.get((name, to))) and endpoint.takes(queue[0][0])
        ]
        if self._delivering or not able:
            return False
        name, source, to = self._random.choice(able)
        head, body = self._queues[name, source, to].popleft()
        self._delivering = True
        try:
            self.endpoints[name, to].take(source, head, body)
        finally:
            self._delivering = False
        return True

    @property
    def busy(self) -> bool:
        """Whether a message is being handled, so that this thread may not stop."""
        return self._delivering


_NETWORKS: weakref.WeakKeyDictionary[ThreadRanks, Network] = weakref.WeakKeyDictionary()


class ThreadEndpoint:
    """As ``Endpoint``, without a thread of its own."""

    def __init__(self, name: str, on_message: Callable[[int, bytes, memoryview], None]) -> None:
        self._name = name
        self._own: Any = collectives()
        ranks = self._own.ranks
        self._network = _NETWORKS.setdefault(ranks, Network(ranks.random.getrandbits(32)))
        self._network.endpoints[name, rank()] = self
        self._on_message = on_message
        self.owner: Callable[[], Asynchronous | None] = lambda: None

    def takes(self, head: bytes) -> bool:
        """Whether the handler would not wait for this rank to begin a segment."""
        owner = self.owner()
        return owner is not None and json.loads(head)["segment"] <= owner.segment

    def take(self, source: int, head: bytes, body: Any) -> None:
        with using(self._own):
            self._on_message(source, head, memoryview(b"") if body is None else body)

    def send(self, to: int, head: bytes, body: memoryview | None = None) -> None:
        self._network.send(self._name, self._own.rank(), to, head, body)
        if not self._network.busy:
            self._network.deliver(self._own.rank())
            self._own.pass_turn()

    def check(self) -> None:
        if self._own.ranks.failure:
            raise AutosyncError("another rank is gone")
        self._network.waiting.add(self._own.rank())
        if not self._network.deliver(self._own.rank()):
            self._own.pass_turn()
        self._network.waiting.discard(self._own.rank())

    def close_in_background(self) -> None:
        pass


class ThreadAsynchronous(Asynchronous):
    """Lets its endpoint know it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        endpoint: Any = self._endpoint
        endpoint.owner = weakref.ref(self)


@pytest.fixture(autouse=True)
def _no_patch_is_left() -> Iterator[None]:
    before = {*patches._installed}  # of other tests of this process, which install them once
    yield
    own = [name for name in reversed([*patches._installed]) if name not in before]
    assert not [name for name in own if not patches.uninstall(name)]


@pytest.fixture(autouse=True)
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gradient_exchange, rank_states, no_barrier):
        monkeypatch.setattr(module, "StateServer", StateServerOfThreads)
    # The search through all objects of a process takes 50 ms, and finds those of all ranks.
    nothing: list[Any] = []
    for owner, name in (
        (normalization, "running_statistics"),
        (snapshots, "statistics_beside"),
        (replicas, "_schedulers"),
    ):
        monkeypatch.setattr(owner, name, lambda _: nothing)
    # As in a trial: no loss guard, which would share the losses of all ranks.
    monkeypatch.setattr(
        current,
        "run",
        SimpleNamespace(averaged_between_steps=lambda _: None, optimizer_stepped=lambda _: None),
    )
    monkeypatch.setattr(current, "waited", lambda _: None)
    monkeypatch.setattr(dispatcher, "_PAUSE_S", 0)
    monkeypatch.setattr(agreement, "_LOOK_S", 0)
    monkeypatch.setattr(asynchronous, "open_endpoint", ThreadEndpoint)
    monkeypatch.setattr(asynchronous, "_LOOK_S", 0)
    monkeypatch.setattr(no_barrier, "Asynchronous", ThreadAsynchronous)


class Loader:
    """An epoch of so many batches, whose iterator ``Epochs`` follows.

    Args:
        epochs: Those of this rank.
        batches: How many.
        batch_size: Samples of each.
    """

    sampler = batch_sampler = None  # so the batches cannot be split

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

    _sync: Synchronizer
    _hvd_autosync_method = property(lambda self: self._sync.method)


@pytest.fixture
def wrapped() -> type[Wrapped]:
    """A class of optimizers as Horovod makes them."""
    return Wrapped


class Training:
    """One rank's optimizer under a plan, stepped as a strategy optimizer is.

    Args:
        shapes: Shapes of its parameters, which begin as ones.
        plan: The plan.
        momentum: Of SGD, whose learning rate is 0.5.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], plan: SyncPlan, momentum: float = 0.0
    ) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        self.optimizer: Any = Wrapped(self.parameters, lr=0.5, momentum=momentum)
        self.optimizer._requires_update = set(self.parameters)
        self.optimizer._parameter_names = {p: f"p{i}" for i, p in enumerate(self.parameters)}
        self.optimizer._allreduce_delay = dict.fromkeys(self.parameters, 1)
        self.optimizer.op, self.optimizer.gradient_predivide_factor = 0, 1.0
        self.optimizer.backward_passes_per_step = 1
        self.sync = self.optimizer._sync = Synchronizer(plan)
        self.sync.attach(self.optimizer, self.parameters, averaged=True)

    @property
    def method(self) -> Any:
        """The outermost method of its plan."""
        return self.sync.method

    @property
    def epochs(self) -> Epochs:
        """Its epochs, under a plan under which replicas may differ."""
        epochs: Epochs = self.method._progress.epochs
        return epochs

    def step(
        self,
        gradients: Mapping[int, torch.Tensor],
        *,
        in_step: bool = True,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Make a step with gradients by place, in the order of their arrival.

        Args:
            gradients: The gradients.
            in_step: Whether the optimizer alone uses them.
            between: What the script does between ``backward()`` and ``step()``.
        """
        for each in self.parameters:
            each.grad = None
        for place, gradient in gradients.items():
            self.parameters[place].grad = gradient.clone()  # which the test does not hold
            self.method.on_gradient_added(self.parameters[place])
            self.method.on_gradient_ready(self.parameters[place])
        between()

        def own_step() -> None:
            self.method.on_synchronize(in_step=in_step, fresh=True)
            self.optimizer.step()

        self.method.settle_skipped()
        self.method.run_step(own_step)
        self.sync.end_step()

    def scaled_step(
        self, scaler: torch.amp.GradScaler, gradients: Sequence[torch.Tensor], *, used: bool = True
    ) -> bool:
        """Make a step under a gradient scaler, as a script does; return whether it was made.

        Args:
            scaler: The gradient scaler.
            gradients: All gradients, before they are scaled.
            used: Whether the script makes a step of them, unless the scaler skips it.
        """
        scale = scaler.scale(torch.ones(()))
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient * scale
            self.method.on_gradient_added(parameter)
            self.method.on_gradient_ready(parameter)
        self.method.settle_skipped()
        self.method.on_synchronize(in_step=False, fresh=True)
        scaler.unscale_(self.optimizer)
        made = []

        def step() -> None:
            made.append(True)
            self.method.run_step(lambda: type(self.optimizer).step(self.optimizer))
            self.sync.end_step()

        self.optimizer.step = step
        if used:
            scaler.step(self.optimizer)
        del self.optimizer.step
        scaler.update()
        return bool(made)

    def values(self) -> list[torch.Tensor]:
        """Copies of the parameters."""
        return [each.detach().clone() for each in self.parameters]


@pytest.fixture
def begin() -> type[Training]:
    """Begins one rank's training."""
    return Training
