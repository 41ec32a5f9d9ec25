"""The guard: what leaves its band ends a lossy strategy on all ranks; what does not, goes on."""

import contextlib
import io
import math

import horovod.torch as hvd
import torch
from cases_local_steps import loader, local, together
from common import batch, mlp

from hvd_autosync.runtime import current, planned
from hvd_autosync.runtime.guard import Band
from hvd_autosync.runtime.losses import Losses
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.trial import LOSS_WINDOW as WINDOW

CODED = ExchangePlan(rest=ClassPlan(codec="int8"))


@contextlib.contextmanager
def real_training():
    """As outside of a trial; what is said meanwhile."""
    before, current.run = current.run, None
    losses, current.losses = current.losses, Losses()
    planned._GUARDS.clear()
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield said
    finally:
        current.run, current.losses = before, losses


def train(model, optimizer, steps, factor=lambda number: 1.0, first=0):
    for number in loader(steps):
        optimizer.zero_grad()
        loss = model(batch(int(number) + first)).pow(2).mean() * factor(int(number) + first)
        current.losses.seen(loss.detach())  # a trial's own watch has the backward of this process
        loss.backward()
        optimizer.step()


def case_a_healthy_training_goes_on():
    with real_training() as said:
        for schedule, plan in ((Schedule(4), None), (None, CODED)):
            model, optimizer = local(schedule, plan=plan)
            train(model, optimizer, 6 * WINDOW)
            assert optimizer._guard is not None
        exact, optimizer = local(None, plan=ExchangePlan(buckets=2))
        assert optimizer._guard is None
    assert not said.getvalue()


def case_a_loss_that_is_no_number_ends_local_steps():
    with real_training() as said:
        model, optimizer = local(Schedule(4))
        train(model, optimizer, 300, lambda number: math.nan if number == 290 else 1.0)
        assert optimizer._guard is not None and not together(model)
        train(model, optimizer, 3 * WINDOW, first=300)
        assert optimizer._guard is None and not optimizer._local.running
        assert together(model) and all(p.isfinite().all() for p in model.parameters())
        states = [v for p in model.parameters() for v in optimizer.state[p].values()]
        assert all(value.isfinite().all() for value in states)
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, 5, first=900)
        assert together(model)
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert ("has left its band" in said.getvalue()) == (hvd.rank() == 0)
    assert ("after step 1\n" in said.getvalue()) == (hvd.rank() == 0)


def case_a_loss_that_rises_ends_a_codec():
    with real_training() as said:
        model, optimizer = local(None, plan=CODED)
        train(model, optimizer, 10 * WINDOW, lambda number: 1.0 if number < 200 else 1e5)
        assert optimizer._guard is None
        assert all(bucket.codec is None for bucket in optimizer._dispatcher.buckets)
        assert together(model)
    assert bool(said.getvalue()) == (hvd.rank() == 0)


def case_a_window_may_end_right_before_join():
    """What is on its way when the last rank calls ``join()`` would be lost within Horovod."""
    with real_training():
        model, optimizer = local(None, plan=CODED)
        for _ in range(20):
            train(model, optimizer, WINDOW * (1 if hvd.rank() else 2))
            hvd.join()
            assert optimizer._guard.step % WINDOW == 0
        train(model, optimizer, 3 * WINDOW)


def case_losses_of_one_rank_are_all_ranks():
    """One rank alone sees it; all go back."""
    with real_training():
        model, optimizer = local(Schedule(4))
        bad = math.inf if hvd.rank() == 1 else 1.0
        train(model, optimizer, 8 * WINDOW, lambda number: bad if number == 150 else 1.0)
        assert optimizer._guard is None and together(model)


def case_a_verdict_is_remembered():
    with real_training():
        model, optimizer = local(None, plan=CODED)
        train(model, optimizer, 8 * WINDOW, lambda number: math.nan if number == 100 else 1.0)
        assert optimizer._guard is None
        saved = optimizer.state_dict()
        again, resumed = local(None, plan=CODED)
        if hvd.rank() == 0:
            resumed.load_state_dict(saved)
        hvd.broadcast_optimizer_state(resumed, root_rank=0)
        assert resumed._guard is None
        train(again, resumed, 3)
        assert all(bucket.codec is None for bucket in resumed._dispatcher.buckets)


