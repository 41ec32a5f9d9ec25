"""Phases of ranks in threads: with and without a barrier, with stragglers, in any order of turns.

Messages of steps without a barrier are delivered in an order that is drawn too, where two ranks'
messages to a third may overtake each other. Gradients do not depend on parameters, and steps are
those of plain SGD: so where ranks meet, each gradient has been used once, whoever stepped it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.collectives.operations import CollectiveError, Sum, allreduce, join, rank
from hvd_autosync.runtime.collectives.over_threads import RankDied, ThreadRanks
from hvd_autosync.runtime.patches.epochs import SyncPoint
from hvd_autosync.runtime.sync import no_barrier
from hvd_autosync.runtime.sync.phase import Votes
from hvd_autosync.runtime.sync.phases import ProtocolPhases
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan

_SHAPES = [(4, 3), (5,), (2, 8)]
_RATE = 0.5


@pytest.fixture(autouse=True)
def _votes_in_every_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Votes, "EVERY", 2)


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


def training(case: Case, loader: Any, begin: Any, clocks: dict[int, int]) -> Seen:
    own = begin(_SHAPES, SyncPlan(protocol=case.protocol), momentum=case.momentum)
    epoch, seen = 0, Seen()
    own.method.compute_timer = Timer(lambda: 3.0 if case.slow[epoch] == rank() else 1.0)
    for epoch, batches in enumerate(case.epochs):
        for at in loader(own.epochs, batches):
            running = own.method.running
            seen.without_barrier += running
            own.step({place: gradient(rank(), epoch, at, place) for place in range(len(_SHAPES))})
            if running and own.method.running:
                _check_staleness(case, own.method, clocks)
            seen.made.append((epoch, at))
        clocks.pop(rank(), None)
        assert own.sync.replicas_in_sync, "an epoch is over"
        seen.after.append(own.values())
    own.method.before_sharing()
    join()
    seen.step = own.method.step
    return seen


def _check_staleness(case: Case, own: ProtocolPhases, clocks: dict[int, int]) -> None:
    """No rank is further ahead than SSP allows; ranks that have ended the epoch do not count."""
    clocks[rank()] = own._no_barrier.asynchronous.clock
    if case.protocol.kind == "ssp" and len(clocks) == case.ranks:
        # The slowest may have sent the gradient of its next step.
        assert clocks[rank()] - min(clocks.values()) <= case.protocol.staleness + 1


def run(case: Case, loader: Any, begin: Any, **faults: Any) -> tuple[ThreadRanks, list[Any]]:
    ranks = ThreadRanks(case.ranks, seed=case.seed, **faults)
    clocks: dict[int, int] = {}
    return ranks, ranks.outcomes(lambda: training(case, loader, begin, clocks))


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
@settings(max_examples=30)
def test_each_gradient_is_used_once_where_ranks_meet(case: Case, loader: Any, begin: Any) -> None:
    _, seen = run(case, loader, begin)
    check(case, seen)
    if case.protocol.share == 0:
        assert all(each.without_barrier >= sum(case.epochs) - 1 for each in seen)
    assert all(len(each.made) == sum(case.epochs) for each in seen)


@given(case=with_stragglers())
@settings(max_examples=30)
def test_excluded_ranks_take_over_what_the_others_have(case: Case, loader: Any, begin: Any) -> None:
    _, seen = run(case, loader, begin)
    check(case, seen)
    for r, each in enumerate(seen):
        for epoch, batches in enumerate(case.epochs):
            made = sum(at == epoch for at, _ in each.made)
            assert made == batches or r in case.slow[: epoch + 1], "only stragglers are excluded"


def test_a_straggler_is_excluded(loader: Any, begin: Any) -> None:
    case = Case(3, 1, Protocol(share=1.0, stragglers="elastic"), (24, 24), (1, -1))
    _, seen = run(case, loader, begin)
    check(case, seen)
    made = [sum(at == 0 for at, _ in each.made) for each in seen]
    assert made[0] == made[2] == 24 and made[1] < 24


def test_nothing_is_left_out_of_rounds_before_steps_without_a_barrier(
    loader: Any, begin: Any
) -> None:
    """The last average under a codec has all of them but what exchanges before have left out."""
    protocol = Protocol(kind="asp", share=0.5, total=4 * 2 * 48)
    exchange = ExchangePlan(1, rest=ClassPlan(codec="topk", ratio=0.06))

    def body() -> float:
        own = begin(_SHAPES, SyncPlan(exchange, schedule=Schedule(4), protocol=protocol))
        rounds = own.method.inner
        for at in loader(own.epochs, 48):
            local = rounds.running
            own.step({place: torch.ones(shape) for place, shape in enumerate(_SHAPES)})
            if own.method.running:
                assert local and not any(
                    each.any() for each in rounds._averaging.dispatcher.left_outs
                )
                before = sum(float(each.sum()) for each in rounds.inner.dispatcher.left_outs)
                changed = sum(float((1 - each).sum()) for each in own.values())
                return changed / _RATE + before - (at + 1) * sum(map(math.prod, _SHAPES))
        raise AssertionError("steps had a barrier to the end")

    ranks = ThreadRanks(2, seed=1)
    assert ranks.run(body) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("protocol", "problem"),
    [
        (Protocol(), "steps without a barrier cannot begin"),
        (Protocol(share=1.0, stragglers="elastic"), "a straggler cannot be excluded"),
    ],
    ids=["asp", "elastic"],
)
def test_ranks_do_not_part_whose_states_could_not_be_sent_later(
    protocol: Protocol, problem: str, loader: Any, begin: Any
) -> None:
    """It is an error on all ranks, before any of them has made a step without the others."""

    def body() -> None:
        own = begin(_SHAPES, SyncPlan(protocol=protocol))
        own.method.compute_timer = Timer(lambda: 1.0 if rank() == 1 else 3.0)
        if rank() == 1:
            own.optimizer.state[own.parameters[1]]["odd"] = object()
        for at in loader(own.epochs, 24):
            own.step({place: gradient(rank(), 0, at, place) for place in range(len(_SHAPES))})

    said = f"{problem}; rank 1: the state of the optimizer holds a value of type object"
    for outcome in ThreadRanks(2, seed=1).outcomes(body):
        assert isinstance(outcome, AutosyncError), outcome
        assert said in outcome.message and "state['odd']" in outcome.message


@pytest.mark.parametrize(
    "protocol",
    [
        Protocol(kind="asp", share=0.4, async_first=True, total=4 * 2 * 48),
        Protocol(share=1.0, stragglers="elastic"),
    ],
    ids=["asp", "elastic"],
)
def test_ranks_that_step_together_again_have_one_loss_scale(
    protocol: Protocol, loader: Any, begin: Any
) -> None:
    """Rank 0 has overflowed without rank 1, without a barrier or while that is excluded."""
    case = Case(2, 1, protocol, (24, 24), (1, -1))

    def body() -> tuple[dict[str, Any], list[torch.Tensor]]:
        own = begin(_SHAPES, SyncPlan(protocol=protocol))
        epoch, skipped = 0, False
        own.method.compute_timer = Timer(lambda: 3.0 if case.slow[epoch] == rank() else 1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for epoch, batches in enumerate(case.epochs):
            for at in loader(own.epochs, batches):
                gradients = [gradient(rank(), epoch, at, place) for place in range(len(_SHAPES))]
                if rank() == 0 and epoch == 0 and at == 16:
                    gradients[0].fill_(torch.inf)
                    skipped = own.method.running or bool(own.method._membership.absent)
                own.scaled_step(scaler, gradients)
        assert skipped is (rank() == 0)
        assert not own.method.running
        return scaler.state_dict(), own.values()

    ranks = ThreadRanks(case.ranks, seed=case.seed)
    (scale, first), (other, second) = ranks.run(body)
    assert scale == other and scale["scale"] == 512
    assert all(map(torch.equal, first, second))


class Locked(dict[Any, Any]):
    """A dictionary that may be used under a lock only."""

    def __init__(self, lock: Any) -> None:
        super().__init__()
        self._lock = lock
        self.read = 0

    def get(self, *arguments: Any) -> Any:
        assert self._lock._is_owned()
        self.read += 1
        return super().get(*arguments)

    def __setitem__(self, *arguments: Any) -> None:
        assert self._lock._is_owned()
        super().__setitem__(*arguments)

    def clear(self) -> None:
        assert self._lock._is_owned()
        super().clear()


def test_versions_that_messages_bring_are_read_under_the_lock(
    loader: Any, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, made = no_barrier.Asynchronous, []

    def creating(*arguments: Any, **keywords: Any) -> Any:
        own = create(*arguments, **keywords)
        own._versions = Locked(own._changed)
        made.append(own._versions)
        return own

    monkeypatch.setattr(no_barrier, "Asynchronous", creating)
    case = Case(2, 1, Protocol("asp"), (8,), (-1,))
    _, seen = run(case, loader, begin)
    check(case, seen)
    assert len(made) == 2 and all(each.read and len(each) for each in made)


class Held:
    """Holds iterators, as loaders with persistent workers do."""

    def __init__(self) -> None:
        self._iterators: list[Any] = []

    def hold(self, loader: Any, iterator: Any) -> None:
        self._iterators.append(iterator)


@pytest.mark.parametrize(
    "protocol",
    [Protocol("asp"), Protocol("ssp", staleness=0), Protocol("ssp", staleness=1)],
    ids=["asp", "ssp(0)", "ssp(1)"],
)
@pytest.mark.parametrize("skipped", [(7,), (11,), (2, 10, 11)], ids=["one", "last", "some"])
def test_steps_that_one_rank_skips_without_a_barrier_count(
    skipped: tuple[int, ...], protocol: Protocol, loader: Any, begin: Any
) -> None:
    """Else it would not see the end of an epoch whose last step it has skipped."""

    def body() -> tuple[list[torch.Tensor], float]:
        own, held = begin(_SHAPES, SyncPlan(protocol=protocol)), Held()
        own.epochs.call_on_begin(held.hold)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for epoch in range(2):
            for at in loader(own.epochs, 12):
                gradients = [gradient(rank(), epoch, at, place) for place in range(len(_SHAPES))]
                overflows = rank() == 0 and at in skipped and own.method.running
                if overflows:
                    gradients[0].fill_(torch.inf)
                assert own.scaled_step(scaler, gradients) is not overflows
            assert own.method.running and own.sync.replicas_in_sync, "the epoch is over"
            assert own.method.step == 12 * (epoch + 1)
        return own.values(), scaler.get_scale()

    (first, lower), (second, scale) = ThreadRanks(2, seed=1).run(body)
    assert (lower, scale) == (1024 / 4 ** len(skipped), 1024)
    assert all(map(torch.equal, first, second)) and all(each.isfinite().all() for each in first)


@pytest.mark.parametrize(
    ("staleness", "skipped"), [(0, (7,)), (1, (6, 7))], ids=["ssp(0)", "ssp(1)"]
)
@pytest.mark.parametrize("by", ["scaler", "script"])
def test_no_rank_waits_for_gradients_of_a_step_that_another_one_skips(
    by: str, staleness: int, skipped: tuple[int, ...], loader: Any, begin: Any
) -> None:
    """That rank goes on to an operation of the script, which waits for all ranks."""

    def body() -> list[torch.Tensor]:
        own = begin(_SHAPES, SyncPlan(protocol=Protocol("ssp", staleness=staleness)))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for at in loader(own.epochs, 12):
            allreduce(torch.ones(1), name="script", op=Sum)
            gradients = [gradient(rank(), 0, at, place) for place in range(len(_SHAPES))]
            skips = rank() == 0 and at in skipped
            assert own.method.running or not skips
            if skips and by == "scaler":
                gradients[0].fill_(torch.inf)
            used = by == "scaler" or not skips
            assert own.scaled_step(scaler, gradients, used=used) is not skips
        assert own.method.running and own.sync.replicas_in_sync, "the epoch is over"
        assert own.method.step == 12
        return own.values()

    first, second = ThreadRanks(2, seed=1).run(body)
    assert all(map(torch.equal, first, second)) and all(each.isfinite().all() for each in first)


@pytest.mark.parametrize("last", [8, 12], ids=["within", "last"])
@pytest.mark.parametrize("kind", ["asp", "ssp"])
def test_a_step_that_the_script_of_one_rank_skips_counts_before_another_plan(
    kind: Any, last: int, loader: Any, begin: Any
) -> None:
    """Its gradients were synchronized, and what follows is no step."""

    def body() -> tuple[list[torch.Tensor], int]:
        own = begin(_SHAPES, SyncPlan(protocol=Protocol(kind)))
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        for at in loader(own.epochs, 12):
            gradients = [gradient(rank(), 0, at, place) for place in range(len(_SHAPES))]
            if rank() == 0 and at == last - 1:
                assert own.method.running
                own.method.on_synchronize(in_step=False, fresh=True)
            else:
                own.scaled_step(scaler, gradients)
            if at == last - 1:
                phases = own.method
                own.sync.switch(SyncPlan())
                assert own.sync.replicas_in_sync
                return own.values(), phases.step
        raise AssertionError("the plan was not changed")

    (first, steps), (second, same) = ThreadRanks(2, seed=1).run(body)
    assert steps == same == last
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("kind", ["asp", "ssp"])
def test_a_step_that_the_script_skips_counts_before_states_are_shared(
    kind: Any, loader: Any, begin: Any
) -> None:
    """As where a script restores a checkpoint in place of a step that has diverged."""

    def body() -> int:
        own = begin(_SHAPES, SyncPlan(protocol=Protocol(kind)))
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        for at in loader(own.epochs, 12):
            if at == 7:
                assert own.method.running
                own.method.on_synchronize(in_step=False, fresh=True)
                own.method.before_sharing()
                assert not own.method.running
                steps: int = own.method.step
                own.method.share(0)
                return steps
            gradients = [gradient(rank(), 0, at, place) for place in range(len(_SHAPES))]
            own.scaled_step(scaler, gradients)
        raise AssertionError("no states were shared")

    assert ThreadRanks(2, seed=1).run(body) == [8, 8]


@pytest.mark.parametrize("kind", ["asp", "ssp"])
def test_ranks_that_leave_epochs_of_different_lengths_after_an_evaluation_meet(
    kind: Any, loader: Any, begin: Any
) -> None:
    """The last step of the shorter one is one after which all ranks evaluate."""

    def body() -> list[torch.Tensor]:
        own, batches = begin(_SHAPES, SyncPlan(protocol=Protocol(kind))), 10 + 2 * rank()
        for epoch in range(2):
            for at in loader(own.epochs, batches):
                own.step({i: gradient(rank(), epoch, at, i) for i in range(len(_SHAPES))})
                if (at + 1) % 5 == 0:
                    if not own.sync.replicas_in_sync:
                        own.sync.at_sync_point(SyncPoint.EVALUATION)
                    own.epochs.on_in_sync()
                if at + 1 == batches:
                    break
            own.epochs.check()
            assert own.method.running and own.sync.replicas_in_sync, "the epoch is over"
        return own.values()

    first, second = ThreadRanks(2, seed=1).run(body)
    assert all(map(torch.equal, first, second))


@given(case=with_stragglers(("greedy",)))
@settings(max_examples=30)
def test_nobody_waits_for_a_straggler(case: Case, loader: Any, begin: Any) -> None:
    _, seen = run(case, loader, begin)
    check(case, seen)


@st.composite
def switches(draw: st.DrawFn) -> tuple[int, int, list[tuple[SyncPlan, int, int]]]:
    """Ranks, seed, and for each epoch its plan, its batches, and when the plan is changed to.

    Four ranks are on two hosts.
    """
    size = draw(st.integers(2, 4))
    of_class = [ClassPlan(), ClassPlan("sharded"), ClassPlan(lossless=True)]
    if size == 4:
        of_class += [ClassPlan("hierarchical", 2), ClassPlan("hierarchical", lossless=True)]
    plan = st.builds(
        SyncPlan,
        exchange=st.builds(ExchangePlan, buckets=st.integers(0, 2), rest=st.sampled_from(of_class)),
        schedule=st.sampled_from([None, Schedule(base=3), Schedule(base=2, start=4)]),
        protocol=st.sampled_from([None, Protocol(), Protocol("ssp", staleness=1)]),
    )
    epochs = []
    for _ in range(draw(st.integers(2, 4))):
        batches = draw(st.integers(4, 12))
        epochs.append((draw(plan), batches, draw(st.integers(0, batches - 1))))
    return size, draw(st.integers(0, 10**6)), epochs


@given(case=switches())
@settings(max_examples=30)
def test_any_plan_may_follow_any_other(case: Any, loader: Any, begin: Any) -> None:
    size, seed, epochs = case

    def body() -> list[list[torch.Tensor]]:
        own, after = begin(_SHAPES, epochs[0][0]), []
        for epoch, (plan, batches, change) in enumerate(epochs):
            known = getattr(own.sync._progress, "epochs", None)
            for at in range(batches) if known is None else loader(known, batches):
                own.step({i: gradient(rank(), epoch, at, i) for i in range(len(_SHAPES))})
                if at == change:
                    own.sync.switch(plan)
                    assert own.sync.replicas_in_sync
            assert own.sync.replicas_in_sync, "an epoch is over"
            after.append(own.values())
        own.method.before_sharing()
        join()
        return after

    seen = ThreadRanks(size, hosts=2 if size == 4 else 1, seed=seed).run(body)
    parameters = [torch.ones(shape) for shape in _SHAPES]
    for epoch, (_, batches, _) in enumerate(epochs):
        for place, tensor in enumerate(parameters):
            for at in range(batches):
                total = sum(gradient(r, epoch, at, place) for r in range(size))
                tensor -= _RATE * total / size
            for each in seen:
                assert torch.equal(each[epoch][place], seen[0][epoch][place]), "ranks differ"
            torch.testing.assert_close(seen[0][epoch][place], tensor, rtol=1e-5, atol=1e-4)


# A rank that was to die in a finalizer, which raises nothing, dies in its next operation.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["dies", "breaks"])
@given(
    case=st.one_of(without_barrier(), with_stragglers(("elastic", "greedy", "balance"))),
    at=st.integers(0, 60),
    which=st.integers(0, 3),
)
@settings(max_examples=30)
def test_failures_end_all_ranks(
    case: Case, at: int, which: int, kind: str, loader: Any, begin: Any
) -> None:
    faults: Any = {"dies": {which % case.ranks: at}} if kind == "dies" else {"breaks_at": at}
    _, seen = run(case, loader, begin, **faults)
    failed = [each for each in seen if isinstance(each, BaseException)]
    assert len(failed) in (0, case.ranks)
    assert all(isinstance(each, (CollectiveError, RankDied, AutosyncError)) for each in failed)


@pytest.mark.parametrize("protocol", [Protocol("asp"), Protocol("ssp", staleness=0)])
def test_a_factor_of_all_gradients_takes_effect_without_a_barrier(
    protocol: Protocol, loader: Any, begin: Any
) -> None:
    def body() -> list[torch.Tensor]:
        own = begin(_SHAPES, SyncPlan(protocol=protocol))

        def halve() -> None:
            for each in own.parameters:
                each.grad.mul_(0.5)

        for at in loader(own.epochs, 6):
            gradients = {place: gradient(rank(), 0, at, place) for place in range(len(_SHAPES))}
            own.step(gradients, between=halve)
        assert own.method.running
        return list(own.values())

    for values in ThreadRanks(2, seed=1).run(body):
        for place, value in enumerate(values):
            total = sum(gradient(of, 0, at, place) for of in range(2) for at in range(6))
            torch.testing.assert_close(value, 1 - 0.5 * _RATE * total / 2, rtol=1e-5, atol=1e-4)


def test_a_rank_that_joins_in_the_middle_of_an_epoch_keeps_nobody_waiting(begin: Any) -> None:
    def body() -> list[torch.Tensor]:
        own = begin(_SHAPES, SyncPlan(protocol=Protocol("ssp", staleness=1)))
        for epoch in range(3):
            running = []
            for at in range(4 + 6 * rank()):
                own.step({p: gradient(rank(), epoch, at, p) for p in range(len(_SHAPES))})
                running.append(own.method.running)
            assert any(running) or not epoch
            join()
            own.sync.at_sync_point(SyncPoint.SCRIPT)
        return list(own.values())

    first, second = ThreadRanks(2, seed=1).run(body)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("protocol", [Protocol("asp"), Protocol("ssp", staleness=1)])
@pytest.mark.parametrize("begun", [0, 2])
def test_a_rank_that_joins_for_good_keeps_nobody_waiting(
    begun: int, protocol: Protocol, loader: Any, begin: Any
) -> None:
    """In the middle of an epoch, or before its first step, while others have more epochs."""

    def body() -> int:
        own = begin(_SHAPES, SyncPlan(protocol=protocol))
        steps = 0
        for epoch in range(4):
            for at in loader(own.epochs, 6):
                if epoch == 1 and not rank() and at == begun:
                    assert own.method.running
                    join()
                    return steps
                own.step({p: gradient(rank(), epoch, at, p) for p in range(len(_SHAPES))})
                steps += 1
        join()
        return steps

    assert ThreadRanks(2, seed=1).run(body) == [6 + begun, 24]


@pytest.mark.parametrize("what", ["parameters", "data", "states", "states at the end"])
def test_what_the_script_changes_after_the_last_step_is_not_lost_silently(
    what: str, loader: Any, begin: Any
) -> None:
    def body() -> None:
        own = begin(_SHAPES, SyncPlan(protocol=Protocol("asp")), momentum=0.9)
        for epoch in range(3):
            for at in loader(own.epochs, 6):
                own.step({p: gradient(rank(), epoch, at, p) for p in range(len(_SHAPES))})
                if (epoch, at) == (1, 5) and what == "states":
                    own.optimizer.state.clear()
                elif (epoch, at) == (1, 5) and what == "states at the end":
                    own.optimizer.state.clear()
                    own.method.before_sharing()
                    return
                elif (epoch, at) == (1, 5) and what == "data":
                    own.parameters[0].data.clamp_(-1e-3, 1e-3)
                elif (epoch, at) == (1, 5):
                    with torch.no_grad():
                        own.parameters[0].zero_()

    outcomes = ThreadRanks(2, seed=1).outcomes(body)
    assert any("the script has c" in str(each) for each in outcomes), outcomes


class _Iterator:
    _num_yielded = 0


class Kept:
    """A loader whose only iterator lives on, as with persistent workers."""

    sampler = batch_sampler = None
    batch_size = 4

    def __init__(self, epochs: Any) -> None:
        self._epochs, self._iterator = epochs, _Iterator()

    def __len__(self) -> int:
        return 30

    def first(self, batches: int) -> Iterator[int]:
        """Batches of an epoch that is left early."""
        own, key = self._iterator, id(self._iterator)
        own._num_yielded = 0
        self._epochs.on_begin(self, own)
        for at in range(batches):
            if self._epochs.is_truncated(key):
                self._epochs.on_exhausted(key)
                return
            own._num_yielded += 1
            self._epochs.on_batch(key, at)
            yield at


def test_a_straggler_returns_though_epochs_are_left_early(begin: Any) -> None:
    def body() -> list[int]:
        own = begin(_SHAPES, SyncPlan(protocol=Protocol(share=1.0, stragglers="elastic")))
        epoch, made, kept = 0, [], Kept(own.epochs)
        own.method.compute_timer = Timer(lambda: 3.0 if epoch == 0 and rank() == 1 else 1.0)
        for epoch in range(3):
            made.append(0)
            for at in kept.first(24):
                own.step({p: gradient(rank(), epoch, at, p) for p in range(len(_SHAPES))})
                made[-1] += 1
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        join()
        return made

    first, second = ThreadRanks(2, seed=1).run(body)
    assert first == [24] * 3 and second[0] < 24 and second[1:] == [24, 24]
