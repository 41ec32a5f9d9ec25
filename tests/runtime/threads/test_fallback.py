"""Fallbacks of the loss guard of ranks in threads: from any lossy plan, at any step.

The losses of some ranks are wrong from some step on. All ranks then restore the same snapshot after
the same step, and go on as one optimizer with the mean gradients does.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.operations import collectives, join, rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.guard import guard, handler
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.runtime.measure.recorder import Recorder
from hvd_autosync.runtime.sync.phase import Votes
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan

_SHAPES = [(4, 3), (5,), (2, 8)]
_RATE = 0.5
#: Windows are as short as this here; a loss is tested two windows later at the latest.
_WINDOW = 4


class LossesOfRanks:
    """As ``Losses``, those of the rank that asks."""

    def __init__(self) -> None:
        self._of: defaultdict[int, Losses] = defaultdict(Losses)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of[rank()], name)


@dataclass(frozen=True)
class Case:
    """A training.

    Attributes:
        seed: Of the order of turns and messages.
        plan: The lossy plan.
        epochs: Batches of each epoch.
        momentum: Of SGD.
        wrong_from: The first step with a wrong loss.
        wrong: The wrong loss.
        of_ranks: For each rank whether its loss is wrong then.
        delays: For each rank how often others run between its backward pass and its step.
    """

    seed: int
    plan: SyncPlan
    epochs: tuple[int, ...]
    momentum: float
    wrong_from: int
    wrong: float
    of_ranks: tuple[bool, ...]
    delays: tuple[int, ...]

    def loss(self, of_rank: int, step: int) -> float:
        """One loss."""
        healthy = 1 + (7 * step + of_rank) % 3 / 64
        return self.wrong if self.of_ranks[of_rank] and step >= self.wrong_from else healthy


def codecs() -> st.SearchStrategy[ClassPlan]:
    names = st.sampled_from(["fp16", "bf16", "int8", "topk", "powersgd"])
    return st.builds(ClassPlan, codec=names, ratio=st.just(0.2), rank=st.just(1))


@st.composite
def plans(draw: st.DrawFn) -> SyncPlan:
    """Lossy ones."""
    schedule = draw(st.sampled_from([None, Schedule(base=3), Schedule(base=6, start=5)]))
    protocol = draw(
        st.one_of(
            st.none(),
            st.builds(
                Protocol,
                kind=st.sampled_from(["asp", "ssp"]),
                staleness=st.integers(0, 2),
                share=st.sampled_from([0.0, 0.4]),
                async_first=st.booleans(),
                momentum=st.sampled_from(["kept", "zero"]),
                total=st.just(4 * 3 * 40),
            ),
        )
    )
    coded = codecs()
    rest = draw(st.one_of(st.just(ClassPlan()), coded) if schedule or protocol else coded)
    large = draw(st.sampled_from([ClassPlan(), ClassPlan("sharded"), ClassPlan(lossless=True)]))
    order = draw(st.sampled_from(["arrival", "priority"]))
    exchange = ExchangePlan(draw(st.integers(0, 2)), order=order, large=large, rest=rest)
    return SyncPlan(exchange, {"large": ("p0",)}, schedule, protocol)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    plan = draw(plans())
    epochs = tuple(draw(st.lists(st.integers(12, 20), min_size=2, max_size=3)))
    # A rise is one above earlier losses, of which the guard forgets those of another phase.
    rises = plan.protocol is None and sum(epochs) >= 36 and draw(st.booleans())
    first = 24 if rises else 1
    of_ranks = draw(st.lists(st.booleans(), min_size=2, max_size=4).filter(any))
    delay = st.integers(0, 3)
    return Case(
        draw(st.integers(0, 10**6)),
        plan,
        epochs,
        draw(st.sampled_from([0.0, 0.5])),
        draw(st.integers(first, sum(epochs) - 3 * _WINDOW)),
        100.0 if rises else math.nan,
        tuple(of_ranks),
        tuple(draw(st.lists(delay, min_size=len(of_ranks), max_size=len(of_ranks)))),
    )


def gradient(of_rank: int, step: int, place: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * of_rank + 10 * step + place)
    return torch.randint(-3, 4, _SHAPES[place], generator=generator).float()


@dataclass
class Seen:
    """What one rank has seen.

    Attributes:
        before: The parameters after each step before the fallback.
        fell_back: The number of steps at the fallback.
        momenta: Those right after it.
        after: The parameters after it, and after each later step.
    """

    before: list[list[torch.Tensor]] = field(default_factory=list)
    fell_back: int = 0
    momenta: list[torch.Tensor | None] = field(default_factory=list)
    after: list[list[torch.Tensor]] = field(default_factory=list)


def training(case: Case, loader: Any, begin: Any) -> Seen:
    own = begin(_SHAPES, case.plan, momentum=case.momentum)
    seen, step = Seen(before=[own.values()]), 0

    def delay() -> None:
        for _ in range(case.delays[rank()]):
            collectives().pass_turn()  # type: ignore[attr-defined]

    def fallen_back() -> bool:
        if own.sync.exact and not seen.after:
            seen.fell_back, seen.after = step, [own.values()]
            seen.momenta = momenta(own)
            return True
        return False

    for batches in case.epochs:
        known = getattr(own.sync._progress, "epochs", None)
        for _ in range(batches) if known is None else loader(known, batches):
            fallen_back()  # at the end of an epoch
            losses: Any = current.losses
            losses.seen(torch.tensor(case.loss(rank(), step)))
            gradients = {place: gradient(rank(), step, place) for place in range(len(_SHAPES))}
            own.step(gradients, between=delay)
            step += 1
            if not fallen_back():
                (seen.after or seen.before).append(own.values())
    fallen_back()
    assert own.sync.exact and not own.sync.guard.watches
    own.method.before_sharing()
    join()
    return seen


def momenta(own: Any) -> list[torch.Tensor | None]:
    """Copies of what all ranks have; shards' are not known to all."""
    own.method.make_whole()
    found = (own.optimizer.state.get(each, {}).get("momentum_buffer") for each in own.parameters)
    return [None if each is None else each.clone() for each in found]


