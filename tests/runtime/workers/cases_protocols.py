"""Phases with and without a barrier: what they train, where they end, what is saved of them."""

import contextlib
import gc
import math
import time
import weakref

import horovod.torch as hvd
import numpy as np
import torch
from cases_guard import real_training
from cases_local_steps import adam, batch, loader, momentum, step, together
from common import (
    OURS,
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    guard_of,
    mlp,
    phases_of,
    raises,
    rounds_of,
    synchronized_by,
    wrap,
)
from torch import nn
from torch.utils.data import DataLoader

import hvd_autosync
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.reinitialize import (
    CannotReinitializeError,
    check_reinitialize,
    reinitialize,
)
from hvd_autosync.runtime.state.states import decode_entries
from hvd_autosync.runtime.sync.shards import _OF_WRAPPERS
from hvd_autosync.runtime.sync.synchronizer import switch
from hvd_autosync.search_space.exchange_plan import ExchangePlan
from hvd_autosync.search_space.protocol import Protocol
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan

ASP = Protocol("asp")
OPTIMIZERS = [
    lambda model, cls=cls: cls(model.parameters(), lr=0.01)
    for cls in (
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    )
]
if hasattr(torch.optim, "Muon"):  # since torch 2.9
    OPTIMIZERS.append(lambda m: torch.optim.Muon([p for p in m.parameters() if p.dim() == 2]))


def phased(protocol, schedule=None, plan=None):
    if plan is None and schedule is None and protocol is None:
        return synchronized_by(None)
    return synchronized_by(SyncPlan(plan or ExchangePlan(), {}, schedule, protocol))


def phases(protocol, base=momentum, model=None, schedule=None, plan=None, **options):
    """A model and its optimizer under a protocol."""
    model = mlp() if model is None else model
    with phased(protocol, schedule, plan):
        return model, wrap(OURS, model, base(model), **options)


def passes(model, optimizer, *lengths, first=0):
    """Trains through passes of some lengths; after each of them ranks must be equal."""
    for length in lengths:
        for number in loader(length):
            step(model, optimizer, first + int(number))
        assert together(model)
        first += 100


def plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def clipped(model, optimizer, number):
    optimizer.zero_grad()
    model(batch(int(number))).pow(2).mean().backward()
    optimizer.synchronize()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    with optimizer.skip_synchronize():
        optimizer.step()


def case_ssp_of_no_staleness_is_bsp():
    for base in (momentum, adam):
        found = []
        for protocol in (Protocol("ssp", 0), None):
            model, optimizer = phases(protocol, base, plan=ExchangePlan(buckets=2))
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
            for length in (5, 9, 3):
                for number in loader(length):
                    step(model, optimizer, number)
                    scheduler.step()
            found.append(list(model.parameters()))
            if protocol is not None:
                assert phases_of(optimizer).running
                assert set(phases_of(optimizer).staleness) == {0}
        assert_close(*found, rtol=1e-5, atol=1e-6)


def case_a_closure_may_compute_the_gradients():
    found = []
    for protocol in (Protocol("ssp", 0), None):
        model, optimizer = phases(protocol, plain)
        for number in loader(8):

            def closure(model=model, optimizer=optimizer, number=number):
                optimizer.zero_grad()
                loss = model(batch(int(number))).pow(2).mean()
                loss.backward()
                optimizer.synchronize()
                return loss

            with optimizer.skip_synchronize():
                optimizer.step(closure)
        assert protocol is None or phases_of(optimizer).running
        found.append(list(model.parameters()))
    assert_close(*found, rtol=1e-5, atol=1e-6)


def case_asp_and_ssp_train_and_are_equal_after_every_pass():
    for protocol in (ASP, Protocol("ssp", 2), Protocol("asp", momentum="ramped")):
        model, optimizer = phases(protocol)
        before = model(batch(999)).pow(2).mean()
        passes(model, optimizer, 10, 10, 10)
        assert phases_of(optimizer).running and phases_of(optimizer).step == 30
        after = model(batch(999)).pow(2).mean()
        assert hvd.allreduce(after, name="after") < hvd.allreduce(before, name="before")
        staleness = phases_of(optimizer).staleness
        # One step of BSP, then every gradient of both ranks.
        buckets = len(phases_of(optimizer)._no_barrier.asynchronous._buckets)
        assert sum(staleness.values()) == buckets * hvd.size() * 29
        if protocol.kind == "ssp":
            # s steps of each other rank ahead, those that it catches up, and the running ones.
            assert max(staleness) <= 2 * (protocol.staleness + 1) * (hvd.size() - 1)


