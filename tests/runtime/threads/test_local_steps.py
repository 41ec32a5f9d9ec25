"""Rounds of local steps of ranks in threads: any schedule, epoch, order of turns, and failure.

Gradients do not depend on parameters, and steps are those of plain SGD. So wherever replicas are
averaged, the average is where one replica with the mean gradients would be.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.collectives.operations import (
    CollectiveError,
    Sum,
    allreduce,
    collectives,
    join,
    rank,
)
from hvd_autosync.runtime.collectives.over_threads import RankDied, ThreadRanks
from hvd_autosync.runtime.optimizer import strategy_optimizer
from hvd_autosync.runtime.patches.epochs import SyncPoint
from hvd_autosync.runtime.state import normalization
from hvd_autosync.runtime.state.normalization import Statistic
from hvd_autosync.runtime.sync.averaging import Averaging
from hvd_autosync.runtime.sync.equal_states import equalize_states
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan

_SHAPES = [(4, 3), (5,), (2, 8)]
_RATE = 0.5


@dataclass(frozen=True)
class Case:
    """A training of some ranks.

    Attributes:
        ranks: How many.
        seed: Of the order of their turns.
        schedule: The lengths of rounds.
        epochs: Batches of each epoch, the same on all ranks.
        left_out: Rank -> how many batches of the last epoch it lacks.
        plan: How changes are sent.
    """

    ranks: int
    seed: int
    schedule: Schedule
    epochs: tuple[int, ...]
    left_out: tuple[int, ...]
    plan: ExchangePlan


@st.composite
def cases(draw: st.DrawFn, *, uneven: bool = False) -> Case:
    ranks = draw(st.integers(2, 4))
    schedule = Schedule(
        base=draw(st.integers(1, 6)),
        power=draw(st.sampled_from([0, 0, 2])),
        alpha=draw(st.sampled_from([0.0, 1.0, 2.0])),
        start=draw(st.integers(0, 9)),
        warmup=draw(st.sampled_from([None, 0])),
        cap=draw(st.sampled_from([None, 3, 8])),
    )
    own = ClassPlan(lossless=draw(st.booleans()))
    plan = ExchangePlan(buckets=draw(st.integers(0, 2)), rest=own)
    epochs = tuple(draw(st.lists(st.integers(3, 14), min_size=1, max_size=3)))
    left_out = [draw(st.integers(0, 2)) if uneven else 0 for _ in range(ranks)]
    return Case(ranks, draw(st.integers(0, 10**6)), schedule, epochs, tuple(left_out), plan)


def gradient(of_rank: int, step: int, place: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * of_rank + 10 * step + place)
    return torch.randint(-3, 4, _SHAPES[place], generator=generator).float()


@dataclass
class Trained:
    """What one rank has seen.

    Attributes:
        in_sync: Steps after which replicas were in sync -> the parameters.
        ends: The steps at which epochs ended.
        local: Local steps.
    """

    in_sync: dict[int, list[torch.Tensor]]
    ends: list[int]
    local: int


def training(case: Case, loader: Any, begin: Any) -> Trained:
    own = begin(_SHAPES, SyncPlan(case.plan, schedule=case.schedule))
    seen = Trained({}, [], 0)
    step = 0
    for number, batches in enumerate(case.epochs):
        last = number == len(case.epochs) - 1
        for _ in loader(own.epochs, batches - (case.left_out[rank()] if last else 0)):
            seen.local += own.method.running
            assert own.method.in_round is (step > 0 and step not in seen.in_sync)
            own.step({place: gradient(rank(), step, place) for place in range(len(_SHAPES))})
            step += 1
            if own.sync.replicas_in_sync:
                seen.in_sync[step] = own.values()
        assert own.sync.replicas_in_sync, "an epoch is over"
        seen.in_sync[step] = own.values()
        seen.ends.append(step)
    join()
    assert own.method.step == max(sum(case.epochs) - each for each in case.left_out)
    return seen


def reference(case: Case) -> list[list[torch.Tensor]]:
    """The parameters after each step with the mean gradients."""
    parameters = [torch.ones(shape) for shape in _SHAPES]
    after = [parameters]
    for step in range(sum(case.epochs)):
        parameters = [
            each - _RATE * sum(gradient(r, step, place) for r in range(case.ranks)) / case.ranks
            for place, each in enumerate(parameters)
        ]
        after.append(parameters)
    return after


@given(case=cases())
@settings(max_examples=80)
def test_averages_are_those_of_the_mean_gradients(case: Case, loader: Any, begin: Any) -> None:
    wanted = reference(case)
    first, *others = ThreadRanks(case.ranks, seed=case.seed).run(
        lambda: training(case, loader, begin)
    )
    for other in others:
        assert other.in_sync.keys() == first.in_sync.keys()
        assert other.local == first.local
    for step, parameters in first.in_sync.items():
        for place, own in enumerate(parameters):
            torch.testing.assert_close(own, wanted[step][place], rtol=1e-5, atol=1e-4)
            for other in others:
                assert torch.equal(own, other.in_sync[step][place]), "ranks differ"


@given(case=cases())
@settings(max_examples=80)
def test_rounds_have_the_lengths_of_the_schedule(case: Case, loader: Any, begin: Any) -> None:
    (seen, *_) = ThreadRanks(case.ranks, seed=case.seed).run(lambda: training(case, loader, begin))
    total = sum(case.epochs)
    local = total - seen.local
    places = sorted(seen.in_sync)
    for begin, end in itertools.pairwise(places):
        if begin < local:
            assert end == begin + 1, "steps were synchronous"
            continue
        epoch_end = min(each for each in seen.ends if each > begin)
        assert end - begin == case.schedule.length(begin, _RATE, _RATE, epoch_end - begin)


@given(case=cases(uneven=True))
@settings(max_examples=80)
def test_ranks_with_less_data_hold_nobody_up(case: Case, loader: Any, begin: Any) -> None:
    seen = ThreadRanks(case.ranks, seed=case.seed).run(lambda: training(case, loader, begin))
    longest = [each for each, left in zip(seen, case.left_out, strict=True) if not left]
    for other in longest[1:]:
        end = other.ends[-1]
        assert end == longest[0].ends[-1]
        for own, same in zip(other.in_sync[end], longest[0].in_sync[end], strict=True):
            assert torch.equal(own, same)


def rounds_begun(begin: Any, plan: ExchangePlan) -> Any:
    """A training by rounds of four steps, without a loader, after two of them."""
    own = begin(_SHAPES, SyncPlan(plan, schedule=Schedule(4)))
    own.sync.at_sync_point(SyncPoint.SCRIPT)

    def step(**options: Any) -> None:
        number = own.method.step
        gradients = {place: gradient(rank(), number, place) for place in range(len(_SHAPES))}
        own.step(gradients, **options)

    own.next_step = step
    while not own.method.running:
        step()
    own.begun = own.method.step, own.values()
    for _ in range(8):
        step()
    assert own.method.replicas_in_sync
    return own


@pytest.mark.parametrize("more", [0, 4, 6])
@pytest.mark.parametrize("codec", ["none", "topk", "powersgd"])
def test_an_average_for_the_script_is_exact_where_a_round_has_just_ended(
    codec: str, more: int, begin: Any
) -> None:
    """So nothing is left for later rounds, which go on from there."""
    plan = ExchangePlan(1, rest=ClassPlan(codec=codec, ratio=0.1, rank=1))

    def body() -> Any:
        own = rounds_begun(begin, plan)
        assert own.sync.replicas_in_sync is (codec == "none")
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        assert own.sync.replicas_in_sync
        own_rank: Any = collectives()
        made, kept = own_rank.ranks.names[rank()][:], {own.method.step: own.values()}
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        assert own_rank.ranks.names[rank()] == made, "nothing was left to do"
        for _ in range(more):
            own.next_step()
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        return own.begun, kept | {own.method.step: own.values()}

    ((begun, parameters), kept), *others = ThreadRanks(3, seed=more).run(body)
    assert len(kept) == (2 if more else 1)
    for step in range(begun, max(kept)):
        for place, each in enumerate(parameters):
            each -= _RATE * sum(gradient(r, step, place) for r in range(3)) / 3
        for values in [each[step + 1] for _, each in others if step + 1 in kept]:
            assert all(map(torch.equal, values, kept[step + 1])), "ranks differ"
        if step + 1 in kept:
            torch.testing.assert_close(kept[step + 1], parameters, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("how", ["in place", "data"])
@pytest.mark.parametrize("by", ["all", "one"])
def test_no_codec_holds_back_what_the_script_sets_after_an_average(
    by: str, how: str, begin: Any
) -> None:
    """Such as the best parameters so far."""
    plan = ExchangePlan(1, rest=ClassPlan(codec="topk", ratio=0.1))

    def body() -> list[float]:
        own = rounds_begun(begin, plan)
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        if by == "all" or rank() == 1:
            with torch.no_grad():
                for each in own.parameters:
                    (each.data if how == "data" else each).fill_(1000.0)
        lengths = []
        for _ in range(9):
            own.next_step()
            lengths.append(own.method.round_steps)
            # As a script that keeps parameters within bounds.
            for each in own.parameters:
                each.detach().clamp_(max=1000.0)
        assert lengths == [1, 4, 4, 4, 4, 4, 4, 4, 4]
        assert own.method.replicas_in_sync
        return [float(each.mean()) for each in own.values()]

    first, second, _ = ThreadRanks(3).run(body)
    assert first == second
    assert all(abs(each - (1000.0 if by == "all" else 1000.0 / 3)) < 20 for each in first)


@pytest.mark.parametrize("codec", ["none", "fp16", "bf16", "int8"])
def test_averages_have_changes_of_any_size(codec: str) -> None:
    """As they are late in a training; error feedback, of other codecs, keeps what is left out."""
    sizes = torch.tensor([1e-8, 3e-7, 1.0, 1e6]).repeat_interleave(256)

    def body() -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(len(sizes)))
        plan = ExchangePlan(1, rest=ClassPlan(codec=codec))
        averaging = Averaging("small", {parameter: ("p", "rest")}, plan)
        averaging.begin()
        parameter.data.copy_(sizes * (1 + 2 * rank()))
        averaging.exchange(exact=False)
        averaging.take(2)
        return parameter.detach()

    for found in ThreadRanks(2).run(body):
        torch.testing.assert_close(found, 2 * sizes, rtol=0.02, atol=0)


def test_running_statistics_are_averaged_where_a_round_has_just_ended(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_rank = [torch.nn.BatchNorm1d(3) for _ in range(2)]
    found = lambda _: [Statistic(of_rank[rank()], "running_mean")]  # noqa: E731
    monkeypatch.setattr(normalization, "running_statistics", found)

    def body() -> list[float]:
        of_rank[rank()].running_mean.fill_(rank())
        own = rounds_begun(begin, ExchangePlan())
        assert not own.sync.replicas_in_sync
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        assert own.sync.replicas_in_sync
        values: list[float] = of_rank[rank()].running_mean.tolist()
        return values

    assert ThreadRanks(2).run(body) == [[0.5] * 3] * 2


def test_an_average_of_some_ranks_where_a_round_has_just_ended_is_an_error(begin: Any) -> None:
    """On all ranks: none waits for ever."""
    plan = ExchangePlan(1, rest=ClassPlan(codec="topk", ratio=0.1))

    def body() -> None:
        own = rounds_begun(begin, plan)
        if rank() == 1:
            own.sync.at_sync_point(SyncPoint.EVALUATION)
        else:
            own.next_step()

    for outcome in ThreadRanks(3).outcomes(body):
        assert isinstance(outcome, ConfigurationError), outcome
        assert "1 of 3 ranks have ended a round of local steps early" in outcome.message


@pytest.mark.parametrize("codec", ["none", "topk"])
def test_ranks_agree_on_the_end_of_a_round_in_the_backward_of_its_last_step(
    codec: str, begin: Any
) -> None:
    """So it costs no cycle of Horovod's, and what the script does before that step is no matter."""
    plan = ExchangePlan(1, rest=ClassPlan(codec=codec, ratio=0.1))

    def body() -> tuple[list[bool], list[torch.Tensor], list[torch.Tensor]]:
        own, told = rounds_begun(begin, plan), []

        def average() -> None:
            told.append(own.method._end is not None)
            own.sync.at_sync_point(SyncPoint.SCRIPT)
            assert own.sync.replicas_in_sync

        for _ in range(4):
            own.next_step(between=lambda: told.append(own.method._end is not None))
        for _ in range(3):
            own.next_step()
        own.next_step(between=average)
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        for number in range(*(own.begun[0], own.method.step)):
            for place, each in enumerate(own.begun[1]):
                each -= _RATE * sum(gradient(r, number, place) for r in range(3)) / 3
        return told, own.values(), own.begun[1]

    for told, values, wanted in ThreadRanks(3).run(body):
        assert told == [False, False, False, True, True]
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("codec", ["none", "topk"])
def test_an_average_of_some_ranks_before_the_last_step_of_a_round_is_an_error(
    codec: str, begin: Any
) -> None:
    plan = ExchangePlan(1, rest=ClassPlan(codec=codec, ratio=0.1))

    def body() -> None:
        own = rounds_begun(begin, plan)
        for _ in range(3):
            own.next_step()
        if rank() == 1:
            own.next_step(between=lambda: own.sync.at_sync_point(SyncPoint.SCRIPT))
        else:
            own.next_step()
            own.next_step()

    for outcome in ThreadRanks(3).outcomes(body):
        assert isinstance(outcome, ConfigurationError), outcome
        assert "1 of 3 ranks have ended a round of local steps early" in outcome.message


