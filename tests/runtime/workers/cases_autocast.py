"""Autocast, with and without a gradient scaler, under every exchange, codec and schedule.

It is that of bfloat16; on a GPU with a scaler, where scripts need one, that of float16.
Exact ones train what Horovod's own optimizer trains; under lossy ones the loss falls.
"""

import horovod.torch as hvd
import torch
from cases_codecs import PLANS as CODECS
from cases_exchanges import CLASSES, OPTIMIZERS, Model, groups_of, loss_of, plan, plans
from cases_local_steps import loader, scheduled, together
from common import HOROVODS, OURS, assert_close, assert_same_on_all_ranks, device_type

from hvd_autosync.runtime.sync.synchronizer import switch
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan

STEPS = 12
#: With a scaler, the gradients of this step overflow.
OVERFLOW = 5


def autocast_loss(model, step, *, dtype=torch.bfloat16, **options):
    with torch.autocast(device_type(), dtype):
        return loss_of(model, step, **options)


def train(factory, *, scaled, steps=STEPS, on_all=False):
    """A model after some steps; a scaler skips one that overflows on rank 0, or on all ranks."""
    model, skipped = Model(), 0
    dtype = torch.float16 if scaled and device_type() == "cuda" else torch.bfloat16
    optimizer = factory(
        OPTIMIZERS["momentum"](groups_of(model)), named_parameters=model.named_parameters()
    )
    scaler = torch.amp.GradScaler(
        torch.get_default_device().type, init_scale=2.0**10, growth_interval=1000, enabled=scaled
    )
    for number in loader(steps):
        optimizer.zero_grad()
        loss = autocast_loss(model, int(number), dtype=dtype)
        if scaled and number == OVERFLOW and (on_all or hvd.rank() == 0):
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        skipped += scaler.get_scale() < before
    assert skipped == scaled
    return model


def train_without_scaler(factory):
    """The optimizer alone uses the gradients, so that owners step and updates are deferred."""
    model = Model()
    optimizer = factory(
        OPTIMIZERS["momentum"](groups_of(model)), named_parameters=model.named_parameters()
    )
    for number in range(STEPS):
        optimizer.zero_grad()
        autocast_loss(model, number).backward()
        optimizer.step()
    return model


def compare(trained):
    expected = trained(HOROVODS)
    lossless = ClassPlan(lossless=True)
    for name, chosen in (*plans(), ("lossless", ExchangePlan(2, large=lossless, rest=lossless))):
        with plan(chosen):
            ours = trained(OURS)
        try:
            assert_close(ours.parameters(), expected.parameters(), atol=2e-5, rtol=2e-5)
            assert_same_on_all_ranks(parameter.detach() for parameter in ours.parameters())
        except AssertionError as error:
            raise AssertionError(f"under the plan {name!r}") from error


def case_exact_exchanges_under_autocast():
    compare(train_without_scaler)


def case_exact_exchanges_under_autocast_with_a_scaler():
    compare(lambda factory: train(factory, scaled=True))


def evaluated(model):
    """The mean loss of all ranks over data of their own."""
    with torch.no_grad():
        losses = [autocast_loss(model, 10_000 + each, rows=6) for each in range(20)]
    return hvd.allreduce(torch.stack(losses).float().mean(), name="evaluated").item()


def learns(chosen, schedule=None, **options):
    before = evaluated(Model())
    with plan(chosen), scheduled(schedule, chosen, CLASSES):
        model = train(OURS, steps=80, **options)
    assert evaluated(model) < 0.9 * before, (chosen, before, evaluated(model))
    assert together(model), chosen


def codecs(**options):
    for each in CODECS.values():
        learns(ExchangePlan(large=each, rest=ClassPlan(codec="bf16")), **options)


def case_codecs_under_autocast():
    codecs(scaled=False)


def case_codecs_under_autocast_with_a_scaler():
    codecs(scaled=True)


def local_steps(**options):
    for plan_of_changes in (ExchangePlan(), ExchangePlan(large=CODECS["int8"])):
        learns(plan_of_changes, Schedule(4), on_all=True, **options)


def case_local_steps_under_autocast():
    local_steps(scaled=False)


def case_local_steps_under_autocast_with_a_scaler():
    local_steps(scaled=True)


def case_replicas_stay_equal_when_local_steps_end_under_a_scaler():
    """A local step has overflowed on rank 0 alone, which has another loss scale since."""
    model = Model()
    with scheduled(Schedule(4), ExchangePlan(), CLASSES):
        optimizer = OURS(
            OPTIMIZERS["momentum"](groups_of(model)), named_parameters=model.named_parameters()
        )
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**10)

    def steps(overflow=-1):
        for number in loader(STEPS):
            optimizer.zero_grad()
            factor = float("inf") if number == overflow else 1.0
            scaler.scale(loss_of(model, int(number)) * factor).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()

    def scales():
        own = torch.tensor([scaler.get_scale()], device="cpu")
        return hvd.allgather(own, name="scales").unique().tolist()

    steps()
    assert scales() == [2.0**10]
    steps(overflow=OVERFLOW if hvd.rank() == 0 else -1)
    assert scales() == [2.0**9, 2.0**10]
    switch(optimizer, SyncPlan(ExchangePlan(), CLASSES))
    assert scales() == [2.0**9]
    steps()
    assert_same_on_all_ranks(parameter.detach() for parameter in model.parameters())
