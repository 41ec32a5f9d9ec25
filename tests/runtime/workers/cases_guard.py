"""The guard: what leaves its band ends a lossy strategy on all ranks; what does not, goes on."""

import contextlib
import copy
import io
import json
import math
import os
import tempfile

import horovod.torch as hvd
import torch
from cases_local_steps import loader, local, together
from common import batch, exchange_of, guard_of, mlp, rounds_of

from hvd_autosync.runtime import current
from hvd_autosync.runtime.guard import handler
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.trial import FALLBACK_FILE, LossPrediction
from hvd_autosync.search_space.trial import LOSS_WINDOW as WINDOW

CODED = ExchangePlan(rest=ClassPlan(codec="int8"))


@contextlib.contextmanager
def real_training():
    """As outside of a trial; collects the messages."""
    before, current.run = current.run, None
    losses, current.losses = current.losses, Losses()
    handler._GUARDS.clear()
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
    with predicted(9.0), real_training() as said:
        for schedule, plan in ((Schedule(4), None), (None, CODED)):
            model, optimizer = local(schedule, plan=plan)
            train(model, optimizer, 6 * WINDOW)
            assert guard_of(optimizer) is not None
        _exact, optimizer = local(None, plan=ExchangePlan(buckets=2))
        assert guard_of(optimizer) is None
    assert not said.getvalue()


def case_a_loss_that_is_no_number_ends_local_steps():
    with real_training() as said:
        model, optimizer = local(Schedule(4))
        train(model, optimizer, 300, lambda number: math.nan if number == 290 else 1.0)
        assert guard_of(optimizer) is not None and not together(model)
        train(model, optimizer, 3 * WINDOW, first=300)
        assert guard_of(optimizer) is None and not rounds_of(optimizer).running
        assert together(model) and all(p.isfinite().all() for p in model.parameters())
        states = [v for p in model.parameters() for v in optimizer.state[p].values()]
        assert all(value.isfinite().all() for value in states)
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, 5, first=900)
        assert together(model)
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert ("hvd-autosync: loss guard: " in said.getvalue()) == (hvd.rank() == 0)
    assert ("; restored step 1; " in said.getvalue()) == (hvd.rank() == 0)


def case_a_loss_that_rises_ends_a_codec():
    with real_training() as said:
        model, optimizer = local(None, plan=CODED)
        train(model, optimizer, 10 * WINDOW, lambda number: 1.0 if number < 200 else 1e5)
        assert guard_of(optimizer) is None
        assert all(bucket.codec is None for bucket in exchange_of(optimizer).dispatcher.buckets)
        assert together(model)
    assert bool(said.getvalue()) == (hvd.rank() == 0)


def case_a_loss_may_rise_to_that_of_a_checkpoint():
    with real_training() as said:
        model, optimizer = local(None, plan=CODED)
        train(model, optimizer, WINDOW)
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 6 * WINDOW)
        if hvd.rank() == 0:
            optimizer.load_state_dict(saved)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(model, optimizer, 6 * WINDOW, lambda number: 100.0)
        assert guard_of(optimizer) is not None and "at step" not in said.getvalue()
        train(model, optimizer, 3 * WINDOW, lambda number: math.nan if number == 3 else 1.0)
        assert guard_of(optimizer) is None and together(model)


def case_a_window_may_end_right_before_join():
    """What is on its way when the last rank calls ``join()`` would be lost within Horovod."""
    with real_training():
        model, optimizer = local(None, plan=CODED)
        for _ in range(20):
            train(model, optimizer, WINDOW * (1 if hvd.rank() else 2))
            hvd.join()
            assert guard_of(optimizer).step % WINDOW == 0
        train(model, optimizer, 3 * WINDOW)


def case_losses_of_one_rank_are_all_ranks():
    """One rank alone sees it; all go back."""
    with real_training():
        model, optimizer = local(Schedule(4))
        bad = math.inf if hvd.rank() == 1 else 1.0
        train(model, optimizer, 8 * WINDOW, lambda number: bad if number == 150 else 1.0)
        assert guard_of(optimizer) is None and together(model)


def case_a_verdict_is_remembered():
    with real_training():
        model, optimizer = local(None, plan=CODED)
        train(model, optimizer, 8 * WINDOW, lambda number: math.nan if number == 100 else 1.0)
        assert guard_of(optimizer) is None
        saved = optimizer.state_dict()
        again, resumed = local(None, plan=CODED)
        if hvd.rank() == 0:
            resumed.load_state_dict(saved)
        hvd.broadcast_optimizer_state(resumed, root_rank=0)
        assert guard_of(resumed) is None
        train(again, resumed, 3)
        assert all(bucket.codec is None for bucket in exchange_of(resumed).dispatcher.buckets)


