"""Phases of ranks in threads: with and without a barrier, with stragglers, in any order of turns.

Messages of steps without a barrier are delivered in an order that is drawn too, where two ranks'
messages to a third may overtake each other. Gradients do not depend on parameters, and steps are
those of plain SGD: so where ranks meet, each gradient has been used once, whoever stepped it.
"""

from __future__ import annotations

import json
import random
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.operations import (
    CollectiveError,
    Sum,
    allreduce,
    collectives,
    join,
    rank,
    size,
    using,
)
from hvd_autosync.runtime.collectives.over_threads import RankDied, ThreadRanks
from hvd_autosync.runtime.guard.handler import LossGuardHandler
from hvd_autosync.runtime.state.group_swap import ParameterGroupSwap
from hvd_autosync.runtime.sync import asynchronous, phases
from hvd_autosync.runtime.sync.asynchronous import Asynchronous
from hvd_autosync.runtime.sync.phases import ProtocolPhases
from hvd_autosync.search_space.protocol import Protocol

_SHAPES = [(4, 3), (5,), (2, 8)]
_RATE = 0.5
_of_fixtures = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class Network:
    """Messages between the ranks of one process, which any of them may deliver."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._queues: dict[tuple[int, int], deque[tuple[bytes, Any]]] = defaultdict(deque)
        self.endpoints: dict[int, ThreadEndpoint] = {}
        #: Ranks that wait for messages, and hold their locks: nobody else may deliver to them.
        self.waiting: set[int] = set()
        self._delivering = False

    def send(self, source: int, to: int, head: bytes, body: Any) -> None:
        self._queues[source, to].append((head, body))

    def deliver(self, own: int) -> bool:
        """Deliver a message to some rank; returns whether there was one."""
        able = [
            pair
            for pair, queue in sorted(self._queues.items())
            if queue and (pair[1] == own or pair[1] not in self.waiting)
            if pair[1] in self.endpoints and self.endpoints[pair[1]].takes(queue[0][0])
        ]
        if self._delivering or not able:
            return False
        source, to = self._random.choice(able)
        head, body = self._queues[source, to].popleft()
        self._delivering = True
        try:
            self.endpoints[to].take(source, head, body)
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

    def __init__(self, on_message: Callable[[int, bytes, memoryview], None]) -> None:
        self._own: Any = collectives()
        self._network = _NETWORKS[self._own.ranks]
        self._network.endpoints[rank()] = self
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
        self._network.send(self._own.rank(), to, head, body)
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
def _messages_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        asynchronous, "open_endpoint", lambda name, on_message: ThreadEndpoint(on_message)
    )
    monkeypatch.setattr(asynchronous, "_LOOK_S", 0)
    monkeypatch.setattr(phases, "Asynchronous", ThreadAsynchronous)
    monkeypatch.setattr(phases, "_VOTE_EVERY", 2)


class Timer:
    """As ``ComputeTimer``, on a clock of the case.

    Args:
        seconds: Seconds of each step, by epoch.
    """

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds

    def waited(self, seconds: float) -> None:
        pass

    def stepped(self) -> float:
        return self._seconds()

    @property
    def seconds(self) -> float:
        return self._seconds()


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        ranks: How many.
        seed: Of the order of their turns and messages.
        protocol: The protocol.
        epochs: Batches of each epoch.
        slow: For each epoch the rank that computes three times as long, or -1.
        momentum: Of SGD.
    """

    ranks: int
    seed: int
    protocol: Protocol
    epochs: tuple[int, ...]
    slow: tuple[int, ...]
    momentum: float = 0.0


@dataclass
class Seen:
    """What one rank has seen.

    Attributes:
        made: The steps that it made, as epoch and place.
        without_barrier: How many of them had no barrier.
        after: The parameters after each epoch.
        step: The last number of steps.
    """

    made: list[tuple[int, int]] = field(default_factory=list)
    without_barrier: int = 0
    after: list[list[torch.Tensor]] = field(default_factory=list)
    step: int = 0


