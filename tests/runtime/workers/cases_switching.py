"""The exchange of gradients changes between two steps, and training is what it would be."""

import copy
import gc
import itertools

import horovod.torch as hvd
import torch
from cases_exchanges import CLASSES, HIERARCHICAL, OPTIMIZERS, PLANS, groups_of, loss_of, plan
from cases_exchanges import Model as Plain
from common import (
    HOROVODS,
    OURS,
    assert_close,
    assert_same_on_all_ranks,
    clipped_step,
    exchange_of,
    raises,
    seeded,
)
from torch import nn

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.exchange import reaching
from hvd_autosync.runtime.exchange.factors import FactorsBucket
from hvd_autosync.runtime.exchange.reaching import Memory
from hvd_autosync.runtime.guard.fallback import fall_back_to_exact
from hvd_autosync.runtime.patches import linear
from hvd_autosync.runtime.sync.synchronizer import switch
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.sync_plan import SyncPlan

#: Steps under a plan: one for the order of arrival, one with buckets, one for owners' states.
STRETCH = 4
LOSSY = ExchangePlan(large=ClassPlan(codec="topk", ratio=0.2))


class Model(Plain):
    """Also with running statistics."""

    def __init__(self):
        super().__init__()
        # By the usual epsilon it is as it was at any scale of what it reads, and the
        # gradient of ``scale`` would be rounding alone.
        self.running = nn.BatchNorm1d(4, eps=1.0)

    def forward(self, x):
        return self.running(super().forward(x))


def plans():
    """Those that fit the job; of two levels also before and after those of one."""
    return [name for name, each in PLANS.items() if hvd.cross_size() > 1 or not each.two_levels]


def walk(names):
    """A sequence in which every name follows every name once (an Eulerian circuit)."""
    left = {name: list(names) for name in names}
    found, path = [], [names[0]]
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop())
        else:
            found.append(path.pop())
    assert len({*itertools.pairwise(found)}) == len(found) - 1 == len(names) ** 2
    return found


def train(factory, sequence, optimizer="momentum", passes=1, step=None, save_at=()):
    """Train under each plan of ``sequence`` for some steps, from checkpoints at ``save_at``."""
    model = Model()

    def wrapped():
        options = {"backward_passes_per_step": passes} if passes > 1 else {}
        base = OPTIMIZERS[optimizer](groups_of(model))
        return factory(base, named_parameters=model.named_parameters(), **options)

    distributed, number = wrapped(), 0
    for place, name in enumerate(sequence):
        if factory is OURS and place > 0:
            switch(distributed, SyncPlan(PLANS.get(name, LOSSY), CLASSES))
        for _ in range(STRETCH):
            distributed.zero_grad()
            for _ in range(passes):
                (loss_of(model, number) / passes).backward()
                number += 1
            (step or type(distributed).step)(distributed)
        if place in save_at:
            saved = copy.deepcopy(distributed.state_dict())
            del distributed
            gc.collect()  # its hooks end with it
            distributed = wrapped()
            distributed.load_state_dict(saved)
    return [each.detach() for each in (*model.parameters(), *model.buffers())]


def compare(sequence, **options):
    with plan(PLANS[sequence[0]]):
        ours = train(OURS, sequence, **options)
    expected = train(HOROVODS, sequence, **options)
    # Statistics of batches are each rank's own.
    assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert_same_on_all_ranks([p for p in ours if p.dim() == 2])


def case_switching_between_every_two_plans():
    compare(walk(plans()), optimizer="Adam")


def case_switching_with_momentum():
    names = plans()
    compare([*names, *reversed(names)], optimizer="momentum")


def case_switching_with_clipping_and_accumulation():
    compare(plans(), step=clipped_step)
    compare(plans(), passes=2, optimizer="AdamW")


def case_switching_between_checkpoints():
    names = plans()
    compare(names, optimizer="Adam", save_at=range(0, len(names), 2))


def case_switching_of_two_optimizers():
    def run(factory, sequence):
        torch.manual_seed(9)
        parts = [nn.Linear(6, 6), nn.Linear(6, 6)]
        optimizers = [
            factory(
                torch.optim.Adam(part.parameters(), lr=0.01), part.named_parameters(prefix=f"p{i}")
            )
            for i, part in enumerate(parts)
        ]
        for number, name in enumerate(sequence):
            for place, optimizer in enumerate(optimizers):
                # One of them changes half as often.
                if factory is OURS and number and (place == 0 or number % 2):
                    switch(optimizer, SyncPlan(PLANS[name], {"large": ("*weight",)}))
            for _ in range(STRETCH):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                x = torch.randn(5, 6, generator=seeded(hvd.rank()))
                parts[1](torch.tanh(parts[0](x))).pow(2).mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
        return [p.detach() for part in parts for p in part.parameters()]

    names = plans()
    with plan(PLANS[names[0]]):
        ours = run(OURS, names)
    assert_close(ours, run(HOROVODS, names), atol=1e-5, rtol=1e-5)