@pytest.mark.parametrize("codec", ["none", "topk"])
def test_a_rank_that_fails_before_the_last_step_of_an_epoch_holds_nobody_up(
    codec: str, loader: Any, begin: Any
) -> None:
    """It leaves its loader; the others make the step, and then wait in an operation of theirs."""
    plan = ExchangePlan(1, rest=ClassPlan(codec=codec, ratio=0.1))

    def fail() -> None:
        raise ArithmeticError

    def body() -> None:
        own = begin(_SHAPES, SyncPlan(plan, schedule=Schedule(4)))
        for step in loader(own.epochs, 9):
            gradients = {place: gradient(rank(), step, place) for place in range(len(_SHAPES))}
            last = rank() == 1 and step == 8
            own.step(gradients, between=fail if last else lambda: None)
            assert own.method.running
        allreduce(torch.ones(1), name="loss")

    first, failed, third = ThreadRanks(3).outcomes(body)
    assert isinstance(failed, ArithmeticError)
    for other in (first, third):
        assert isinstance(other, ConfigurationError), other
        assert "1 of 3 ranks have ended a round of local steps early" in other.message


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_that_one_rank_refuses_ends_where_it_drops_the_gradients(
    scaled: bool, begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of a round: other ranks wait in it for this one, which goes on to an operation.

    Unless a gradient scaler's ``update()`` is still to come, which may change the scale.
    """
    monkeypatch.setattr(strategy_optimizer, "has_scaler", lambda _: scaled)

    def body() -> bool:
        own = rounds_begun(begin, ExchangePlan())
        own.optimizer._handles, own.optimizer._stepping = {}, False
        for number in range(4):
            if number < 3 or rank() == 0:
                own.next_step(in_step=False)
                continue
            own.method.on_gradient_ready(own.parameters[0])
            own.method.on_synchronize(in_step=False, fresh=True)
            own.optimizer._reduced = own.parameters[0], own.parameters[0].grad
            strategy_optimizer._zero_grad(own.optimizer)
            assert own.method.owed is scaled
        if scaled:
            own.method.settle_skipped()
        allreduce(torch.ones(1), name="loss", op=Sum)
        in_sync: bool = own.sync.replicas_in_sync
        return in_sync

    assert ThreadRanks(2).run(body) == [True, True]


def test_a_rank_that_joins_before_the_last_step_of_a_round_is_in_its_average(begin: Any) -> None:
    """Without that step, of which it has made the backward only."""

    def body() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        own = rounds_begun(begin, ExchangePlan())
        for _ in range(3):
            own.next_step()
        if rank() == 1:
            own.method.on_gradient_ready(own.parameters[0])
        else:
            own.next_step()
        join()
        for number in range(own.begun[0], own.begun[0] + 12):
            for place, each in enumerate(own.begun[1]):
                made = [r for r in range(3) if r != 1 or number < own.begun[0] + 11]
                each -= _RATE * sum(gradient(r, number, place) for r in made) / 3
        return own.values(), own.begun[1]

    for averaged, wanted in ThreadRanks(3).run(body):
        torch.testing.assert_close(averaged, wanted, rtol=1e-5, atol=1e-4)


def test_ranks_that_join_after_as_many_steps_have_their_average(begin: Any) -> None:
    """In the middle of a round: what they learned apart is not lost, as without us."""

    def body() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        own = rounds_begun(begin, ExchangePlan())
        for _ in range(2):
            own.next_step()
        join()
        for number in range(own.begun[0], own.begun[0] + 10):
            for place, each in enumerate(own.begun[1]):
                each -= _RATE * sum(gradient(r, number, place) for r in range(3)) / 3
        assert own.method.replicas_in_sync
        joined = own.values()
        for _ in range(4):  # a whole round, from its beginning
            own.next_step()
        assert own.method.replicas_in_sync
        return joined, own.begun[1]

    joined = ThreadRanks(3).run(body)
    for averaged, wanted in joined:
        torch.testing.assert_close(averaged, wanted, rtol=1e-5, atol=1e-4)
        assert all(map(torch.equal, averaged, joined[0][0]))


def held_bytes(elements: int) -> int:
    """Bytes of all tensors of this process that are so large."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    gradients = [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    storages = [
        each.untyped_storage() for each in (*tensors, *gradients) if each.numel() >= elements
    ]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_restored_rounds_go_on_where_the_schedule_has_none_of_several_steps(begin: Any) -> None:
    """As where the learning rate is the highest so far again; else ranks vote in every step."""
    plan = SyncPlan(schedule=Schedule(1, power=2, alpha=1.0))

    def step(own: Any, rate: float) -> None:
        own.optimizer.param_groups[0]["lr"] = rate
        number = own.method.step
        own.step({place: gradient(rank(), number, place) for place in range(len(_SHAPES))})

    def body() -> list[torch.Tensor]:
        saving = begin(_SHAPES, plan)
        saving.sync.at_sync_point(SyncPoint.SCRIPT)
        step(saving, 1.0)
        while not saving.method.running:
            step(saving, 0.5)
        own = begin(_SHAPES, plan)
        own.sync.load_state_dict(saving.sync.state_dict())
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        assert own.method.in_round, "moments differ"
        step(own, 2.0)
        assert own.method.running
        for _ in range(3):
            step(own, 2.0)
            assert own.method.round_steps == 1
            assert own.sync.replicas_in_sync
        values: list[torch.Tensor] = own.values()
        return values

    first, second = ThreadRanks(2).run(body)
    assert all(map(torch.equal, first, second))


