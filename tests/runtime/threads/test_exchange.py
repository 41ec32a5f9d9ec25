"""Gradient exchanges of ranks in threads: any plan, order of arrival, and absence of ranks.

Gradients are small integers, so sums are exact in any order.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_autosync.errors import ConfigurationError, SpaceError
from hvd_autosync.runtime.collectives.operations import CollectiveError, join, rank
from hvd_autosync.runtime.collectives.over_threads import RankDied, ThreadRanks, calls
from hvd_autosync.runtime.exchange import deferred_update
from hvd_autosync.runtime.patches.epochs import SyncPoint
from hvd_autosync.search_space.exchange_plan import PARAMETER_CLASSES, ClassPlan, ExchangePlan
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan

_SHAPES = [(4, 3), (6, 2), (5,), (1, 8), (3, 3)]


@pytest.fixture(autouse=True)
def _deferred_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters need no module to be deferred, and operations change no version, as Horovod's."""
    monkeypatch.setattr(deferred_update, "watch_modules", lambda parameters, _: {*parameters})
    monkeypatch.setattr(deferred_update, "unwatch_modules", lambda *_: None)
    deliver = calls._deliver

    def deliver_unseen(call: calls.Call, *values: torch.Tensor) -> None:
        with torch.autograd._unsafe_preserve_version_counter(call.outputs or ()):
            deliver(call, *values)

    monkeypatch.setattr(calls, "_deliver", deliver_unseen)


@dataclass(frozen=True)
class Case:
    """A short training of some ranks.

    Attributes:
        ranks: How many.
        hosts: On how many hosts.
        seed: Of the order of the ranks' turns.
        plan: The plan.
        classes: The class of each parameter.
        arrivals: Rank -> for each step the order in which gradients arrive; those that are not in
            it have none.
        steps: Rank -> how many steps it makes before it waits in ``join()``.
        in_step: Whether the optimizer alone uses the gradients.
    """

    ranks: int
    hosts: int
    seed: int
    plan: ExchangePlan
    classes: tuple[str, ...]
    arrivals: tuple[tuple[tuple[int, ...], ...], ...]
    steps: tuple[int, ...]
    in_step: bool


@st.composite
def class_plans(draw: st.DrawFn, *, two_levels: bool) -> ClassPlan:
    exchanges = ["allreduce", "sharded", "rows", *(["hierarchical"] if two_levels else [])]
    exchange = draw(st.sampled_from(exchanges))
    if exchange == "rows":
        return ClassPlan(exchange)
    lossless = exchange != "sharded" and draw(st.booleans())
    return ClassPlan(exchange, slices=draw(st.integers(1, 3)), lossless=lossless)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(2, 4))
    hosts = 2 if ranks == 4 and draw(st.booleans()) else 1
    plan = ExchangePlan(
        buckets=draw(st.integers(0, 3)),
        rule=draw(st.sampled_from(["ordered", "size"])),
        order=draw(st.sampled_from(["arrival", "priority"])),
        **{name: draw(class_plans(two_levels=hosts > 1)) for name in PARAMETER_CLASSES},
    )
    matrices = [name for name in PARAMETER_CLASSES if plan.of(name).exchange != "rows"]
    classes = tuple(
        draw(st.sampled_from(PARAMETER_CLASSES if len(shape) > 1 or not matrices else matrices))
        for shape in _SHAPES
    )
    all_steps = 5 if plan.order == "priority" else 4  # the first three are not deferred
    order = st.permutations(range(len(_SHAPES))).flatmap(
        lambda order: st.integers(0, 2).map(lambda missing: tuple(order[missing:]))
    )
    arrivals = tuple(tuple(draw(order) for _ in range(all_steps)) for _ in range(ranks))
    steps = tuple(
        all_steps - draw(st.sampled_from([0, 0, 1, 2, 3, all_steps])) for _ in range(ranks)
    )
    return Case(
        ranks,
        hosts,
        draw(st.integers(0, 10**6)),
        plan,
        classes,
        arrivals,
        steps,
        draw(st.booleans()),
    )


def gradient(of_rank: int, step: int, place: int) -> torch.Tensor:
    """Small integers, zero in most rows."""
    shape = _SHAPES[place]
    generator = torch.Generator().manual_seed(1000 * of_rank + 100 * step + place)
    values = torch.randint(-3, 4, shape, generator=generator).float()
    return values * (torch.arange(shape[0]) % 3 == step % 3).view(-1, *[1] * (len(shape) - 1))


def training(case: Case, begin: Any) -> list[list[torch.Tensor]]:
    """The parameters after each step of this rank."""
    classes = {
        name: tuple(f"p{i}" for i, own in enumerate(case.classes) if own == name)
        for name in PARAMETER_CLASSES
    }
    own = begin(_SHAPES, SyncPlan(case.plan, classes), momentum=0.5)
    after = []
    if not case.steps[rank()]:
        join()
    for step in range(case.steps[rank()]):
        arriving = case.arrivals[rank()][step]
        gradients = {place: gradient(rank(), step, place) for place in arriving}
        own.step(gradients, in_step=case.in_step)
        if step == case.steps[rank()] - 1:
            join()
        for place in arriving:  # as forward does, before the others
            own.parameters[place].detach()
        after.append(own.values())
    return after