def gradient(of_rank: int, epoch: int, place_in_epoch: int, place: int) -> torch.Tensor:
    seed = 10_000 * of_rank + 1000 * epoch + 10 * place_in_epoch + place
    return torch.randint(
        -3, 4, _SHAPES[place], generator=torch.Generator().manual_seed(seed)
    ).float()


def training(case: Case, loader: Any, wrapped: Any, clocks: dict[int, int]) -> Seen:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in _SHAPES]
    optimizer = wrapped(parameters, lr=_RATE, momentum=case.momentum)
    optimizer._requires_update, optimizer._guard = set(parameters), None
    handler = LossGuardHandler(optimizer)
    own = ProtocolPhases("own", optimizer, case.protocol, handler, None, summed=False)
    epoch, seen = 0, Seen()
    own.compute_timer = Timer(lambda: 3.0 if case.slow[epoch] == rank() else 1.0)  # type: ignore[assignment]
    for epoch, batches in enumerate(case.epochs):
        for place_in_epoch in loader(own._epochs, batches):
            for place, each in enumerate(parameters):
                each.grad = gradient(rank(), epoch, place_in_epoch, place)
                own.arrived(each)
            if own.running:
                swap = ParameterGroupSwap(optimizer)
                swap.make(lambda _: ())
                optimizer.step()
                swap.undo()
                own.exchange()
                seen.without_barrier += 1
                _check_staleness(case, own, clocks)
            else:
                for place, each in enumerate(parameters):
                    each.grad = allreduce(each.grad, name=f"gradient {place}", op=Sum) / size()
                own.rescale([each.grad for each in parameters])
                optimizer.step()
            seen.made.append((epoch, place_in_epoch))
            own.stepped()
        clocks.pop(rank(), None)
        assert own.replicas_in_sync, "an epoch is over"
        seen.after.append([each.detach().clone() for each in parameters])
    own.leave()
    join()
    seen.step = own.step
    return seen


def _check_staleness(case: Case, own: ProtocolPhases, clocks: dict[int, int]) -> None:
    """No rank is further ahead than SSP allows; ranks that have ended the epoch do not count."""
    clocks[rank()] = own._asynchronous.clock
    if case.protocol.kind == "ssp" and len(clocks) == case.ranks:
        # The slowest may have sent the gradient of its next step.
        assert clocks[rank()] - min(clocks.values()) <= case.protocol.staleness + 1


def run(case: Case, loader: Any, wrapped: Any, **faults: Any) -> tuple[ThreadRanks, list[Any]]:
    ranks = ThreadRanks(case.ranks, seed=case.seed, **faults)
    _NETWORKS[ranks] = Network(case.seed)
    clocks: dict[int, int] = {}
    return ranks, ranks.outcomes(lambda: training(case, loader, wrapped, clocks))