def reference(case: Case, seen: Seen) -> list[list[torch.Tensor]]:
    """The parameters after each step since the fallback, with the means of all gradients."""
    parameters = [torch.nn.Parameter(each.clone()) for each in seen.after[0]]
    optimizer = torch.optim.SGD(parameters, lr=_RATE, momentum=case.momentum)
    for parameter, momentum in zip(parameters, seen.momenta, strict=True):
        if momentum is not None:
            optimizer.state[parameter]["momentum_buffer"] = momentum.clone()
    after = [seen.after[0]]
    for step in range(seen.fell_back, sum(case.epochs)):
        for place, parameter in enumerate(parameters):
            gradients = [gradient(r, step, place) for r in range(len(case.of_ranks))]
            parameter.grad = sum(gradients[1:], gradients[0]) / len(gradients)
        optimizer.step()
        after.append([each.detach().clone() for each in parameters])
    return after


def _guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "run", None)
    monkeypatch.setattr(current, "losses", LossesOfRanks())
    monkeypatch.setattr(guard, "LOSS_WINDOW", _WINDOW)
    monkeypatch.setattr(handler, "_GUARDS", [])
    monkeypatch.setattr(Votes, "EVERY", 2)


@given(case=cases())
@settings(max_examples=25)
def test_all_ranks_fall_back_at_once_and_go_on_exactly(
    case: Case, loader: Any, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _guarded(monkeypatch)
    first, *others = seen = ThreadRanks(len(case.of_ranks), seed=case.seed).run(
        lambda: training(case, loader, begin)
    )
    assert case.wrong_from < first.fell_back <= sum(case.epochs)
    for each in others:
        assert each.fell_back == first.fell_back
        for own, same in zip(each.after, first.after, strict=True):
            assert all(map(torch.equal, own, same)), "ranks differ"
    for each in seen:
        assert any(all(map(torch.equal, each.after[0], known)) for known in each.before)
    for whole, wanted in zip(first.after, reference(case, first), strict=True):
        torch.testing.assert_close(whole, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "plan",
    [
        SyncPlan(protocol=Protocol("asp")),
        SyncPlan(protocol=Protocol("ssp")),
        SyncPlan(schedule=Schedule(base=3)),
    ],
    ids=["asp", "ssp", "local steps"],
)
@pytest.mark.parametrize("skipped", [(7,), (11,), (6, 9, 11)], ids=["one", "last", "some"])
def test_the_loss_of_a_step_that_one_rank_skips_is_not_judged(
    skipped: tuple[int, ...],
    plan: SyncPlan,
    loader: Any,
    begin: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not finite where a forward pass has overflowed, and has changed no parameter."""
    _guarded(monkeypatch)

    def body() -> list[torch.Tensor]:
        own = begin(_SHAPES, plan)
        scaler, losses = torch.amp.GradScaler("cpu", init_scale=1024.0), current.losses
        assert losses is not None
        for epoch in range(2):
            for at in loader(own.epochs, 12):
                gradients = [gradient(rank(), at, place) for place in range(len(_SHAPES))]
                overflows = rank() == 0 and at in skipped and own.method.running
                if overflows:
                    gradients[0].fill_(math.nan)
                losses.seen(torch.tensor(math.nan if overflows else 1.0))
                assert own.scaled_step(scaler, gradients) is not overflows
            assert own.sync.guard.watches and not own.sync.exact
            assert own.method.running and own.sync.replicas_in_sync, "the epoch is over"
            assert own.method.step == 12 * (epoch + 1)
        return own.values()

    first, second = ThreadRanks(2, seed=1).run(body)
    assert all(map(torch.equal, first, second)) and all(each.isfinite().all() for each in first)


@pytest.mark.parametrize("later", [False, True])
def test_losses_are_recorded_of_the_same_steps_where_one_rank_skips_some(
    later: bool, loader: Any, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quality trials compare the means over ranks, at the steps whose losses are an average's."""
    recorders: dict[int, Recorder] = {}

    class OfRank:
        """The losses of the rank that asks, and the run that is told of its skipped steps."""

        def __getattr__(self, name: str) -> Any:
            return getattr(recorders[rank()].losses, name)

        def optimizer_stepped(self, _: Any) -> None:
            recorders[rank()].end_step()

        def averaged_between_steps(self, _: float) -> None:
            """At the end of an epoch."""

    monkeypatch.setattr(current, "losses", OfRank())
    monkeypatch.setattr(current, "run", OfRank())

    def body() -> dict[str, Any]:
        own = begin(_SHAPES, SyncPlan(schedule=Schedule(base=3)))
        own_recorder = recorders[rank()] = Recorder(lambda: own.method.in_round)
        losses, scaler = own_recorder.losses, torch.amp.GradScaler("cpu", init_scale=1.0)
        for at in loader(own.epochs, 24):
            gradients = [gradient(rank(), at, place) for place in range(len(_SHAPES))]
            skips = rank() == 0 and at in (13, 17) and own.method.running
            losses.seen(torch.tensor(math.nan if skips else float(at)))
            if not later:
                if skips:
                    gradients[0].fill_(math.nan)
                made = own.scaled_step(scaler, gradients)
                assert made is not skips
            elif skips:
                own.method.on_synchronize(in_step=False, fresh=True)
                losses.may_skip()  # zero_grad()
                made = False
            else:
                own.step(dict(enumerate(gradients)))
                made = True
            if made:
                own_recorder.end_step()
        return own_recorder.take_news(wait_for_device=False)

    first, second = ThreadRanks(2, seed=1).run(body)
    assert second["losses"] == [float(at) for at in range(24)] and second["in_round"]
    repeated = {13: 12.0, 17: 16.0}
    assert first["losses"] == [repeated.get(at, float(at)) for at in range(24)]
    # After a skip that is counted later, the next loss is of the parameters before.
    different = {*first["in_round"]} ^ {*second["in_round"]}
    assert different <= ({14, 18} if later else set())


class Held:
    """Holds iterators, as a script does that fetches batches itself."""

    def __init__(self) -> None:
        self._iterators: list[Any] = []

    def hold(self, loader: Any, iterator: Any) -> None:
        self._iterators.append(iterator)


@pytest.mark.parametrize("kind", ["asp", "ssp"])
def test_the_loss_of_a_step_in_which_ranks_meet_is_judged(
    kind: Any, loader: Any, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop sees the end of its epoch while it fetches the batches of the last step."""
    _guarded(monkeypatch)

    def body() -> tuple[bool, bool]:
        own, held = begin(_SHAPES, SyncPlan(protocol=Protocol(kind))), Held()
        own.epochs.call_on_begin(held.hold)
        losses: Any = current.losses
        batches, running = iter(loader(own.epochs, 23)), False
        for step in range(12):
            running = own.method.running
            wrong = rank() == 1 and step == 11
            assert len([*itertools.islice(batches, 2)]) == (1 if step == 11 else 2)
            losses.seen(torch.tensor(math.nan if wrong else 1.0))
            own.step({place: gradient(rank(), step, place) for place in range(len(_SHAPES))})
        assert own.sync.replicas_in_sync, "the epoch is over"
        return running, own.sync.exact

    assert ThreadRanks(2, seed=1).run(body) == [(True, True), (True, True)]
