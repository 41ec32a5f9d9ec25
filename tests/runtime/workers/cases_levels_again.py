"""Live trials of a strategy that needs process sets, which Horovod has as long as that alone."""

import contextlib
from dataclasses import replace

import horovod.torch as hvd
import torch
from cases_exchanges import OPTIMIZERS, groups_of, loss_of, plan
from cases_reinitialize import CACHE, again
from cases_switching import Model
from common import HOROVODS, OURS, assert_close, assert_same_on_all_ranks, raises

from hvd_autosync.errors import SpaceError
from hvd_autosync.runtime.collectives import initialization
from hvd_autosync.runtime.collectives.initialization import registered_process_sets
from hvd_autosync.runtime.collectives.reinitialize import NotNowError
from hvd_autosync.runtime.live.attach import Attacher
from hvd_autosync.search_space.exchange_plan import ExchangePlan
from hvd_autosync.search_space.strategy import Strategy

TWO_LEVELS = Strategy({"large_exchange": "hierarchical", "rest_exchange": "hierarchical"})
WITHIN_AND_ACROSS = [[0, 1], [2, 3], [0, 2], [1, 3]]


@contextlib.contextmanager
def adding_no_sets():
    """As in most scripts; cases begin with sets that can be added at any time."""
    last = initialization._LAST
    initialization._LAST = replace(last, dynamic=None)
    again()
    try:
        yield
    finally:
        initialization._LAST = last
        again()


def trained(optimizer_class, before_step):
    """Parameters after some steps."""
    torch.manual_seed(7)
    model = Model()
    plain = OPTIMIZERS["momentum"](groups_of(model))
    with plan(ExchangePlan(buckets=2)):
        optimizer = optimizer_class(plain, model.named_parameters())
    for number in range(12):
        before_step(optimizer, number)
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def sets():
    return [*registered_process_sets().values()]


def case_process_sets_come_and_go_with_the_strategy():
    plans = [
        TWO_LEVELS,
        Strategy({"rest_exchange": "sharded"}),
        TWO_LEVELS.replacing(cache_capacity=4096),
        TWO_LEVELS.replacing(buckets=2),
        Strategy(),
        TWO_LEVELS,
    ]

    def attach(optimizer, number):
        if number % 2 == 0:
            strategy = plans[number // 2]
            attacher.attach([optimizer], strategy, {})
            assert sets() == (WITHIN_AND_ACROSS if "hierarchical" in strategy.values() else [])
            wanted = "4096" if "cache_capacity" in strategy else None
            assert attacher.variables[CACHE] == wanted

    with adding_no_sets():
        attacher = Attacher()
        ours = trained(OURS, attach)
        attacher.attach([], Strategy(), {})
        assert sets() == []
        horovods = trained(HOROVODS, lambda *_: None)
    assert_same_on_all_ranks(ours)
    assert_close(ours, horovods)


def case_a_strategy_is_left_later_where_operations_are_under_way():
    """It goes on with its process sets until then."""
    with adding_no_sets():
        attacher, handles = Attacher(), []

        def attach(optimizer, number):
            if number == 2:
                attacher.attach([optimizer], TWO_LEVELS, {})
            if number == 4:
                handles.append(hvd.allreduce_async(torch.ones(1), name=f"own.{hvd.rank()}"))
                with raises(NotNowError, "under way on rank 0"):
                    attacher.attach([optimizer], Strategy({"buckets": 3}), {})
                assert sets() == WITHIN_AND_ACROSS
                assert optimizer._sync.plan.exchange.two_levels
                for rank in range(hvd.size()):
                    if rank != hvd.rank():
                        handles.append(hvd.allreduce_async(torch.ones(1), name=f"own.{rank}"))
                for handle in handles:
                    hvd.synchronize(handle)
            if number == 6:
                attacher.attach([optimizer], Strategy({"buckets": 3}), {})
                assert sets() == [] and not optimizer._sync.plan.exchange.two_levels

        ours = trained(OURS, attach)
        assert_close(ours, trained(HOROVODS, lambda *_: None))


def case_a_script_with_process_sets_of_its_own():
    """Or that may add some, as cases of other files do; it trains on by other exchanges."""

    def attach(optimizer, number):
        if number == 3:
            with raises(SpaceError, "the script has some of its own"):
                attacher.attach([optimizer], TWO_LEVELS, {})
            attacher.attach([optimizer], Strategy({"rest_exchange": "sharded"}), {})

    attacher = Attacher()
    before = sets()
    trained(OURS, attach)
    script = hvd.add_process_set([0, 1])
    trained(OURS, attach)
    assert sets() == [*before, [0, 1]]
    assert hvd.remove_process_set(script)