def reference(case: Case) -> list[list[torch.Tensor]]:
    """The same by one optimizer, with the means of all ranks' gradients."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in _SHAPES]
    optimizer = torch.optim.SGD(parameters, lr=0.5, momentum=0.5)
    after = []
    for step in range(max(case.steps)):
        for place, each in enumerate(parameters):
            each.grad = torch.zeros(_SHAPES[place])
            for other in range(case.ranks):
                if step < case.steps[other] and place in case.arrivals[other][step]:
                    each.grad += gradient(other, step, place)
            each.grad /= case.ranks
        optimizer.step()
        after.append([each.detach().clone() for each in parameters])
    return after


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer")
@given(case=cases())
@settings(max_examples=100)
def test_every_plan_trains_as_one_optimizer_with_the_mean_gradient(case: Case, begin: Any) -> None:
    wanted = reference(case)
    trained = ThreadRanks(case.ranks, hosts=case.hosts, seed=case.seed).run(
        lambda: training(case, begin)
    )
    longest = max(trained, key=len)
    for steps in trained:
        for own, of_longest, whole in zip(steps, longest, wanted, strict=False):
            for tensor, same, near in zip(own, of_longest, whole, strict=True):
                assert torch.equal(tensor, same), "ranks differ"
                torch.testing.assert_close(tensor, near, rtol=1e-5, atol=1e-6)
    assert [len(steps) for steps in trained] == list(case.steps)


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer")
@given(case=cases(), which=st.integers(0, 3), at=st.integers(0, 40))
@settings(max_examples=60)
def test_the_death_of_a_rank_ends_the_others_or_comes_too_late(
    case: Case, which: int, at: int, begin: Any
) -> None:
    dying = which % case.ranks
    ranks = ThreadRanks(case.ranks, hosts=case.hosts, seed=case.seed, dies={dying: at})
    outcomes = ranks.outcomes(lambda: training(case, begin))
    if isinstance(outcomes[dying], RankDied):
        others = [each for place, each in enumerate(outcomes) if place != dying]
        assert all(isinstance(each, CollectiveError) for each in others)
    else:
        assert all(isinstance(each, list) for each in outcomes)


@pytest.mark.filterwarnings("ignore:no parameter of this optimizer")
@given(case=cases(), at=st.integers(0, 60))
@settings(max_examples=60)
def test_an_operation_that_fails_ends_all(case: Case, at: int, begin: Any) -> None:
    ranks = ThreadRanks(case.ranks, hosts=case.hosts, seed=case.seed, breaks_at=at)
    outcomes = ranks.outcomes(lambda: training(case, begin))
    failed = [isinstance(each, CollectiveError) for each in outcomes]
    assert all(failed) or not any(failed)


@pytest.mark.parametrize("exchange", ["hierarchical", "hierarchical_factors"])
def test_two_levels_need_several_hosts(exchange: str, begin: Any) -> None:
    plan = SyncPlan(ExchangePlan(large=ClassPlan(exchange)), {"large": ("p0",)})

    def body() -> str:
        with pytest.raises(SpaceError) as refused:
            begin(_SHAPES, plan)
        return refused.value.message

    said = f"exchange {exchange!r} does not fit 4 ranks, 4 of them on this host"
    assert ThreadRanks(4, hosts=1).run(body) == [said] * 4
    ThreadRanks(4, hosts=2).run(lambda: begin(_SHAPES, plan) and None)


def test_buckets_need_the_same_layout_on_all_ranks(begin: Any) -> None:
    """Else ranks make buckets of other gradients, and wait for each other for ever."""
    sharded = SyncPlan(ExchangePlan(rest=ClassPlan("sharded")))

    def body() -> str:
        own = begin(_SHAPES, SyncPlan())
        if rank() == 1:
            own.parameters[0].data = torch.ones(3, 4).t()
        with pytest.raises(ConfigurationError) as refused:
            own.sync.switch(sharded)
        own.sync.switch(SyncPlan(ExchangePlan(2)))
        return refused.value.message

    said = "p0 (4, 3) torch.float32 rest on device 0 of the model, not contiguous on rank 1"
    assert all(said in message for message in ThreadRanks(2).run(body))


def test_updates_are_deferred(begin: Any) -> None:
    """Until they are read, or ranks join; those of other ranks stay."""
    torch._dynamo.reset()  # else none is if another test of this process has compiled anything

    def body() -> list[int]:
        own, waiting = begin(_SHAPES, SyncPlan(ExchangePlan(order="priority"))), []
        for step in range(6):
            own.step({place: gradient(rank(), step, place) for place in range(len(_SHAPES))})
            waiting.append(len(own.method._deferred_update._waiting))
            if step < 5 or rank() == 1:
                own.values()
        join()
        return [*waiting, len(own.method._deferred_update._waiting)]

    assert ThreadRanks(2, seed=1).run(body) == [[0, 0, 0, 5, 5, 5, 0]] * 2


@pytest.mark.filterwarnings("ignore:order 'priority'")
def test_only_steps_that_may_be_deferred_are_observed(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that begins to clip has nothing kept or watched in each further step."""
    torch._dynamo.reset()
    searches = []

    def watch_none(*_: Any) -> set[torch.nn.Parameter]:
        searches.append(rank())
        return set()

    monkeypatch.setattr(deferred_update, "watch_modules", watch_none)

    def body() -> int:
        own = begin(_SHAPES, SyncPlan(ExchangePlan(order="priority")))
        for step in range(5):
            gradients = {place: gradient(rank(), step, place) for place in range(len(_SHAPES))}
            own.step(gradients, in_step=step < 2)
        return len(own.method._deferred_update._seen)

    assert ThreadRanks(2).run(body) == [0, 0]
    assert sorted(searches) == [0, 1]


