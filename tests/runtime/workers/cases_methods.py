"""Any way to synchronize follows any other in the middle of a training, and nothing is lost.

A row of the matrix is what a plan can say. ``greedy``, ``elastic`` and ``balance`` are policies for
stragglers, of the protocol; no rank is slow enough here to be excluded or left behind, which is in
``cases_stragglers.py``. Elastic Horovod is a launcher: its jobs begin under none.
"""

import contextlib
import copy
import gc
import io
import itertools
import threading
import unittest.mock
import weakref

import horovod.torch as hvd
import torch
from cases_exchanges import CLASSES, OPTIMIZERS, PLANS, groups_of, loss_of
from cases_guard import real_training
from cases_guard import train as train_guarded
from cases_local_steps import loader, step, together
from cases_switching import Model, walk
from common import (
    HOROVODS,
    OURS,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    clipped_step,
    exchange_of,
    guard_of,
    mlp,
    phases_of,
    raises,
    rounds_of,
    seeded,
    synchronized_by,
    wrap,
)
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from hvd_autosync.errors import AutosyncError, ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives import state_rpc
from hvd_autosync.runtime.guard.fallback import fall_back_to_exact
from hvd_autosync.runtime.patches.join_hook import watch_join
from hvd_autosync.runtime.sync import phases
from hvd_autosync.runtime.sync.phase import Phase, Votes
from hvd_autosync.runtime.sync.synchronizer import switch
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan

#: Steps under a plan and of an epoch: plans change at every place of an epoch.
STRETCH, EPOCH = 6, 7
#: Samples of an equal batch, where batches can be split.
BATCH = 4
TOPK = ClassPlan(codec="topk", ratio=0.3)
INT8 = ClassPlan(codec="int8")
LOSSLESS = ClassPlan(lossless=True)
EXCHANGED = {
    name: SyncPlan(PLANS[name], CLASSES)
    for name in ("as Horovod", "slices", "rows", "sharded", "priority mixed", "factors")
} | {"lossless": SyncPlan(ExchangePlan(2, "ordered", "arrival", *[LOSSLESS] * 3), CLASSES)}
#: Under which every step is that of BSP, up to the order of sums.
EXACT = {
    **EXCHANGED,
    "rounds later": SyncPlan(PLANS["ordered"], CLASSES, Schedule(4, start=10**6)),
    "SSP(0)": SyncPlan(classes=CLASSES, protocol=Protocol("ssp", 0)),
    "SSP(0) first": SyncPlan(
        PLANS["slices"], CLASSES, None, Protocol("ssp", 0, 0.5, async_first=True, total=800)
    ),
    "BSP first": SyncPlan(
        classes=CLASSES, protocol=Protocol("ssp", 0, 0.5, total=10**9, stragglers="greedy")
    ),
    "elastic": SyncPlan(
        PLANS["ordered"], CLASSES, protocol=Protocol(share=1.0, stragglers="elastic")
    ),
    "balance": SyncPlan(PLANS["rows"], CLASSES, protocol=Protocol(share=1.0, stragglers="balance")),
}
LOSSY = {
    "rounds": SyncPlan(classes=CLASSES, schedule=Schedule(3)),
    "coded rounds": SyncPlan(ExchangePlan(1, large=TOPK, rest=TOPK), CLASSES, Schedule(2)),
    "ASP": SyncPlan(classes=CLASSES, protocol=Protocol("asp")),
    "SSP(2)": SyncPlan(classes=CLASSES, protocol=Protocol("ssp", 2)),
    "rounds, then ASP": SyncPlan(
        classes=CLASSES, schedule=Schedule(3), protocol=Protocol("asp", share=0.5, total=10**9)
    ),
    # With error feedback, and a codec without it.
    "topk": SyncPlan(ExchangePlan(2, "size", "arrival", *[TOPK] * 3), CLASSES),
    "int8": SyncPlan(ExchangePlan(0, "ordered", "arrival", *[INT8] * 3), CLASSES),
}