def case_switching_from_and_to_error_feedback():
    """A lossy plan in between: replicas stay equal, and its memory waits for nobody else."""
    model = Model()
    with plan(LOSSY):
        base = OPTIMIZERS["momentum"](groups_of(model))
        distributed = OURS(base, named_parameters=model.named_parameters())

    def steps(first):
        for number in range(first, first + STRETCH):
            distributed.zero_grad()
            loss_of(model, number).backward()
            distributed.step()

    steps(0)
    before = exchange_of(distributed).dispatcher.codec_states()
    assert before
    switch(distributed, SyncPlan(ExchangePlan(2, "size", "arrival", large=LOSSY.large), CLASSES))
    switch(distributed, SyncPlan(LOSSY, CLASSES))
    after = exchange_of(distributed).dispatcher.codec_states()
    assert {*after} == {*before}
    for name, state in before.items():
        assert_close(list(after[name].values()), list(state.values()))
    steps(STRETCH)
    switch(distributed, SyncPlan(ExchangePlan(), CLASSES))
    steps(2 * STRETCH)
    assert_same_on_all_ranks([p.detach() for p in model.parameters()])


def case_switching_leaves_nothing_behind():
    model = Model()
    with plan(PLANS["priority"]):
        base = OPTIMIZERS["Adam"](groups_of(model))
        distributed = OURS(base, named_parameters=model.named_parameters())
    for name in ("factors", "sharded", "priority", "as Horovod"):
        for number in range(6):
            distributed.zero_grad()
            loss_of(model, number).backward()
            distributed.step()
        switch(distributed, SyncPlan(PLANS[name], CLASSES))
    parameters = list(model.parameters())
    assert not {id(p) for p in parameters} & {*linear._WATCHED}
    assert all(type(p) is nn.Parameter for p in parameters)
    assert not any(Memory(p).shared() for p in parameters)
    watched = [m for m in model.modules() if isinstance(m._parameters, reaching._Watched)]
    assert not watched
    held = {p for group in distributed.param_groups for p in group["params"]}
    assert held == {p for p in parameters if p.requires_grad or p in held}
    assert {*distributed.state} <= held


def case_switching_in_the_midst_of_a_step_is_refused():
    model = Model()
    with plan(PLANS["ordered"]):
        base = OPTIMIZERS["SGD"](groups_of(model))
        distributed = OURS(base, named_parameters=model.named_parameters())
    for number in range(2):
        distributed.zero_grad()
        loss_of(model, number).backward()
        with raises(AutosyncError, "between backward() and step()"):
            switch(distributed, SyncPlan(PLANS["one bucket"], CLASSES))
        distributed.step()
    assert_same_on_all_ranks([p.detach() for p in model.parameters()])


def case_switching_to_a_plan_that_does_not_fit():
    """It raises on all ranks, and training goes on as before, with all that belongs to it."""
    if hvd.cross_size() > 1:
        return
    for name in ("factors", "sharded", "ordered"):
        model = Model()
        with plan(PLANS[name]):
            base = OPTIMIZERS["Adam"](groups_of(model))
            distributed = OURS(base, named_parameters=model.named_parameters())
        for number in range(4):
            distributed.zero_grad()
            loss_of(model, number).backward()
            distributed.step()
            exchange = exchange_of(distributed)
            with raises(AutosyncError, "hierarchical"):
                switch(distributed, SyncPlan(ExchangePlan(large=HIERARCHICAL), CLASSES))
            assert exchange_of(distributed) is exchange
            assert exchange.dispatcher.buckets
        if hvd.rank() == 0:
            assert len(distributed.state_dict()["state"]) > 4
        if name == "factors" and hvd.size() == 2:  # factors of four ranks are larger than gradients
            assert any(
                isinstance(b, FactorsBucket) and b._layer for b in exchange.dispatcher.buckets
            )
        assert_same_on_all_ranks([p.detach() for p in model.parameters()])
        hvd.barrier()


def case_switching_after_a_fallback_stays_exact():
    model = Model()
    with plan(LOSSY):
        base = OPTIMIZERS["momentum"](groups_of(model))
        distributed = OURS(base, named_parameters=model.named_parameters())
    fall_back_to_exact(distributed)
    switch(distributed, SyncPlan(LOSSY, CLASSES))
    for number in range(3):
        distributed.zero_grad()
        loss_of(model, number).backward()
        distributed.step()
    assert all(bucket.codec is None for bucket in exchange_of(distributed).dispatcher.buckets)


def case_switching_while_only_some_have_made_steps():
    """All ranks switch, or none does."""
    model = Model()
    with plan(PLANS["ordered"]):
        base = OPTIMIZERS["SGD"](groups_of(model))
        distributed = OURS(base, named_parameters=model.named_parameters())
    for number in range(3 if hvd.rank() == 0 else 0):
        distributed.zero_grad()
        loss_of(model, number).backward()
        distributed.step()
    hvd.join()
    switch(distributed, SyncPlan(PLANS["sharded"], CLASSES))
    if hvd.rank() == 0:
        loss_of(model, 7).backward()
    with raises(AutosyncError, "between backward() and step()"):
        switch(distributed, SyncPlan(PLANS["ordered"], CLASSES))
    if hvd.rank() > 0:
        loss_of(model, 7).backward()
    distributed.step()
