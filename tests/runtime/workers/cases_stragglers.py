"""Ranks slower than others, for a while or for good: who waits, and what all have of it."""

import time

import horovod.torch as hvd
import torch
from cases_guard import real_training
from cases_local_steps import batch, loader, momentum, together
from cases_protocols import phases, plain
from common import assert_close, assert_same_on_all_ranks, phases_of, raises, seeded
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime.measure.compute_timer import ComputeTimer
from hvd_autosync.runtime.sync.synchronizer import switch
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan


class SleptTimer(ComputeTimer):
    """Of a clock by which this rank computes twice as long as it sleeps, on a busy machine, too."""

    slept_s = 0.0

    def stepped(self):
        self._recent.append(self.slept_s)
        return self.slept_s

    def sleep(self, seconds):
        self.slept_s = seconds
        time.sleep(seconds / 2)


def sleep(optimizer, *, slow):
    """Compute for a while; longer on ranks but 0, if they are slow."""
    seconds = 0.1 if hvd.rank() and slow else 0.025
    timer = phases_of(optimizer).compute_timer
    (timer.sleep if isinstance(timer, SleptTimer) else time.sleep)(seconds)


def slow_training(protocol, lengths, slow, schedule=None, timer=SleptTimer):
    """A weight whose gradients are 1 on rank 0 and 3 on others; the steps that this rank makes.

    Ranks but 0 are slow in steps for which ``slow(pass, number)`` holds.
    """
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    model, optimizer = phases(protocol, plain, model=model, schedule=schedule)
    phases_of(optimizer).compute_timer = timer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10**6)
    made = []
    for index, length in enumerate(lengths):
        made.append(0)
        for number in loader(length):
            optimizer.zero_grad()
            own = 1.0 if hvd.rank() == 0 else 3.0
            model(torch.full((1, 1), own)).sum().backward()
            sleep(optimizer, slow=slow(index, int(number)))
            optimizer.step()
            scheduler.step()
            made[-1] += 1
            yield model, optimizer, scheduler, made
        assert together(model)


def case_others_go_on_without_a_straggler():
    """The mean is that of those who take part; the straggler has all of it after the pass."""
    with real_training() as said:
        protocol = Protocol(share=1.0, stragglers="elastic")
        for state in slow_training(protocol, (100, 60), lambda index, _: index == 0):
            model, optimizer, scheduler, made = state
        assert (made[0] == 100) == (hvd.rank() == 0), made
        steps = hvd.allgather(torch.tensor([made]), name="made")
        assert 24 <= steps[1][0] < 90
        moved = 0.0
        for of_pass in steps.T.tolist():
            for index in range(max(of_pass)):
                present = [rank for rank, count in enumerate(of_pass) if index < count]
                moved += 0.05 * sum(3.0 if rank else 1.0 for rank in present) / len(present)
        assert abs(-model.weight.item() - moved) < 1e-3 * moved, (steps, model.weight, moved)
        assert scheduler.last_epoch == phases_of(optimizer).step == 160
    assert ("rank 1 is much slower" in said.getvalue()) == (hvd.rank() == 0)


def changes_of_a_straggler(length):
    """Nobody waits for a straggler from the first of two changes to the second."""
    following, ran = 120, []
    for _, optimizer, _, made in slow_training(
        Protocol(share=1.0, stragglers="greedy"),
        (length, following),
        lambda index, number: index == 0 and number < 90,
    ):
        ran.append(phases_of(optimizer).running)
        steps = list(made)
    assert steps == [length, following]
    found = [i for i in range(1, length + following) if ran[i] != ran[i - 1]]
    assert len(found) == 2 and 20 <= found[0] < 90 < found[1], (length, found)


def case_nobody_waits_as_long_as_there_is_a_straggler():
    """It ends to be one when the others are in the middle of their pass."""
    changes_of_a_straggler(320)


def case_nobody_waits_for_a_straggler_until_the_end_of_a_pass():
    """It ends to be one when the others are at the end of their pass, and wait there.

    They are known by their last steps.
    """
    changes_of_a_straggler(160)


def case_who_waits_for_others_at_the_end_of_a_round_computes_no_longer():
    protocol = Protocol(share=1.0, stragglers="greedy")
    for state in slow_training(protocol, (60,), lambda *_: True, Schedule(2), ComputeTimer):
        optimizer = state[1]
    seconds = torch.tensor([phases_of(optimizer).compute_timer.seconds])
    first, *others = hvd.allgather(seconds, name="paces").tolist()
    assert first < 0.7 * min(others), (first, others)
    assert phases_of(optimizer)._stragglers.windows > 2
    assert phases_of(optimizer).running


def case_a_straggler_is_left_out_sooner_in_later_passes():
    with real_training() as said:
        protocol = Protocol(share=1.0, stragglers="elastic")
        for state in slow_training(protocol, (60, 40, 40), lambda index, _: index < 2):
            made = state[-1]
        if hvd.rank():  # in the second pass after a window
            assert 24 <= made[0] < 60 and made[1] <= 24 < made[2], made
    assert ("much slower" in said.getvalue()) == (hvd.rank() == 0)