def case_losses_with_a_dimension_count():
    with real_training():
        _, optimizer = local(None, plan=CODED)
        current.losses.seen(torch.tensor([2.5]))
        assert current.losses.end_step(0)[0] == torch.tensor(2.5)
        assert guard_of(optimizer).stepped(current.losses)


def case_without_losses_it_says_so():
    with real_training() as said:
        model, optimizer = local(Schedule(4))
        for number in loader(3 * WINDOW):
            optimizer.zero_grad()
            model(batch(int(number))).backward(torch.ones(6, 3))
            optimizer.step()
    assert ("no loss is seen" in said.getvalue()) == (hvd.rank() == 0)


def case_without_a_prediction_it_says_so_once():
    for levels in ((), (9.0,)):
        with predicted(*levels), real_training() as said:
            for _ in range(2):
                local(Schedule(4))
        lines = said.getvalue().count("no quality trials predict")
        assert lines == (not levels and hvd.rank() == 0)


def case_a_trial_has_no_guard():
    _, optimizer = local(Schedule(4), model=mlp())
    assert guard_of(optimizer) is None


@contextlib.contextmanager
def predicted(*levels):
    """Trials of the job predict these means of windows."""
    before = current.loss_prediction
    current.loss_prediction = LossPrediction(levels, (0.05,) * len(levels))
    try:
        yield
    finally:
        current.loss_prediction = before


def case_a_prediction_leaves_healthy_local_steps_alone():
    """The first steps of a training have the highest losses, and equal parameters."""
    with predicted(0.9, 0.4, 0.2):
        with real_training() as said:
            model, optimizer = local(Schedule(8))
            for number in loader(6 * WINDOW):
                optimizer.zero_grad()
                model(batch(int(number))).pow(2).mean().backward()
                current.losses.seen(torch.tensor(0.1 + 1.5 * math.exp(-int(number) / 20)))
                optimizer.step()
            assert guard_of(optimizer) is not None
        assert not said.getvalue()


def case_several_optimizers_have_no_prediction():
    with predicted(-9.0), real_training():
        model, optimizer = local(None, plan=CODED)
        _, second = local(None, plan=CODED)
        train(model, optimizer, 6 * WINDOW)
        assert guard_of(optimizer) is not None and guard_of(second) is not None


def case_a_loss_that_lags_ends_a_codec_and_local_steps():
    """It never rises, but trials of the default were better by then. What was learned is kept."""
    for schedule, plan in ((None, CODED), (Schedule(64), None)):
        with predicted(9.0, 9.0, -200.0), tempfile.TemporaryDirectory() as folder:
            lags_behind(schedule, plan, folder)


def lags_behind(schedule, plan, folder):
    with real_training() as said, driver_here(folder):
        model, optimizer = local(schedule, plan=plan)
        moved = []

        def factor(number):
            moved.append(model[0].weight.detach().clone())
            return 1.0

        train(model, optimizer, 6 * WINDOW, factor)
        assert guard_of(optimizer) is None and together(model)
        assert not torch.equal(moved[4 * WINDOW], moved[1]), "the snapshot of step 1 was restored"
    on_rank_0 = hvd.rank() == 0
    assert ("above what trials of this job predict" in said.getvalue()) == on_rank_0
    assert ("; kept what was learned; " in said.getvalue()) == on_rank_0
    if hvd.local_rank() == 0:
        with open(os.path.join(folder, FALLBACK_FILE)) as file:
            written = json.load(file)
        assert written["step"] == 4 * WINDOW and "trials of this job" in written["reason"]
    assert len(os.listdir(folder)) == (hvd.local_rank() == 0)


@contextlib.contextmanager
def driver_here(folder):
    """The driver's folder is on this host."""
    before, current.driver_folder = current.driver_folder, folder
    try:
        yield
    finally:
        current.driver_folder = before


def case_an_average_that_is_bad_ends_local_steps():
    """Replicas are well each by itself; only the first loss of a round is not."""
    with real_training() as said:
        model, optimizer = local(Schedule(64))
        lengths = []

        def factor(number):
            lengths.append(guard_of(optimizer) is not None and guard_of(optimizer)._at_average)
            return 1e4 if number > 200 and lengths[-1] else 1.0

        train(model, optimizer, 16 * WINDOW, factor)
        assert guard_of(optimizer) is None and together(model)
    assert ("hvd-autosync: loss guard: " in said.getvalue()) == (hvd.rank() == 0)
    assert sum(lengths[200:400]) < 10


def case_long_rounds_that_nothing_is_predicted_for_are_named():
    """Where two rounds are within what trials predict, it is seen what averages are worth."""
    for length, levels, named in ((128, (9.0,), True), (128, (9.0,) * 8, False), (8, (), False)):
        with predicted(*levels), real_training() as said:
            model, optimizer = local(Schedule(length))
            train(model, optimizer, 5 * WINDOW)
        assert (f"rounds have {length} steps" in said.getvalue()) == (named and hvd.rank() == 0)