def epochs():
    """Numbers of steps, in epochs of a loader that counts samples: one of each rank in a step."""
    first = 0
    while True:
        for number in DataLoader(range(EPOCH), batch_size=1):
            yield first + int(number)
        first += EPOCH


def sampled():
    """This rank's samples of each step; under ``balance`` ranks split those of all in another way.

    A worker has the samples of the next two steps.
    """
    data = range(EPOCH * BATCH * hvd.size())
    sampler = DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=False)
    loader = DataLoader(
        data, BATCH, sampler=sampler, num_workers=1, persistent_workers=True, collate_fn=list
    )
    while True:
        yield from loader


class SlowTimer:
    """As ``ComputeTimer``, of a clock by which a sample takes three times as long on rank 1.

    Attributes:
        samples: Those of the step; 0 where all ranks are equally fast.
    """

    samples = 0

    def waited(self, seconds):
        pass

    def stepped(self):
        return self.seconds

    @property
    def seconds(self):
        return self.samples * (3.0 if hvd.rank() == 1 else 1.0) or 1.0


def phase_of(optimizer):
    return optimizer._sync._phase.now


def train(factory, sequence, optimizer="momentum", passes=1, step=None, save_at=()):
    """Train under each plan of ``sequence`` for some steps, from checkpoints at ``save_at``.

    Returns:
        Parameters, means over ranks of running statistics, and which phases each plan had. Some
        methods average the statistics, which are each rank's own under Horovod's optimizer.
    """
    model = Model()

    def wrapped(name):
        options = {"backward_passes_per_step": passes} if passes > 1 else {}
        base = OPTIMIZERS[optimizer](groups_of(model))
        with synchronized_by(EXACT[name]):
            return factory(base, named_parameters=model.named_parameters(), **options)

    distributed, numbers, seen = wrapped(sequence[0]), epochs(), set()
    for place, name in enumerate(sequence):
        if factory is OURS and place > 0:
            switch(distributed, EXACT[name])
        for number in itertools.islice(numbers, STRETCH):
            distributed.zero_grad()
            for each in range(passes):
                (loss_of(model, passes * number + each) / passes).backward()
            (step or type(distributed).step)(distributed)
            if factory is OURS:
                seen.add((name, phase_of(distributed)))
        if place in save_at:
            saved = copy.deepcopy(distributed.state_dict())
            hvd.barrier()  # the others may still ask for states
            del distributed
            gc.collect()  # its hooks end with it
            distributed = wrapped(name)
            distributed.load_state_dict(saved)
    statistics = [hvd.allreduce(b.float(), name=f"mean.{n}") for n, b in model.named_buffers()]
    return [p.detach() for p in model.parameters()], statistics, seen


def compare(sequence, **options):
    ours, statistics, seen = train(OURS, sequence, **options)
    expected, expected_statistics, _ = train(HOROVODS, sequence, **options)
    assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert len(statistics) == 3  # mean, variance and number of batches
    assert_close(statistics, expected_statistics, atol=1e-4, rtol=1e-4)
    assert_same_on_all_ranks([p for p in ours if p.dim() == 2])
    return seen


def case_every_exact_method_after_every_other():
    seen = compare(walk([*EXACT]), optimizer="Adam")
    for name in ("SSP(0)", "SSP(0) first"):
        assert (name, Phase.NO_BARRIER) in seen, seen
    for name in ("SSP(0) first", "BSP first"):
        assert (name, Phase.EXCHANGE) in seen, seen


def case_exact_methods_with_momentum():
    seen = compare([*EXACT, *reversed(EXACT)])
    assert ("BSP first", Phase.EXCHANGE) in seen, seen


def case_exact_methods_with_clipping():
    """Without a barrier a rank clips its own gradient."""
    compare(["slices", "rounds later", "sharded", "BSP first", "as Horovod"], step=clipped_step)


