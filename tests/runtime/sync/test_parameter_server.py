"""Owners of shards, and the ranks that send them gradients, in one process and in any order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_autosync.runtime.state.partition import Partition, put_together
from hvd_autosync.runtime.sync.parameter_server import ParameterServer, Push
from hvd_autosync.runtime.sync.shards import ServerBucket, Share, make_buckets
from hvd_autosync.search_space.protocol import Protocol

Base = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def parameters_of(shapes: list[tuple[int, ...]]) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def wrapped(base: Base, parameters: list[torch.nn.Parameter]) -> Any:
    """An optimizer as Horovod makes one: of a class that inherits from the script's."""
    optimizer = base(parameters)
    optimizer.__class__ = type("Distributed", (type(optimizer),), {})
    return optimizer


def gradient(rank: int, clock: int, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + clock)
    return torch.randn(like.shape, generator=generator)


class Ranks:
    """All ranks of a job, with messages that travel in any order but that of each sender's own.

    Args:
        steps: How many steps each rank makes in a stretch.
        choose: Picks the next message: a number below its argument.
    """

    def __init__(
        self,
        protocol: Protocol,
        steps: list[int],
        shapes: list[tuple[int, ...]],
        base: Base,
        choose: Callable[[int], int],
    ) -> None:
        self.size, self._steps, self._choose = len(steps), steps, choose
        self.parameters = parameters_of(shapes)
        self.optimizer = wrapped(base, self.parameters)
        self.buckets = make_buckets(self.optimizer, self.parameters, self.size)
        for bucket in self.buckets:
            bucket.keep_parameters()
        self.owners = [
            ParameterServer(
                [Share(bucket, rank, self.optimizer) for bucket in self.buckets],
                self.size,
                protocol,
                summed=False,
            )
            for rank in range(self.size)
        ]
        self.clocks = [0] * self.size
        self.most_ahead = 0
        self._versions: dict[tuple[int, int, int], int] = {}
        self._unanswered = [0] * self.size
        self._messages: dict[tuple[int, int], deque[Push | None]] = {
            pair: deque() for pair in itertools.product(range(self.size), repeat=2)
        }

    def segment(self) -> None:
        """Every rank makes its steps, and rests."""
        self.clocks = [0] * self.size
        for owner in self.owners:
            owner.begin_segment()
        for rank in range(self.size):
            self._run_rank(rank)
        while waiting := [pair for pair, messages in self._messages.items() if messages]:
            source, owner = waiting[self._choose(len(waiting))]
            self._deliver(source, owner)
        assert self.clocks == self._steps, "a rank waits for ever"

    def _run_rank(self, rank: int) -> None:
        if self.clocks[rank] == self._steps[rank]:
            for owner in range(self.size):
                self._messages[rank, owner].append(None)
            return
        for bucket, owner in itertools.product(self.buckets, range(self.size)):
            version = self._versions.get((rank, bucket.number, owner), -1)
            push = Push(rank, bucket.number, self.clocks[rank] + 1, version, [self.rate])
            self._messages[rank, owner].append(push)
            self._unanswered[rank] += 1

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _deliver(self, source: int, owner: int) -> None:
        message = self._messages[source, owner].popleft()
        owned = self.owners[owner]
        if message is None:
            answered = owned.drained(source)
        else:
            flat = torch.cat(
                [
                    gradient(source, message.clock, parameter).view(-1)
                    for parameter in self.buckets[message.bucket].parameters
                ]
            )
            share = self.buckets[message.bucket].partition.share(owner, flat)
            answered = owned.pushed(message, share)
        for push in answered:
            version = owned.shares[push.bucket].version
            self._versions[push.source, push.bucket, owner] = version
            self._unanswered[push.source] -= 1
            if self._unanswered[push.source] == 0:
                self.clocks[push.source] += 1
                behind = [c for c, s in zip(self.clocks, self._steps, strict=True) if c < s]
                ahead = self.clocks[push.source] - min(behind, default=self.clocks[push.source])
                self.most_ahead = max(self.most_ahead, ahead)
                self._run_rank(push.source)

    def values(self) -> list[torch.Tensor]:
        """The parameters as their owners have them."""
        for bucket in self.buckets:
            for rank, owner in enumerate(self.owners):
                bucket.partition.share(rank, bucket.pulled).copy_(
                    owner.shares[bucket.number].values
                )
            bucket.take_pulled()
        return [parameter.detach() for parameter in self.parameters]