def case_horovod_is_not_initialized_again_without_a_barrier():
    model, optimizer = phases(ASP)
    passes(model, optimizer, 4)
    assert phases_of(optimizer).running
    if hvd.rank() == 0:  # which waits for no other rank
        assert "no barrier" in check_reinitialize({})
        with raises(CannotReinitializeError, "no barrier"):
            reinitialize({})
    passes(model, optimizer, 3)
    switch(optimizer, SyncPlan(ExchangePlan(), {}))
    assert "no barrier" not in (check_reinitialize({}) or "")


def case_ranks_with_less_data_wait_for_the_others_after_their_pass():
    for protocol in (ASP, Protocol("ssp", 1), Protocol("ssp", 0)):
        model, optimizer = phases(protocol)
        passes(model, optimizer, 4)
        uneven = 5 + 4 * (hvd.rank() == 0)
        passes(model, optimizer, uneven, 3, uneven, first=100)
        assert phases_of(optimizer).running


def case_leaving_a_pass_early_is_its_end():
    model, optimizer = phases(ASP)
    for _ in range(2):
        for index, number in enumerate(loader(50)):
            step(model, optimizer, number)
            if index == 6 + hvd.rank():
                break
        assert together(model)


def case_an_evaluation_in_the_middle_of_a_pass_sees_equal_parameters():
    model, optimizer = phases(ASP)
    iterator = iter(loader(50))
    for index in range(12):
        step(model, optimizer, next(iterator))
        if index == 4:
            for _ in loader(2):
                assert together(model)
    hvd_autosync.average(optimizer)
    assert together(model)


def case_a_pass_that_ends_at_an_evaluation_is_the_same_pass_as_that_of_others():
    """The last step of some ranks is the one before the evaluation, and not that of others."""
    model, optimizer = phases(ASP)
    places = []
    for _ in range(3):
        for number in loader(9 + (hvd.rank() == 0)):
            step(model, optimizer, number)
            if number % 3 == 2:
                for _ in loader(2):
                    assert together(model)
        places.append(phases_of(optimizer)._no_barrier.asynchronous.segment)
        assert together(model)
    assert phases_of(optimizer).running
    assert_same_on_all_ranks([torch.tensor(places)])


def case_a_switch_at_the_last_step_of_some_ranks_waits_for_the_others():
    model, optimizer = phases(ASP)
    places = []
    for _ in range(2):
        for number in loader(1 + (hvd.rank() == 0)):
            step(model, optimizer, number)
        places.append(phases_of(optimizer)._no_barrier.asynchronous.segment)
        assert together(model)
    assert_same_on_all_ranks([torch.tensor(places)])


def case_a_step_that_one_rank_leaves_out_counts_for_protocols_too():
    """Under local steps, by a script of its own ways with gradients that have overflowed."""
    model, optimizer = phases(
        Protocol("asp", share=0.5, total=96 * 4 * hvd.size()), schedule=Schedule(4)
    )
    ran = []
    for _ in range(3):
        for index, _ in enumerate(DataLoader(torch.zeros(128, 2), batch_size=4)):
            optimizer.zero_grad()
            model(batch(index)).pow(2).mean().backward()
            optimizer.synchronize()
            if hvd.rank() == 1 and index in (2, 5, 8, 9, 15, 31):
                continue
            with optimizer.skip_synchronize():
                optimizer.step()
            ran.append(phases_of(optimizer).running)
        assert together(model)
    assert ran[-1] and not ran[0]


def case_what_went_wrong_at_the_end_of_a_pass_is_raised_in_the_next():
    model, optimizer = phases(ASP)
    passes(model, optimizer, 4)
    phases_of(optimizer)._epochs.error = ConfigurationError("at the end")
    with raises(ConfigurationError, "at the end"):
        iter(loader(2))
    phases_of(optimizer)._epochs.error = None