def case_exact_methods_with_accumulation():
    """A script that accumulates may split its batches, so their sizes may not change."""
    compare(walk([each for each in EXACT if each != "balance"]), passes=2, optimizer="Adam")


def case_every_exact_method_after_every_other_with_momentum():
    compare(walk([*EXACT]))


def case_every_exact_method_after_every_other_with_clipping():
    """With momentum, too."""
    compare(walk([each for each in EXACT if not each.startswith("SSP(0)")]), step=clipped_step)


def case_every_exact_method_after_every_other_between_checkpoints():
    names = walk([*EXACT])
    compare(names, optimizer="Adam", save_at=range(len(names)))


def case_exact_methods_between_checkpoints():
    names = [*EXACT]
    compare(names, optimizer="Adam", save_at=range(0, len(names), 2))


def handles_stragglers(plan):
    return plan.protocol is not None and plan.protocol.stragglers != "none"


def case_exact_methods_of_two_optimizers():
    """One of them changes half as often."""
    names = walk([name for name, plan in EXACT.items() if not handles_stragglers(plan)])

    def run(factory):
        torch.manual_seed(9)
        parts = [nn.Linear(6, 6), nn.Linear(6, 6)]
        with synchronized_by(EXACT[names[0]]):
            optimizers = [
                factory(torch.optim.Adam(p.parameters(), 0.01), p.named_parameters(prefix=f"p{i}"))
                for i, p in enumerate(parts)
            ]
        numbers = epochs()
        for place, name in enumerate(names):
            for which, optimizer in enumerate(optimizers):
                if factory is OURS and place and (which == 0 or place % 2):
                    switch(optimizer, EXACT[name])
            for number in itertools.islice(numbers, STRETCH):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                seed = 100 * hvd.rank() + number
                x = torch.randn(5, 6, generator=seeded(seed))
                parts[1](torch.tanh(parts[0](x))).pow(2).mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
        return [p.detach() for part in parts for p in part.parameters()]

    assert_close(run(OURS), run(HOROVODS), atol=1e-5, rtol=1e-4)