def case_losses_with_a_dimension_count():
    with real_training():
        _, optimizer = local(None, plan=CODED)
        current.losses.seen(torch.tensor([2.5]))
        assert current.losses.since(0) == torch.tensor(2.5)
        assert optimizer._guard.stepped(current.losses)


def case_without_losses_it_says_so():
    with real_training() as said:
        model, optimizer = local(Schedule(4))
        for number in loader(3 * WINDOW):
            optimizer.zero_grad()
            model(batch(int(number))).backward(torch.ones(6, 3))
            optimizer.step()
    assert ("no loss is seen" in said.getvalue()) == (hvd.rank() == 0)


def case_a_trial_has_no_guard():
    _, optimizer = local(Schedule(4), model=mlp())
    assert optimizer._guard is None


def case_bands():
    band = Band()
    noisy = [2.0 - 0.01 * i + 0.05 * (-1) ** i for i in range(40)]
    assert all(band.holds(mean, i) for i, mean in enumerate(noisy))
    assert not any(band.holds(mean, 40) for mean in (math.nan, math.inf, 3.5))
    assert band.holds(1.7, 40)
    negative = Band()
    assert all(negative.holds(-5.0 - 0.1 * i, i) for i in range(10))
    assert negative.holds(-5.2, 10) and not negative.holds(-2.0, 11)


def case_bands_under_ceilings():
    band = Band([3.0, 2.0])
    assert not band.holds(3.1, 0) and band.holds(2.9, 0)
    assert not band.holds(2.1, 1) and band.holds(1.9, 1)
    assert not band.holds(2.1, 7) and band.holds(1.9, 7)


def case_an_average_is_judged_beside_its_replicas():
    band = Band([9.0] * 10)
    assert band.holds(2.0, 0) and band.bears(99.0, 16)  # what is noise is not known yet
    for window in range(1, 12):
        assert band.holds(2.0 - 0.05 * window, window)
    assert band.bears(1.5, 16) and not band.bears(4.0, 16) and not band.bears(math.nan, 16)


def case_ceilings_leave_healthy_local_steps_alone():
    """The first steps of a training have the highest losses, and equal parameters."""
    before, current.loss_ceilings = current.loss_ceilings, (1.1,)
    try:
        with real_training() as said:
            model, optimizer = local(Schedule(8))
            for number in loader(6 * WINDOW):
                optimizer.zero_grad()
                model(batch(int(number))).pow(2).mean().backward()
                current.losses.seen(torch.tensor(0.1 + 1.5 * math.exp(-int(number) / 20)))
                optimizer.step()
            assert optimizer._guard is not None
        assert not said.getvalue()
    finally:
        current.loss_ceilings = before


def case_several_optimizers_have_no_ceilings():
    before, current.loss_ceilings = current.loss_ceilings, (1e-6,)
    try:
        with real_training():
            model, optimizer = local(None, plan=CODED)
            _, second = local(None, plan=CODED)
            train(model, optimizer, 6 * WINDOW)
            assert optimizer._guard is not None and second._guard is not None
    finally:
        current.loss_ceilings = before


def case_a_loss_that_lags_ends_a_codec():
    """It never rises, but exact trainings were better by then."""
    before, current.loss_ceilings = current.loss_ceilings, (1e6, 1e6, 1e-6)
    try:
        with real_training() as said:
            model, optimizer = local(None, plan=CODED)
            train(model, optimizer, 6 * WINDOW)
            assert optimizer._guard is None and together(model)
        assert ("has left its band" in said.getvalue()) == (hvd.rank() == 0)
    finally:
        current.loss_ceilings = before


def case_an_average_that_is_bad_ends_local_steps():
    """Replicas are well each by itself; only the first loss of a round is not."""
    with real_training() as said:
        model, optimizer = local(Schedule(64))
        lengths = []

        def factor(number):
            lengths.append(optimizer._guard is not None and optimizer._guard._equal)
            return 1e4 if number > 200 and lengths[-1] else 1.0

        train(model, optimizer, 16 * WINDOW, factor)
        assert optimizer._guard is None and together(model)
    assert ("has left its band" in said.getvalue()) == (hvd.rank() == 0)
    assert sum(lengths[200:400]) < 10