SHAPES = st.lists(
    st.lists(st.integers(1, 9), min_size=0, max_size=3).map(tuple), min_size=1, max_size=5
)
STEPS = st.lists(st.integers(0, 5), min_size=1, max_size=4)
#: Hypothesis's own would choose, and try to simplify, each of hundreds of messages.
DICE = st.integers(0, 2**32 - 1).map(Random)


@given(STEPS, SHAPES, st.sampled_from([None, 0, 1, 3]), DICE)
def test_every_rank_comes_to_its_end_and_is_never_too_far_ahead(
    steps: list[int], shapes: list[tuple[int, ...]], staleness: int | None, random: Random
) -> None:
    protocol = Protocol("asp") if staleness is None else Protocol("ssp", staleness)
    ranks = Ranks(protocol, steps, shapes, momentum, random.randrange)
    ranks.segment()
    ranks.segment()
    if staleness is not None:
        # A rank that has its answers for step c has made it: s steps ahead of those answered, and
        # one more of a rank whose gradients are all here and its answers not.
        assert ranks.most_ahead <= staleness + 1


@pytest.mark.parametrize("base", [momentum, adam])
@given(st.integers(1, 4), SHAPES, DICE)
def test_ssp_of_no_staleness_makes_the_steps_of_bsp(
    base: Base, size: int, shapes: list[tuple[int, ...]], random: Random
) -> None:
    ranks = Ranks(Protocol("ssp", 0), [4] * size, shapes, base, random.randrange)
    ranks.segment()
    alone = parameters_of(shapes)
    optimizer = base(alone)
    for clock in range(1, 5):
        for parameter in alone:
            of_all = [gradient(rank, clock, parameter) for rank in range(size)]
            parameter.grad = torch.stack(of_all).mean(0)
        optimizer.step()
    for found, wanted in zip(ranks.values(), alone, strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)


def test_ssp_of_no_staleness_steps_without_a_rank_that_skips() -> None:
    ranks = Ranks(
        Protocol("ssp", 0), [0, 0], [(6,)], lambda p: torch.optim.SGD(p, lr=0.1), lambda _: 0
    )
    owner = ranks.owners[0]
    share = owner.shares[0]
    before = share.values.clone()
    assert not list(owner.skipped(Push(0, 0, 1, -1)))
    ready = list(owner.pushed(Push(1, 0, 1, -1, [0.1]), torch.ones_like(before)))
    assert {each.source for each in ready} == {0, 1}
    torch.testing.assert_close(share.values, before - 0.1)
    assert not list(owner.skipped(Push(1, 0, 2, 1)))
    assert len(list(owner.skipped(Push(0, 0, 2, 1)))) == 2
    assert share.version == 1, "all have skipped the second step"


def test_ssp_waits_for_no_gradient_of_a_step_that_was_skipped() -> None:
    ranks = Ranks(
        Protocol("ssp", 1), [0, 0], [(6,)], lambda p: torch.optim.SGD(p, lr=0.1), lambda _: 0
    )
    owner = ranks.owners[0]
    gradient_ = torch.ones_like(owner.shares[0].values)
    for clock in (1, 2):
        assert len(list(owner.skipped(Push(0, 0, clock, -1)))) == 1
        assert len(list(owner.pushed(Push(1, 0, clock, -1, [0.1]), gradient_))) == 1
    assert len(list(owner.pushed(Push(1, 0, 3, -1, [0.1]), gradient_))) == 1
    assert not list(owner.pushed(Push(1, 0, 4, -1, [0.1]), gradient_))
    assert len(list(owner.skipped(Push(0, 0, 3, -1)))) == 2