class Constant(nn.Module):
    """Its gradients do not depend on its parameters, so all methods train the same."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Linear(9, 7)
        self.head = nn.Linear(7, 2)
        # Of each parameter, for all samples; an epoch leaves parameters small, and so rounding.
        count = EPOCH * BATCH * hvd.size()
        slopes = [torch.randn(count, *p.shape, generator=seeded(1)) for p in self.parameters()]
        self.slopes = [each - each.mean(0) for each in slopes]

    def forward(self, samples):
        """The mean over some samples."""
        slopes = [each[samples].mean(0) for each in self.slopes]
        return sum((p * g).sum() for p, g in zip(self.parameters(), slopes, strict=True))


def count_gradients(sequence):
    """Each gradient counts once: no switch loses one, nor what rounds have not sent of one.

    A codec of gradients loses what it rounds or its error feedback keeps: it gets none.
    Batches that were split before a switch count as the samples that they have.
    """
    plans, model, rate = {**EXACT, **LOSSY}, Constant(), 0.01
    start = [p.detach().clone() for p in model.parameters()]
    with synchronized_by(plans[sequence[0]]):
        optimizer = wrap(OURS, model, torch.optim.SGD(model.parameters(), lr=rate))
    steps, seen, used, whole = sampled(), set(), [], BATCH * hvd.size()
    with votes_in_every_step():
        for place, name in enumerate(sequence):
            if place:
                switch(optimizer, plans[name])
                assert together(model), sequence[place - 1 : place + 1]
            for samples in itertools.islice(steps, STRETCH):
                SlowTimer.samples = len(samples) if name == "balance" else 0
                coded = plans[name].exchange.lossy and phase_of(optimizer) is not Phase.ROUNDS
                weight = 0.0 if coded else 1.0
                optimizer.zero_grad()
                (weight * model(samples)).backward()
                optimizer.step()
                used.append(weight)
                seen.add((name, phase_of(optimizer)))
                if len(samples) != BATCH:
                    seen.add((name, "unequal"))
        switch(optimizer, EXACT["as Horovod"])
    assert optimizer._sync._progress.step == len(used)
    of_samples = torch.zeros(EPOCH, whole)
    for number, weight in enumerate(used):
        of_samples[number % EPOCH] += weight * rate / whole
    moved = [torch.tensordot(of_samples.flatten(), each, 1) for each in model.slopes]
    expected = [p - each for p, each in zip(start, moved, strict=True)]
    assert_close([p.detach() for p in model.parameters()], expected, atol=1e-5, rtol=1e-5)
    return seen


@contextlib.contextmanager
def votes_in_every_step():
    """By a clock of the case, so that batches are split within a few steps."""
    before, Votes.EVERY = Votes.EVERY, 1
    timer, phases.ComputeTimer = phases.ComputeTimer, SlowTimer
    try:
        yield
    finally:
        Votes.EVERY, phases.ComputeTimer = before, timer


def case_no_gradient_is_lost_between_any_two_methods():
    seen = count_gradients(walk([*EXACT, *LOSSY]))
    for name, phase in (
        ("rounds", Phase.ROUNDS),
        ("coded rounds", Phase.ROUNDS),
        ("rounds, then ASP", Phase.ROUNDS),
        ("ASP", Phase.NO_BARRIER),
        ("SSP(2)", Phase.NO_BARRIER),
        ("SSP(0)", Phase.NO_BARRIER),
        ("elastic", Phase.EXCHANGE),
        ("balance", "unequal"),
    ):
        assert (name, phase) in seen, seen
    # Not where an epoch ends with the steps under ``balance``.
    assert len([name for name, what in seen if what == "unequal"]) > 6, seen


def case_no_gradient_is_lost_between_some_methods():
    between = ["rounds", "SSP(0)", "coded rounds", "ASP", "rounds, then ASP", "sharded", "balance"]
    seen = count_gradients(["slices", *between, "balance", "lossless", *reversed(between)])
    assert ("lossless", "unequal") in seen, seen


def case_states_that_some_rank_has_not_begin_again():
    """Those of one parameter only, and rank 0 says so."""
    model = mlp()
    with synchronized_by(LOSSY["rounds"]):
        optimizer = wrap(OURS, model)
    for number in itertools.islice(epochs(), EPOCH):
        step(model, optimizer, number)
    first, *others = model.parameters()
    if hvd.rank() == 1:
        del optimizer.state[first]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        switch(optimizer, EXACT["as Horovod"])
    assert not optimizer.state[first]
    moments = [optimizer.state[p]["momentum_buffer"] for p in others]
    assert all(each.any() for each in moments)
    assert_same_on_all_ranks(moments)
    assert ("0.weight" in said.getvalue()) == (hvd.rank() == 0), said.getvalue()
    for number in itertools.islice(epochs(), EPOCH):
        step(model, optimizer, number)
    assert together(model)


def case_a_plan_that_cannot_be_attached_leaves_the_old_one():
    """As where one rank has no port left for the states of ``sharded``."""
    expected = train(HOROVODS, ["slices", "slices"])[0]

    def no_port(*arguments, **options):
        raise OSError("no port is left")

    model, numbers = Model(), epochs()
    with synchronized_by(EXACT["slices"]):
        base = OPTIMIZERS["momentum"](groups_of(model))
        optimizer = OURS(base, named_parameters=model.named_parameters())
    for place in range(2):
        for number in itertools.islice(numbers, STRETCH):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
        if place == 0:
            own_port = state_rpc.AuthenticatedPort
            if hvd.rank() == 1:
                state_rpc.AuthenticatedPort = no_port
            try:
                with raises(AutosyncError, "rank 1: OSError: no port is left"):
                    switch(optimizer, EXACT["sharded"])
            finally:
                state_rpc.AuthenticatedPort = own_port
            assert optimizer._sync.plan == EXACT["slices"]
    assert_close([p.detach() for p in model.parameters()], expected, atol=1e-5, rtol=1e-5)


def case_a_schedule_goes_on_where_the_training_is():
    model = mlp()
    with synchronized_by(SyncPlan(ExchangePlan(buckets=2))):
        optimizer = wrap(OURS, model)
    numbers, later = epochs(), SyncPlan(schedule=Schedule(3, start=24))
    local = []
    for place in range(40):
        if place == 10:
            switch(optimizer, later)
        if place == 30:
            switch(optimizer, SyncPlan(ExchangePlan(buckets=3)))
        if place == 33:
            switch(optimizer, later)
        step(model, optimizer, next(numbers))
        local.append(phase_of(optimizer) is Phase.ROUNDS)
    # The vote is after step 24; later there is one at once.
    assert local == [24 <= each + 1 <= 30 or each >= 33 for each in range(40)], local
    assert rounds_of(optimizer).step == 40


def case_samples_count_on_under_another_plan():
    """The switch to ASP is after 160 of 320 samples, whatever was trained meanwhile."""
    share = SyncPlan(protocol=Protocol("asp", share=0.5, total=160 * hvd.size()))
    model = mlp()
    with synchronized_by(share):
        optimizer = wrap(OURS, model)
    ran = []
    for number in range(3):
        for numbers in DataLoader(range(40), batch_size=4):
            if len(ran) == 5:
                switch(optimizer, SyncPlan(ExchangePlan(buckets=2)))
            if len(ran) == 13:
                switch(optimizer, share)
            step(model, optimizer, 10 * number + int(numbers[0]))
            ran.append(phase_of(optimizer) is Phase.NO_BARRIER)
        assert together(model)
    assert not any(ran[:20]) and all(ran[28:]), ran


def case_switching_in_the_midst_of_a_step_of_any_method_is_refused():
    for name in ("rounds", "SSP(0)", "ASP", "rounds later"):
        plan = {**EXACT, **LOSSY}[name]
        model = mlp()
        with synchronized_by(plan):
            optimizer = wrap(OURS, model)
        for number in itertools.islice(epochs(), 2 * EPOCH + 2):
            optimizer.zero_grad()
            model(batch(number)).pow(2).mean().backward()
            if number % 5 == 4:
                with raises(AutosyncError, "between backward() and step()"):
                    switch(optimizer, EXACT["as Horovod"])
            optimizer.step()
        switch(optimizer, EXACT["as Horovod"])
        assert together(model)


def case_ranks_at_different_steps_cannot_switch_and_go_on():
    model = mlp()
    with synchronized_by(LOSSY["ASP"]):
        optimizer = wrap(OURS, model)
    for number in loader(4):
        step(model, optimizer, int(number))
    uneven = 3 + 2 * (hvd.rank() == 0)
    for index, number in enumerate(loader(6)):
        if index == uneven:
            with raises(ConfigurationError, "at the end of an epoch"):
                switch(optimizer, EXACT["as Horovod"])
            assert together(model) and phase_of(optimizer) is Phase.EXCHANGE
        if index < 3 or hvd.rank() == 0:
            step(model, optimizer, 10 + int(number))
    assert together(model)
    switch(optimizer, EXACT["as Horovod"])
    for number in range(3):
        step(model, optimizer, number)
    assert together(model)


def case_a_method_that_was_left_is_gone():
    model = mlp()
    with synchronized_by(EXACT["as Horovod"]):
        optimizer = wrap(OURS, model)
    hooks = len(watch_join().by_number)
    for name in ("rounds", "ASP", "rounds, then ASP", "coded rounds", "SSP(0)"):
        switch(optimizer, LOSSY.get(name) or EXACT[name])
        for number in itertools.islice(epochs(), 2 * EPOCH):
            step(model, optimizer, number)
        left = weakref.ref(optimizer._sync.method)
        switch(optimizer, EXACT["as Horovod"])
        hvd.barrier()
        for thread in threading.enumerate():
            if thread.name.endswith("closes"):
                thread.join(120)
        gc.collect()
        assert left() is None, name
        assert len(watch_join().by_number) == hooks
        assert not exchange_of(optimizer)._zero_step


def case_a_guard_begins_with_a_lossy_plan():
    for name in ("rounds", "coded rounds"):
        with real_training() as said:
            model = mlp()
            with synchronized_by(EXACT["as Horovod"]):
                optimizer = wrap(OURS, model)
            train_guarded(model, optimizer, 20)
            assert guard_of(optimizer) is None
            switch(optimizer, LOSSY[name])
            train_guarded(model, optimizer, 200, first=20)
            assert guard_of(optimizer) is not None and phase_of(optimizer) is Phase.ROUNDS
            train_guarded(
                model, optimizer, 120, lambda number: float("nan") if number == 225 else 1.0, 220
            )
            assert guard_of(optimizer) is None and phase_of(optimizer) is Phase.EXACT
            assert together(model)
            watched, current.watch = current.watch, None
            assert watched is None
        assert ("loss guard" in said.getvalue()) == (hvd.rank() == 0)


def case_a_guard_goes_on_through_exact_switches_and_ends_live_tuning():
    coded = ClassPlan(codec="int8")
    plans = [
        SyncPlan(ExchangePlan(count, "ordered", "arrival", *[coded] * 3), CLASSES)
        for count in (1, 3)
    ]
    live = current.live
    with real_training() as said:
        model = mlp()
        with synchronized_by(plans[0]):
            optimizer = wrap(OURS, model)
        current.live = unittest.mock.Mock()
        try:
            guard = guard_of(optimizer)
            assert guard is not None
            for place in range(6):
                train_guarded(model, optimizer, 40, first=40 * place)
                switch(optimizer, plans[place % 2])
                assert guard_of(optimizer) is guard and guard.step == 40 * (place + 1)
                assert not current.live.lossy_ended.called
            train_guarded(
                model, optimizer, 120, lambda number: float("nan") if number == 245 else 1.0, 240
            )
            assert guard_of(optimizer) is None and phase_of(optimizer) is Phase.EXACT
            current.live.lossy_ended.assert_called_once_with()
            switch(optimizer, plans[0])
            assert all(bucket.codec is None for bucket in exchange_of(optimizer).dispatcher.buckets)
            assert together(model)
        finally:
            current.live, current.watch = live, None
    assert ("loss guard" in said.getvalue()) == (hvd.rank() == 0)


def case_no_lossy_method_follows_a_fallback():
    for name in LOSSY:
        model = mlp()
        with synchronized_by(LOSSY["rounds"]):
            optimizer = wrap(OURS, model)
        numbers = epochs()
        for number in itertools.islice(numbers, EPOCH):
            step(model, optimizer, number)
        assert together(model)
        fall_back_to_exact(optimizer, together=True)
        switch(optimizer, LOSSY[name])
        for number in itertools.islice(numbers, 2 * EPOCH):
            step(model, optimizer, number)
            assert together(model)
        assert phase_of(optimizer) is Phase.EXACT
        assert all(bucket.codec is None for bucket in exchange_of(optimizer).dispatcher.buckets)


def case_what_does_not_fit_leaves_the_method_in_place():
    model = mlp()
    for name in ("rounds", "SSP(0)"):
        gc.collect()  # of an optimizer before it, which its errors refer to
        with synchronized_by({**EXACT, **LOSSY}[name]):
            optimizer = wrap(OURS, model)
        method = optimizer._sync.method
        bad = SyncPlan(ExchangePlan(rest=ClassPlan(codec="powersgd", rank=99)))
        for number in itertools.islice(epochs(), EPOCH + 3):
            step(model, optimizer, number)
            with raises(AutosyncError, "rank"):
                switch(optimizer, bad)
            assert optimizer._sync.method is method
    assert phases_of(optimizer).running