def test_no_rounds_begin_under_states_that_no_checkpoint_could_have(
    begin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would need those of all ranks; the states of one rank are enough."""

    def body() -> None:
        own = begin(_SHAPES, SyncPlan(schedule=Schedule(4)))
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        if rank() == 0:
            own.optimizer.state[own.parameters[1]]["odd"] = [object()]
        for number in range(20):
            own.step({place: gradient(rank(), number, place) for place in range(len(_SHAPES))})
            assert not own.method.running and own.sync.replicas_in_sync

    ThreadRanks(2).run(body)
    assert capsys.readouterr().err.count("type object at state['odd'][0]") == 1


@pytest.mark.parametrize(
    ("count", "kept"),
    [
        (int, int),
        (int, lambda n: torch.tensor([n], dtype=torch.uint8)),
        (lambda kept: int(kept["n"][0]), lambda n: {"n": [torch.tensor([float(n)])]}),
    ],
    ids=["number", "codes", "list"],
)
def test_replicas_stay_equal_after_rounds_whose_states_have_no_mean(
    count: Callable[[Any], int], kept: Callable[[int], Any], begin: Any
) -> None:
    """As the count of steps of a rank that has skipped one; the others' states are means."""

    def body() -> Any:
        own = begin(_SHAPES, SyncPlan(schedule=Schedule(4)))
        skipped = -1

        def own_step() -> None:
            if own.method.step == skipped and rank() == 1:
                return
            for place, each in enumerate(own.parameters):
                state = own.optimizer.state[each]
                steps = 1 + count(state.get("count", kept(0)))
                state["count"] = kept(steps if place else 0)
                state["exp_avg"] = torch.full((2,), float(rank()))
                each.detach().sub_(each.grad, alpha=1 / steps)

        def step() -> None:
            number = own.method.step
            own.step({place: gradient(rank(), number, place) for place in range(len(_SHAPES))})

        own.optimizer.step = own_step
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        while not own.method.running:
            step()
        skipped = own.method.step + 5
        for _ in range(8):
            step()
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        assert own.sync.replicas_in_sync
        own.sync.make_exact(together=True)
        states = [own.optimizer.state[each] for each in own.parameters]
        averages = [float(state["exp_avg"].mean()) for state in states]
        for _ in range(5):
            step()
        return averages, [count(state["count"]) for state in states], own.values()

    (averages, counts, first), (others, others_counts, second) = ThreadRanks(2).run(body)
    assert averages == others == [0.5, 0.0, 0.0]
    assert counts == others_counts
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize(
    ("places", "said"), [([1], "for 1 parameter become"), ([0, 2], "for 2 parameters become")]
)
def test_it_is_said_how_many_states_become_those_of_rank_0(
    places: list[int], said: str, begin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing: Any = SimpleNamespace(average_tensors=lambda *_: None)

    def body() -> list[int]:
        optimizer = begin(_SHAPES, SyncPlan()).optimizer
        parameters = optimizer.param_groups[0]["params"]
        for place in places:
            optimizer.state[parameters[place]]["count"] = rank() + 1
        equalize_states("states", optimizer, nothing)
        return [optimizer.state[parameters[place]]["count"] for place in places]

    assert ThreadRanks(2).run(body) == [[1] * len(places)] * 2
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize("codec", ["none", "topk"])
@pytest.mark.parametrize("way", ["fallback", "checkpoint"])
def test_nothing_is_kept_of_rounds_that_have_ended(
    way: str, codec: str, loader: Any, begin: Any
) -> None:
    """By the loss guard, or before the checkpoint that is loaded was saved."""
    elements, lossy = 1 << 16, ExchangePlan(1, rest=ClassPlan(codec=codec, ratio=0.3))
    rounds = SyncPlan(lossy, schedule=Schedule(3))

    def train(own: Any, count: int) -> None:
        known = getattr(own.sync._progress, "epochs", None)
        for _ in range(count) if known is None else loader(known, count):
            own.step({0: torch.ones(elements)})

    def fallen_back() -> Any:
        own = begin([(elements,)], rounds)
        train(own, 10)
        assert own.method.running
        own.sync.make_exact(together=True)
        train(own, 2)
        return own

    def body() -> tuple[int, int]:
        exact = begin([(elements,)], rounds.exact())
        train(exact, 3)
        wanted = held_bytes(elements)
        del exact
        own = fallen_back()
        if way == "checkpoint":
            entries = own.sync.state_dict()
            own = begin([(elements,)], rounds)
            train(own, 3)
            own.sync.load_state_dict(entries)
            own.sync.make_exact(together=False)
            train(own, 2)
        return wanted, held_bytes(elements)

    ((wanted, found),) = ThreadRanks(1).run(body)
    assert found == wanted


@pytest.mark.parametrize("kind", ["dies", "breaks"])
@given(case=cases(uneven=True), at=st.integers(0, 60), which=st.integers(0, 3))
@settings(max_examples=80)
def test_failures_end_all_ranks(
    case: Case, at: int, which: int, kind: str, loader: Any, begin: Any
) -> None:
    dying = which % case.ranks
    faults: dict[str, Any] = {"dies": {dying: at}} if kind == "dies" else {"breaks_at": at}
    ranks = ThreadRanks(case.ranks, seed=case.seed, **faults)
    body: Callable[[], Trained] = lambda: training(case, loader, begin)  # noqa: E731
    outcomes = ranks.outcomes(body)
    failed = [each for each in outcomes if isinstance(each, BaseException)]
    assert len(failed) in (0, case.ranks)
    assert all(isinstance(each, (CollectiveError, RankDied)) for each in failed)
    assert not failed or ranks.failure


def test_a_checkpoint_of_rounds_that_is_loaded_after_a_fallback_has_no_states_of_one_rank(
    begin: Any,
) -> None:
    """Nothing would make them equal again."""

    def body() -> bool:
        own = rounds_begun(begin, ExchangePlan())
        saved = own.sync.state_dict()
        own.sync.make_exact(together=True)
        return own.sync.load_state_dict(saved) is None

    assert ThreadRanks(2, seed=1).run(body) == [True, True]


def test_a_switch_keeps_no_error_feedback_of_the_plan_before(begin: Any) -> None:
    elements = 4097
    one, two = (
        SyncPlan(ExchangePlan(buckets, rest=ClassPlan(codec="topk", ratio=0.1)))
        for buckets in (1, 2)
    )

    def trained(plan: SyncPlan, *, switched: bool) -> Any:
        own = begin([(elements,)], plan)
        for step in range(6):
            if step == 3 and switched:
                own.sync.switch(two)
            own.step({0: torch.ones(elements)})
        return own

    def body() -> tuple[int, int]:
        fresh = trained(two, switched=False)
        wanted = held_bytes(elements)
        del fresh
        own = trained(one, switched=True)
        found = held_bytes(elements)
        del own
        return wanted, found

    ((wanted, found),) = ThreadRanks(1).run(body)
    assert found == wanted