@pytest.mark.parametrize("base", [momentum, adam])
def test_asp_of_one_rank_makes_the_steps_of_the_optimizer(base: Base) -> None:
    shapes: list[tuple[int, ...]] = [(5, 3), (3,), ()]
    ranks = Ranks(Protocol("asp"), [6], shapes, base, lambda _: 0)
    ranks.segment()
    alone = parameters_of(shapes)
    optimizer = base(alone)
    for clock in range(1, 7):
        for parameter in alone:
            parameter.grad = gradient(0, clock, parameter)
        optimizer.step()
    for found, wanted in zip(ranks.values(), alone, strict=True):
        assert torch.equal(found, wanted)


@given(STEPS.filter(any), DICE)
def test_asp_of_plain_sgd_is_the_sum_of_all_gradients_at_the_divided_rate(
    steps: list[int], random: Random
) -> None:
    def plain(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    ranks = Ranks(Protocol("asp"), steps, [(4, 3)], plain, random.randrange)
    ranks.segment()
    (wanted,) = (each.detach() for each in parameters_of([(4, 3)]))
    for rank, count in enumerate(steps):
        for clock in range(1, count + 1):
            wanted -= 0.1 / len(steps) * gradient(rank, clock, wanted)
    torch.testing.assert_close(ranks.values()[0], wanted, rtol=1e-5, atol=1e-6)


def test_an_undivided_rate_is_undivided() -> None:
    moved = []
    for rate in ("divided", "kept"):
        ranks = Ranks(
            Protocol(rate=rate),
            [1, 0, 0, 0],
            [(8,)],
            lambda p: torch.optim.SGD(p, lr=0.1),
            lambda _: 0,
        )
        ranks.segment()
        moved.append(ranks.values()[0] - parameters_of([(8,)])[0].detach())
    torch.testing.assert_close(4 * moved[0], moved[1])


def test_the_states_of_all_owners_are_the_whole_states() -> None:
    shapes: list[tuple[int, ...]] = [(7, 3), (5,), ()]
    ranks = Ranks(Protocol("ssp", 0), [3, 3, 3], shapes, adam, lambda _: 0)
    ranks.segment()
    places = {parameter: place for place, parameter in enumerate(ranks.parameters)}
    entries = [e for o in ranks.owners for share in o.shares for e in share.entries(places)]
    whole = put_together(entries, ranks.parameters)
    for place, shape in enumerate(shapes):
        assert whole[place]["exp_avg"].shape == torch.Size(shape)
        assert whole[place]["step"] == 3
    # Owners that begin with these go on as one optimizer would.
    for parameter, state in zip(ranks.parameters, whole.values(), strict=True):
        ranks.optimizer.state[parameter] = state
    again = Share(ranks.buckets[0], 1, ranks.optimizer).entries(places)
    before = ranks.owners[1].shares[0].entries(places)
    for a, b in zip(again, before, strict=True):
        assert torch.equal(a.state["exp_avg"], b.state["exp_avg"])


def test_parameters_without_a_gradient_are_not_stepped() -> None:
    parameters = parameters_of([(4,), (4,)])
    optimizer = wrapped(momentum, parameters)
    (bucket,) = make_buckets(optimizer, parameters, 1)
    bucket.keep_parameters()
    share = Share(bucket, 0, optimizer)
    before = share.values.clone()
    share.add(torch.ones(8), absent=[1])
    share.step([0.1])
    assert not torch.equal(share.values[:4], before[:4])
    assert torch.equal(share.values[4:], before[4:]), "not even by weight decay"


@pytest.mark.parametrize(
    ("mode", "moved"), [("kept", 0.1 * 1.9), ("zero", 0.1), ("scaled", 0.1 * 1.45)]
)
def test_momentum_modes(mode: str, moved: float) -> None:
    ranks = Ranks(
        Protocol(momentum=mode, rate="kept"),
        [0, 0],
        [(3,)],
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda _: 0,
    )
    owner = ranks.owners[0]
    share = owner.shares[0]
    steps = []
    for clock in (1, 2):
        before = share.values.clone()
        list(owner.pushed(Push(0, 0, clock, -1, [0.1]), torch.ones_like(share.values)))
        steps.append((before - share.values)[0].item())
    assert steps == pytest.approx([0.1, moved])


@given(SHAPES, st.integers(1, 5))
def test_shares_are_balanced_and_together_the_whole(
    shapes: list[tuple[int, ...]], size: int
) -> None:
    parameters = parameters_of(shapes)
    buckets = make_buckets(wrapped(momentum, parameters), parameters, size)
    assert [p for bucket in buckets for p in bucket.parameters] == parameters
    for bucket in buckets:
        lengths = [len(bucket.partition.share(rank, bucket.flat)) for rank in range(size)]
        assert sum(lengths) == len(bucket.flat)
        assert max(lengths) - min(lengths) <= 1
        covered = [
            sum(piece.count for piece in bucket.partition.pieces(rank)) for rank in range(size)
        ]
        assert covered == lengths


def test_an_optimizer_that_looks_at_whole_tensors_gets_whole_ones() -> None:
    class Norms(torch.optim.SGD):
        pass

    parameters = parameters_of([(10, 10), (30,), (40,), (30,)])
    optimizer = wrapped(lambda p: Norms(p, lr=0.1), parameters)
    (bucket,) = make_buckets(optimizer, parameters, 2)
    pieces = [piece for rank in range(2) for piece in bucket.partition.pieces(rank)]
    assert sorted(piece.place for piece in pieces) == [0, 1, 2, 3]
    assert all(piece.count == piece.whole.numel() for piece in pieces)
    assert {len(bucket.partition.pieces(rank)) for rank in range(2)} == {1, 3}


def test_a_bucket_that_is_sent_is_in_the_order_of_its_parameters() -> None:
    parameters = parameters_of([(2, 2), (3,)])
    bucket = ServerBucket(0, Partition(parameters, [4, 3]))
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, parameter.numel())
        bucket.keep_gradient(parameter)
    assert bucket.flat.tolist() == [4, 4, 4, 4, 3, 3, 3]