def case_without_a_known_end_of_a_pass_ranks_wait_for_each_other():
    model, optimizer = phases(ASP)
    for number in range(20):
        step(model, optimizer, number)
        assert together(model)
    assert not phases_of(optimizer).running


def case_bsp_comes_first_for_its_share():
    # Batches of 4: 10 steps of 2 ranks are 80 samples; votes are in every eighth step.
    for schedule in (None, Schedule(3)):
        protocol = Protocol("asp", share=0.5, total=160 * hvd.size() // 2)
        model, optimizer = phases(protocol, schedule=schedule)
        data = torch.utils.data.DataLoader(range(40), batch_size=4)
        ran = []
        for _ in range(2):
            for numbers in data:
                step(model, optimizer, numbers[0])
                ran.append(phases_of(optimizer).running)
            assert together(model)
        first = ran.index(True)
        assert all(ran[first:]) and 9 <= first <= 17 + 3 * (schedule is not None), ran


def case_samples_are_counted_where_a_sampler_makes_batches():
    def data(batch_sampler):
        rows = torch.utils.data.TensorDataset(torch.zeros(40, 3), torch.zeros(40))
        return DataLoader(rows, batch_sampler=batch_sampler)

    lengths = [1, 7, 4, 4, 4, 4, 4, 4, 4, 4]
    first = [sum(lengths[:i]) for i in range(len(lengths))]
    uneven = [list(range(a, a + n)) for a, n in zip(first, lengths, strict=True)]
    model, optimizer = phases(Protocol("asp", share=0.5, total=80 * hvd.size()))
    ran = []
    for _ in range(2):
        for index, _ in enumerate(data(uneven)):
            step(model, optimizer, index)
            ran.append(phases_of(optimizer).running)
    assert phases_of(optimizer)._sample_counter.samples == 40 * hvd.size() * 2
    assert ran.index(True) in range(10, 17) and ran[-1], ran


def case_a_script_whose_samples_cannot_be_counted_gets_a_message():
    for protocol in (
        Protocol("asp", share=0.5, total=1000),
        Protocol("asp", share=0.5, total=1000, async_first=True),
    ):
        with real_training() as said:
            model, optimizer = phases(protocol)
            for _ in range(5):
                for number in loader(20):
                    step(model, optimizer, number)
            assert phases_of(optimizer).running == protocol.async_first
        count = said.getvalue().count("samples of this training cannot be counted")
        assert count == (hvd.rank() == 0), said.getvalue()


def case_local_steps_come_back_with_the_barrier():
    for base in (momentum, adam):
        protocol = Protocol("asp", share=0.5, async_first=True, total=80 * hvd.size())
        model, optimizer = phases(protocol, base, schedule=Schedule(3))
        apart_in, longest = [], 0
        for index in range(4):
            lengths = 40 + 8 * (hvd.rank() == 0) * (index == 0)
            for numbers in DataLoader(range(lengths), batch_size=4):
                step(model, optimizer, numbers[0])
                longest = max(longest, rounds_of(optimizer).round_steps)
            assert together(model)
            apart_in.append(rounds_of(optimizer).running)
            assert not (rounds_of(optimizer).running and phases_of(optimizer).running)
        assert apart_in == [False, True, True, True], apart_in
        assert not phases_of(optimizer).running
        assert longest == 3


def case_bsp_may_come_last():
    share = Protocol("asp", share=0.5, async_first=True, total=80 * hvd.size())
    for base in (momentum, adam):
        model, optimizer = phases(share, base)
        data = torch.utils.data.DataLoader(range(40), batch_size=4)
        ran = []
        for _ in range(3):
            for numbers in data:
                step(model, optimizer, numbers[0])
                ran.append(phases_of(optimizer).running)
            assert together(model)
        assert ran == [False or index < 10 for index in range(30)] or ran[1:9] == [True] * 8
        assert not any(ran[10:])
        states = [v for p in model.parameters() for v in optimizer.state[p].values()]
        assert len(states) >= 4
        assert_same_on_all_ranks([value for value in states if value.dim()])
        step(model, optimizer, 1)
        assert together(model), "gradients are exchanged again"


def case_momentum_is_kept_when_ranks_cease_to_wait_and_when_they_wait_again():
    """Back and forth under SSP(0) is BSP all the time, moments included."""
    protocol = Protocol("ssp", 0, share=0.5, async_first=True, total=80 * hvd.size())
    found = []
    for chosen in (protocol, None):
        model, optimizer = phases(chosen, adam, plan=ExchangePlan(buckets=2))
        for _ in range(3):
            for numbers in torch.utils.data.DataLoader(range(40), batch_size=4):
                step(model, optimizer, numbers[0])
        state = [v for p in model.parameters() for _, v in sorted(optimizer.state[p].items())]
        found.append([*model.parameters(), *state])
    assert_close(*found, rtol=1e-4, atol=1e-6)


def case_without_a_known_total_ranks_wait_for_each_other():
    model, optimizer = phases(Protocol("asp", share=0.5))
    passes(model, optimizer, 10, 10)
    assert not phases_of(optimizer).running


def case_gradients_may_be_clipped():
    found = []
    for protocol in (Protocol("ssp", 0), ASP):
        model, optimizer = phases(protocol, plain)
        start = [p.detach().clone() for p in model.parameters()]
        for number in loader(11):
            clipped(model, optimizer, number)
        assert together(model)
        # Eleven steps of two gradients of 0.01, each times half the rate.
        far = [(a - b).norm() for a, b in zip(start, model.parameters(), strict=True)]
        found.append(torch.stack(far).norm())
        assert phases_of(optimizer)._script_uses_gradients
    assert max(found) <= 11 * 0.01 * 0.05 * 1.001


def case_accumulated_gradients_are_sent_once():
    for protocol in (Protocol("ssp", 0), None):
        model, optimizer = phases(protocol, backward_passes_per_step=2)
        for number in loader(20):
            if int(number) % 2 == 0:
                optimizer.zero_grad()
            model(batch(int(number))).pow(2).mean().backward()
            if int(number) % 2:
                optimizer.step()
        if protocol is not None:
            found = list(model.parameters())
            assert phases_of(optimizer).running and phases_of(optimizer).step == 10
    assert_close(found, model.parameters(), rtol=1e-5, atol=1e-6)


def case_sums_of_gradients():
    found = []
    for protocol in (Protocol("ssp", 0), None):
        model, optimizer = phases(protocol, op=hvd.Sum)
        for number in loader(7):
            step(model, optimizer, number)
        found.append(list(model.parameters()))
    assert_close(*found, rtol=1e-5, atol=1e-6)


def case_parameters_without_a_gradient():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.used, self.unused = nn.Linear(12, 3), nn.Linear(12, 3)

        def forward(self, inputs):
            return self.used(inputs)

    model, optimizer = phases(ASP, model=Branches())
    passes(model, optimizer, 1)  # under BSP Horovod exchanges zeros, and the optimizer decays
    before = [p.detach().clone() for p in model.unused.parameters()]
    passes(model, optimizer, 9, 4)
    assert_identical(before, model.unused.parameters())


def case_statistics_are_equal_after_a_pass():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model, optimizer = phases(ASP, model=model)
    for number in loader(11):
        step(model, optimizer, number)
    assert_same_on_all_ranks([model[1].running_mean, model[1].running_var])


def case_a_checkpoint_has_what_all_owners_have():
    """Saved on rank 0 without a barrier, shared as scripts do, gone on with."""
    for base in (momentum, adam):
        model, optimizer = phases(Protocol("ssp", 0), base)
        passes(model, optimizer, 8)
        assert phases_of(optimizer).running
        # Other ranks must not go on before all is asked of them.
        saved = optimizer.state_dict() if hvd.rank() == 0 else None
        hvd.barrier()
        again, resumed = phases(Protocol("ssp", 0), base, model=mlp())
        again.load_state_dict(model.state_dict())
        if saved:
            assert len(saved["state"]) == len(list(model.parameters()))
            resumed.load_state_dict(saved)
        hvd.broadcast_optimizer_state(resumed, root_rank=0)
        # After it: where there is no state yet it makes a step, which decays.
        hvd.broadcast_parameters(again.state_dict(), root_rank=0)
        for trained, by in ((model, optimizer), (again, resumed)):
            for number in loader(9):
                step(trained, by, 50 + int(number))
            assert phases_of(by).running
        assert_close(model.parameters(), again.parameters(), rtol=1e-5, atol=1e-6)


def case_states_are_served_in_the_middle_of_a_step():
    model, optimizer = phases(ASP)
    passes(model, optimizer, 5)
    answers = []
    hook = optimizer.register_step_pre_hook(
        lambda *_: answers.append(decode_entries(phases_of(optimizer)._no_barrier.answer()))
    )
    passes(model, optimizer, 3)
    hook.remove()
    assert answers and all(answers) and phases_of(optimizer).running


def case_a_learning_rate_is_divided_where_ranks_do_not_wait():
    """Two ranks with one gradient each: half the rate each makes up one step of the mean."""
    moved = []
    for rate in ("divided", "kept"):
        model = nn.Linear(3, 1, bias=False)
        nn.init.zeros_(model.weight)
        model, optimizer = phases(
            Protocol("asp", rate=rate),
            lambda m: torch.optim.SGD(m.parameters(), lr=0.5),
            model=model,
        )
        for _ in loader(5):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        moved.append(-model.weight[0, 0].item())
    # A step of BSP, then four of each rank.
    assert abs(moved[0] - 0.5 * 5) < 1e-5
    assert abs(moved[1] - 0.5 * (1 + 4 * hvd.size())) < 1e-5


def case_a_dropped_optimizer_is_gone():
    model, optimizer = phases(ASP)
    passes(model, optimizer, 5)
    assert phases_of(optimizer).running
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def case_two_optimizers_of_one_job():
    first, one = phases(ASP)
    second, two = phases(ASP, adam, model=mlp(sizes=(12, 5, 3)))
    for number in loader(12):
        step(first, one, number)
        step(second, two, number)
    assert together(first) and together(second)
    assert phases_of(one).running and phases_of(two).running


def case_what_no_owner_can_step_is_refused():
    table = nn.Embedding(4, 2, sparse=True)
    with raises(ConfigurationError, "SparseAdam takes sparse gradients only"):
        phases(ASP, lambda m: torch.optim.SparseAdam(m.parameters()), model=table)
    with raises(ConfigurationError, "LBFGS needs all parameters"):
        phases(ASP, lambda m: torch.optim.LBFGS(m.parameters()))
    greedy = Protocol(share=1.0, stragglers="greedy")
    first, second = phases(greedy), phases(greedy, model=mlp())
    with raises(ConfigurationError, "stragglers='greedy' with two optimizers"):
        for number in loader(3):
            step(*first, number)
            step(*second, number)


def case_all_optimizers_of_torch():
    """Whose states are by element, of rows and columns, or of whole matrices."""
    for make in OPTIMIZERS:
        found = []
        for protocol in (Protocol("ssp", 0), None):
            torch.manual_seed(5)
            model, optimizer = phases(protocol, make)
            passes(model, optimizer, 5)
            saved = optimizer.state_dict() if hvd.rank() == 0 else None
            hvd.barrier()
            found.append((model, saved))
        (model, saved), (expected, expected_saved) = found
        assert_close(model.parameters(), expected.parameters(), rtol=1e-5, atol=1e-6)
        if saved is not None:
            torch.testing.assert_close(saved["state"], expected_saved["state"])


def case_a_loss_that_is_no_number_ends_steps_without_a_barrier():
    """Seen by one rank alone, in the middle of its pass; another has ended its own already."""
    for uneven, joins in ((0, False), (40, False), (0, True)):
        with real_training() as said:
            model, optimizer = phases(ASP)
            first = 3 * hvd.rank()  # so that they are not at the same step
            for number in loader(120 + uneven * hvd.rank()):
                step(model, optimizer, number)
            if joins:
                hvd.join()
            for number in loader(560 + first):
                assert guard_of(optimizer) is None or number < 300, "at once, not after the pass"
                bad = math.nan if hvd.rank() == 1 and int(number) == 55 else 1.0
                optimizer.zero_grad()
                loss = model(batch(int(number))).pow(2).mean() * bad
                current.losses.seen(loss.detach())
                loss.backward()
                optimizer.step()
            assert together(model) and all(p.isfinite().all() for p in model.parameters())
            assert guard_of(optimizer) is None and not phases_of(optimizer).running
            assert phases_of(optimizer)._no_barrier._made is None, "it is over for good"
            passes(model, optimizer, 10)
            assert not phases_of(optimizer).running
        assert ("is not finite at step" in said.getvalue()) == (hvd.rank() == 0)


def case_a_loss_that_rises_ends_steps_without_a_barrier():
    with real_training() as said:
        model, optimizer = phases(ASP)
        for length in (40, 600):
            for number in loader(length):
                optimizer.zero_grad()
                loss = model(batch(int(number))).pow(2).mean()
                current.losses.seen(torch.tensor(1.0 if phases_of(optimizer).step < 340 else 9.0))
                loss.backward()
                optimizer.step()
        assert together(model) and guard_of(optimizer) is None
    assert ("hvd-autosync: loss guard: " in said.getvalue()) == (hvd.rank() == 0)


def case_the_guard_catches_a_learning_rate_that_is_not_divided():
    """Steps of the mean are stable at 1.2 / curvature; those of each rank, a step old, are not."""
    for rate in ("divided", "kept"):
        with real_training() as said:
            model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            model, optimizer = phases(
                Protocol("asp", rate=rate, share=0.5, total=1600 * hvd.size()),
                lambda m: torch.optim.SGD(m.parameters(), lr=1.2),
                model=model,
            )
            for _ in DataLoader(range(1600), batch_size=1):
                optimizer.zero_grad()
                target = torch.randn(1) / 10  # so that only what grows without end leaves the band
                loss = 10 + (model(torch.ones(1, 1)) - target).square().mean() / 2
                time.sleep(0.003)  # so that ranks are in a step at the same time, also on few cores
                current.losses.seen(loss.detach())
                loss.backward()
                optimizer.step()
            assert together(model) and abs(model.weight.item()) < 10
            caught = rate == "kept"
            assert (guard_of(optimizer) is None) == caught, rate
            assert phases_of(optimizer).running != caught
        on_rank_0 = "continues uncompressed and synchronous" in said.getvalue()
        assert on_rank_0 == (caught and hvd.rank() == 0)


def case_an_evaluation_of_one_rank_feeds_no_step():
    """Its iterator lives on; with and without gradients."""
    held = DataLoader(range(12), batch_size=None, num_workers=1, persistent_workers=True)
    for context in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        model, optimizer = phases(ASP)
        for _ in range(3):
            for number in loader(9):
                step(model, optimizer, number)
            if hvd.rank() == 0:
                with context():
                    assert sum(1 for _ in held) == 12
        assert phases_of(optimizer).running and phases_of(optimizer)._epochs.samples == 0
        assert together(model) and phases_of(optimizer)._epochs._per_step == 1


class OfItsOwn(torch.optim.SGD):
    """An optimizer whose step needs what its constructor has set."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, lr)
        self.shrink = self._shrink = 0.5

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(self.shrink * self._shrink)
        return super().step(closure)


def case_an_optimizer_with_attributes_of_its_own():
    found = []
    for protocol in (Protocol("ssp", 0), None):
        model, optimizer = phases(protocol, lambda m: OfItsOwn(m.parameters()))
        assert vars(optimizer).keys() - _OF_WRAPPERS == {"shrink", "_shrink"}
        passes(model, optimizer, 6)
        found.append(model)
    assert_close(found[0].parameters(), found[1].parameters(), rtol=1e-5, atol=1e-6)


class WithHistory(torch.optim.SGD):
    """An optimizer with states of lists and dictionaries, as Shampoo."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["last"] = [parameter.grad.clone(), *state.get("last", [])][:2]
                    count = state.get("count", {"steps": 0})["steps"]
                    state["count"] = {"steps": np.int64(count + 1)}
        return super().step(closure)


def case_states_of_lists_and_dictionaries():
    """Saved without a barrier, and taken back at its end."""
    found = []
    for protocol in (Protocol("ssp", 0), None):
        model, optimizer = phases(protocol, lambda m: WithHistory(m.parameters(), lr=0.05))
        passes(model, optimizer, 5)
        saved = optimizer.state_dict()["state"] if hvd.rank() == 0 else {}
        hvd.barrier()
        if protocol is not None:
            assert phases_of(optimizer).running
            switch(optimizer, SyncPlan())
        states = [optimizer.state[each] for each in model.parameters()]
        found.append([*states, *(saved[place] for place in sorted(saved))])
    for own, wanted in zip(*found, strict=True):
        assert own["count"]["steps"] == wanted["count"]["steps"] == 5
        assert_close(own["last"], wanted["last"], rtol=1e-5, atol=1e-6)


def case_what_the_script_makes_of_parameters_is_not_lost_silently():
    model, optimizer = phases(ASP)
    with raises(ConfigurationError, "changed parameters itself"):
        for number in loader(40):
            step(model, optimizer, number)
            if number == 20:  # once, where nothing looks at all parameters
                with torch.no_grad():
                    model[0].weight.zero_()
    model, optimizer = phases(ASP)
    with raises(ConfigurationError, "changed parameters itself"):
        for number in loader(20):
            step(model, optimizer, number)
            if phases_of(optimizer).running:
                with torch.no_grad():
                    model[0].weight.clamp_(-1e-3, 1e-3)
    with raises(ConfigurationError, "while its states are with their owners"):
        optimizer.load_state_dict(optimizer.state_dict())


def case_a_gradient_of_an_earlier_step_is_not_sent_again():
    """Under SSP(0), where one rank has none in a step and others have."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))])
    model, optimizer = phases(Protocol("ssp", 0), plain, model=model)
    for number in loader(4):
        optimizer.zero_grad()
        loss = model[0].sum()
        if int(number) < 3 or hvd.rank() == 0:
            loss = loss + 10 * model[1].sum()
        loss.backward()
        optimizer.step()
    # The last of four steps is of one rank's gradient and another's zeros.
    assert abs(-model[1].item() - 0.05 * 10 * (3 + 1 / hvd.size())) < 1e-5


def case_iterators_that_live_on_end_their_passes_too():
    """Persistent workers, an iterator in a variable, and a loop that fetches one batch ahead."""

    def ahead(batches):
        iterator = iter(batches)
        following = next(iterator, None)
        while following is not None:
            current_batch, following = following, next(iterator, None)
            yield current_batch

    persistent = DataLoader(range(9), batch_size=None, num_workers=1, persistent_workers=True)
    for make in (lambda: persistent, lambda: iter(loader(9)), lambda: ahead(loader(9))):
        model, optimizer = phases(ASP)
        batches = make()
        for number in batches:
            step(model, optimizer, number)
        assert phases_of(optimizer).running and together(model)


def case_parameters_that_no_server_has_are_refused():
    """Under Horovod each rank steps them by its own gradients; a server would never step them."""
    model, optimizer = phases(ASP)
    extra = nn.Linear(3, 3)
    for _ in range(2):
        with raises(ConfigurationError, "add_param_group"):
            optimizer.add_param_group({"params": [*extra.parameters()]})
        passes(model, optimizer, 3)
    assert phases_of(optimizer).running
    phases_of(optimizer).before_sharing()

    model = mlp()
    model[0].requires_grad_(False)
    model, optimizer = phases(ASP, model=model)
    passes(model, optimizer, 3)
    assert phases_of(optimizer).running
    model[0].requires_grad_(True)
    with raises(ConfigurationError, "2 parameters were frozen"):
        step(model, optimizer, 9)


def case_parameters_are_added_where_ranks_wait():
    model, optimizer = phases(Protocol(share=1.0, stragglers="elastic"))
    passes(model, optimizer, 3)
    extra = nn.Linear(3, 3)
    optimizer.add_param_group({"params": [*extra.parameters()]})
    before = extra.weight.detach().clone()
    optimizer.zero_grad()
    extra(model(batch(7))).pow(2).mean().backward()
    optimizer.step()
    assert not torch.equal(extra.weight, before)