class Mixed(nn.Module):
    """A convolution whose weight is not contiguous, and a layer of another type."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        self.head = nn.Linear(4, 1, dtype=torch.bfloat16)

    def forward(self, images):
        return self.head(self.convolution(images).mean((2, 3)).bfloat16())


def case_a_straggler_takes_over_parameters_of_any_type_and_layout():
    model, optimizer = phases(Protocol(share=1.0, stragglers="elastic"), momentum, model=Mixed())
    phases_of(optimizer).compute_timer = SleptTimer()
    made = 0
    for number in loader(60):
        optimizer.zero_grad()
        images = torch.randn(2, 3, 5, 5, generator=seeded(1000 * hvd.rank() + int(number)))
        model(images).float().pow(2).mean().backward()
        sleep(optimizer, slow=True)
        optimizer.step()
        made += 1
    assert (made == 60) == (hvd.rank() == 0), made
    assert not model.convolution.weight.is_contiguous()
    buffers = [optimizer.state[each]["momentum_buffer"] for each in model.parameters()]
    everything = [*model.parameters(), *buffers]
    assert_same_on_all_ranks([each.detach().float().contiguous() for each in everything])


def case_batches_as_large_as_ranks_are_fast_train_the_same():
    data = torch.randn(320, 12, generator=seeded(5))  # the same on all ranks
    for workers in (0, 2):
        found, largest = [], []
        for policy in ("balance", "none"):
            with real_training() as said:
                model, optimizer = phases(Protocol(share=1.0, stragglers=policy))
                timer = phases_of(optimizer).compute_timer = SleptTimer()
                sampler = DistributedSampler(data, hvd.size(), hvd.rank())
                examples = DataLoader(
                    data,
                    batch_size=4,
                    sampler=sampler,
                    num_workers=workers,
                    persistent_workers=workers > 0,
                )
                lengths = []
                for epoch in range(2):
                    sampler.set_epoch(epoch)
                    for rows in examples:
                        optimizer.zero_grad()
                        if policy == "balance":
                            timer.sleep(len(rows) * (0.016 if hvd.rank() else 0.004))
                        model(rows).pow(2).mean().backward()
                        optimizer.step()
                        lengths.append(len(rows))
                found.append([each.detach().clone() for each in model.parameters()])
                largest.append((lengths[0], lengths[-1]))
                noticed = "of a step's" in said.getvalue()
                assert noticed == (policy == "balance" and hvd.rank() == 0)
        assert largest[0][0] == 4 and largest[1] == (4, 4)
        assert largest[0][1] < 4 if hvd.rank() else largest[0][1] > 4, largest
        assert_close(*found, rtol=1e-4, atol=1e-5)


def case_batches_that_were_cut_before_a_switch_train_the_same():
    """Workers have some of them when the plan is changed."""
    data = torch.randn(320, 12, generator=seeded(6))  # the same on all ranks
    found = []
    for policy in ("balance", "none"):
        model, optimizer = phases(Protocol(share=1.0, stragglers=policy))
        timer = phases_of(optimizer).compute_timer = SleptTimer()
        sampler = DistributedSampler(data, hvd.size(), hvd.rank())
        later = []
        for rows in DataLoader(data, batch_size=4, sampler=sampler, num_workers=1):
            optimizer.zero_grad()
            if policy == "balance":
                timer.sleep(len(rows) * (0.016 if hvd.rank() else 0.004))
            model(rows).pow(2).mean().backward()
            optimizer.step()
            if later or len(rows) != 4:
                later.append(len(rows))
            if len(later) == 1:
                switch(optimizer, SyncPlan())
        found.append([each.detach().clone() for each in model.parameters()])
        unequal = [size for size in later if size != 4]
        assert len(unequal) == (3 if policy == "balance" else 0), later
    assert_close(*found, rtol=1e-4, atol=1e-5)


def case_batches_do_not_grow_where_they_cannot_be_weighed():
    balance = Protocol(share=1.0, stragglers="balance")
    with raises(ConfigurationError, "backward_passes_per_step=2"):
        phases(balance, backward_passes_per_step=2)
    with raises(ConfigurationError, "local steps"):
        phases(balance, schedule=Schedule(4))


def case_a_script_that_splits_its_batches_is_told_so():
    """Where its batch has grown; else the error is Horovod's."""
    model, optimizer = phases(Protocol(share=1.0, stragglers="balance"))
    horovods = AssertionError, "more than backward_passes_per_step times"
    for grown, expected in (
        (False, horovods),
        (True, (ConfigurationError, "its batch has grown")),
        (False, horovods),
    ):
        phases_of(optimizer)._dynamic_batching.speeds = (1.0, 2.0 if grown else 1.0)
        optimizer.zero_grad()
        model(batch(0)).pow(2).mean().backward()
        with raises(*expected):
            model(batch(0)).pow(2).mean().backward()
        optimizer.step()


def case_a_cut_pass_is_over_though_its_iterator_lives_on():
    """So that the straggler has the learning rate of the others in the next."""
    persistent = DataLoader(range(100), batch_size=None, num_workers=1, persistent_workers=True)
    model, optimizer = phases(Protocol(share=1.0, stragglers="elastic"), plain)
    phases_of(optimizer).compute_timer = SleptTimer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30, 0.5)
    for slow in (True, False):
        made = 0
        for number in persistent:
            optimizer.zero_grad()
            model(batch(int(number))).pow(2).mean().backward()
            sleep(optimizer, slow=slow)
            optimizer.step()
            scheduler.step()
            made += 1
        assert together(model)
        assert scheduler.last_epoch == (100 if slow else 200)
        if slow:
            assert (made < 100) == (hvd.rank() > 0), made