def test_an_owner_steps_with_all_that_the_constructor_of_the_optimizer_has_set() -> None:
    class Shrinking(torch.optim.SGD):
        halvings = 0

        def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
            super().__init__(parameters, lr=1.0)
            self._shrink = 0.5
            self.halvings = 1

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for each in group["params"]:
                    each.grad.mul_(self._shrink * 0.5**self.halvings)
            return super().step(closure)

    def of_a_scheduler() -> None:
        raise AssertionError("the optimizer of the script steps nothing here")

    parameters = parameters_of([(4,)])
    optimizer = wrapped(Shrinking, parameters)
    optimizer._sync = optimizer._requires_update = object()
    optimizer.step = of_a_scheduler
    (bucket,) = make_buckets(optimizer, parameters, 1)
    bucket.keep_parameters()
    share = Share(bucket, 0, optimizer)
    share.add(torch.ones(4))
    share.step([1.0])
    torch.testing.assert_close(share.values, parameters[0].detach() - 0.25)
    assert not {"_sync", "_requires_update"} & vars(share._optimizer).keys()


def test_a_method_that_the_constructor_of_the_optimizer_has_chosen_is_the_owners() -> None:
    class Choosing(torch.optim.SGD):
        def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
            super().__init__(parameters, lr=1.0)
            self._update = self._counted_update

        def _counted_update(self, parameter: torch.nn.Parameter) -> None:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for each in group["params"]:
                    self._update(each)
            return super().step(closure)

    parameters = parameters_of([(4,)])
    optimizer = wrapped(Choosing, parameters)
    (bucket,) = make_buckets(optimizer, parameters, 1)
    bucket.keep_parameters()
    share = Share(bucket, 0, optimizer)
    for _ in range(2):
        share.add(torch.ones(4))
        share.step([1.0])
    (entry,) = share.entries({parameters[0]: 0})
    assert entry.state["count"] == 2
    assert not optimizer.state.keys() - set(parameters)