def reference(case: Case, seen: list[Seen]) -> list[list[torch.Tensor]]:
    """The parameters after each epoch, by the means over the ranks that made each step."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in _SHAPES]
    optimizer = torch.optim.SGD(parameters, lr=_RATE, momentum=case.momentum)
    after = []
    for epoch, batches in enumerate(case.epochs):
        for step in range(batches):
            made = [r for r, each in enumerate(seen) if (epoch, step) in each.made]
            for place, each in enumerate(parameters):
                gradients = [gradient(r, epoch, step, place) for r in made]
                each.grad = sum(gradients[1:], gradients[0]) / len(made)
            optimizer.step()
        after.append([each.detach().clone() for each in parameters])
    return after


def check(case: Case, seen: list[Any]) -> None:
    for each in seen:
        if isinstance(each, BaseException):
            raise each
    wanted = reference(case, seen)
    assert len({each.step for each in seen}) == 1
    for epoch, whole in enumerate(wanted):
        for place, tensor in enumerate(whole):
            first = seen[0].after[epoch][place]
            torch.testing.assert_close(first, tensor, rtol=1e-5, atol=1e-4)
            assert all(torch.equal(first, each.after[epoch][place]) for each in seen)


@st.composite
def without_barrier(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(2, 4))
    epochs = tuple(draw(st.lists(st.integers(3, 8), min_size=1, max_size=3)))
    protocol = Protocol(
        kind=draw(st.sampled_from(["asp", "ssp"])),
        staleness=draw(st.integers(0, 2)),
        share=draw(st.sampled_from([0.0, 0.0, 0.4])),
        async_first=draw(st.booleans()),
        total=4 * ranks * sum(epochs),
    )
    return Case(ranks, draw(st.integers(0, 10**6)), protocol, epochs, (-1,) * len(epochs))


@st.composite
def with_stragglers(draw: st.DrawFn, policies: tuple[str, ...] = ("elastic",)) -> Case:
    ranks = draw(st.integers(2, 4))
    epochs = tuple(draw(st.lists(st.integers(8, 24), min_size=2, max_size=4)))
    slow = tuple(draw(st.integers(-1, ranks - 1)) for _ in epochs)
    protocol = Protocol(share=1.0, stragglers=draw(st.sampled_from(policies)))
    momentum = draw(st.sampled_from([0.0, 0.5])) if policies == ("elastic",) else 0.0
    return Case(ranks, draw(st.integers(0, 10**6)), protocol, epochs, slow, momentum)


@given(case=without_barrier())
@_of_fixtures
def test_each_gradient_is_used_once_where_ranks_meet(case: Case, loader: Any, wrapped: Any) -> None:
    _, seen = run(case, loader, wrapped)
    check(case, seen)
    if case.protocol.share == 0:
        assert all(each.without_barrier >= sum(case.epochs) - 1 for each in seen)
    assert all(len(each.made) == sum(case.epochs) for each in seen)


@given(case=with_stragglers())
@_of_fixtures
def test_excluded_ranks_take_over_what_the_others_have(
    case: Case, loader: Any, wrapped: Any
) -> None:
    _, seen = run(case, loader, wrapped)
    check(case, seen)
    for r, each in enumerate(seen):
        for epoch, batches in enumerate(case.epochs):
            made = sum(at == epoch for at, _ in each.made)
            assert made == batches or r in case.slow[: epoch + 1], "only stragglers are excluded"


def test_a_straggler_is_excluded(loader: Any, wrapped: Any) -> None:
    case = Case(3, 1, Protocol(share=1.0, stragglers="elastic"), (24, 24), (1, -1))
    _, seen = run(case, loader, wrapped)
    check(case, seen)
    made = [sum(at == 0 for at, _ in each.made) for each in seen]
    assert made[0] == made[2] == 24 and made[1] < 24


@given(case=with_stragglers(("greedy",)))
@_of_fixtures
def test_nobody_waits_for_a_straggler(case: Case, loader: Any, wrapped: Any) -> None:
    _, seen = run(case, loader, wrapped)
    check(case, seen)


# A rank that was to die in a finalizer, which raises nothing, dies in its next operation.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["dies", "breaks"])
@given(
    case=st.one_of(without_barrier(), with_stragglers(("elastic", "greedy"))),
    at=st.integers(0, 60),
    which=st.integers(0, 3),
)
@_of_fixtures
def test_failures_end_all_ranks(
    case: Case, at: int, which: int, kind: str, loader: Any, wrapped: Any
) -> None:
    faults: Any = {"dies": {which % case.ranks: at}} if kind == "dies" else {"breaks_at": at}
    _, seen = run(case, loader, wrapped, **faults)
    failed = [each for each in seen if isinstance(each, BaseException)]
    assert len(failed) in (0, case.ranks)
    assert all(isinstance(each, (CollectiveError, RankDied, AutosyncError)) for each in failed)