@pytest.mark.parametrize("schedule", [None, Schedule(2)])
@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_only_its_own_rank_takes_error_feedback_from_a_checkpoint(
    codec: str, schedule: Schedule | None, begin: Any
) -> None:
    """All ranks load rank 0's: else its memory would be sent by each of them."""
    exchange = ExchangePlan(rest=ClassPlan(codec=codec, ratio=0.1, rank=1))
    plan = SyncPlan(exchange, schedule=schedule)
    key = "hvd_autosync_rounds" if schedule else "hvd_autosync_codecs"

    def step(own: Any, number: int) -> None:
        own.step({place: gradient(rank(), number, place) for place in range(len(_SHAPES))})

    def save() -> dict[str, Any]:
        own = begin(_SHAPES, plan)
        if schedule:
            own.sync.at_sync_point(SyncPoint.SCRIPT)
        for number in range(16):
            step(own, number)
        return copy.deepcopy(own.method.state_dict())

    def codecs(entries: dict[str, Any]) -> dict[str, Any]:
        return entries[key]["codecs"] if schedule else entries[key]

    saved, _ = ThreadRanks(2).run(save)

    def load(entries: dict[str, Any]) -> list[dict[str, Any]]:
        own = begin(_SHAPES, plan)
        own.method.load_state_dict(copy.deepcopy(entries))
        join()  # a rank under local steps saves the states of all, which have to be there
        return codecs(copy.deepcopy(own.method.state_dict()))

    assert any(state["left_out"].any() for state in codecs(saved).values())
    first, second = ThreadRanks(2).run(lambda: load(saved))
    for name, state in codecs(saved).items():
        assert torch.equal(first[name]["left_out"], state["left_out"])
        assert not second[name]["left_out"].any()
        if codec == "powersgd":
            assert torch.equal(first[name]["right"], state["right"])
            assert torch.equal(second[name]["right"], state["right"])
    # As an older version has saved it.
    (saved[key] if schedule else saved).pop("codecs_rank" if schedule else f"{key}_rank")
    first, second = ThreadRanks(2).run(lambda: load(saved))
    assert all(torch.equal(second[n]["left_out"], s["left_out"]) for n, s in first.items())


@pytest.mark.parametrize("steps", [0, 2])
def test_error_feedback_ends_with_a_step_of_a_plan_without_it(steps: int, begin: Any) -> None:
    """What was left out thousands of steps ago belongs to no gradient any more."""
    lossy = SyncPlan(ExchangePlan(1, rest=ClassPlan(codec="topk", ratio=0.1)))

    def body() -> None:
        own = begin(_SHAPES, lossy)
        made = itertools.count()

        def step() -> None:
            number = next(made)
            own.step({place: gradient(rank(), number, place) for place in range(len(_SHAPES))})

        def kept() -> Any:
            return own.method.dispatcher.codec_states()

        step()
        before = {name: state["left_out"].clone() for name, state in kept().items()}
        assert any(each.any() for each in before.values())
        own.sync.switch(SyncPlan(ExchangePlan(2)))
        for _ in range(steps):
            step()
        assert {*kept()} == (set() if steps else {*before})
        own.sync.switch(lossy)
        assert {*kept()} == (set() if steps else {*before})
        step()
        own.sync.switch(lossy)
        assert {*kept()} == {*before}

    ThreadRanks(2).run(body)


def test_a_class_without_parameters_is_warned_of_where_an_optimizer_begins_with_it(
    begin: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """Live tuning switches all optimizers of a script to one plan, whose names are never wrong."""
    sliced = ExchangePlan(1, large=ClassPlan(slices=2))
    plan = SyncPlan(sliced, {"large": ("of another optimizer",)})

    def body() -> int:
        own = begin(_SHAPES, SyncPlan())
        own.sync.switch(plan)
        own.sync.switch(SyncPlan())
        return len([each for each in recwarn if "is of class large" in str(each.message)])

    assert ThreadRanks(2).run(body) == [0, 0]
    ThreadRanks(2).run(lambda: begin(_SHAPES, plan))
    assert "is of class large" in str(recwarn.pop(UserWarning).message)
