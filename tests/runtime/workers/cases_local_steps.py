"""Local steps: rounds, what ends them, and that the mean of replicas is what it should be."""

import contextlib
import copy
import io

import horovod.torch as hvd
import torch
from common import (
    OURS,
    assert_close,
    assert_same_on_all_ranks,
    batch,
    mlp,
    raises,
    rounds_of,
    seeded,
    synchronized_by,
    wrap,
)
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import hvd_autosync
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.schedule import Schedule, rounds
from hvd_autosync.search_space.sync_plan import SyncPlan


def scheduled(schedule, plan=None, classes=None):
    if plan is None and schedule is None:
        return synchronized_by(None)
    return synchronized_by(SyncPlan(plan or ExchangePlan(), classes or {}, schedule))


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def local(schedule, base=momentum, plan=None, classes=None, model=None, **options):
    """A model and its optimizer under a schedule."""
    model = mlp() if model is None else model
    with scheduled(schedule, plan, classes):
        return model, wrap(OURS, model, base(model), **options)


def loader(batches):
    """Gives the numbers of steps."""
    return DataLoader(range(batches), batch_size=None)


def step(model, optimizer, number):
    optimizer.zero_grad()
    model(batch(int(number))).pow(2).mean().backward()
    optimizer.step()


def apart(model):
    """How far replicas are from each other."""
    total = torch.cat([p.detach().flatten() for p in model.parameters()])
    # Named: ranks that have made different numbers of steps count others differently.
    highest = hvd.allreduce(total, op=hvd.Max, name="apart.highest")
    return (highest - hvd.allreduce(total, op=hvd.Min, name="apart.lowest")).max().item()


def together(model):
    return apart(model) == 0


def alone(base, steps, lengths):
    """The parameters after rounds of these lengths, by hand: all ranks' replicas in this process.

    The first step is a parallel one, as is that of a job.
    """
    replicas = [mlp() for _ in range(hvd.size())]
    optimizers = [base(model) for model in replicas]
    ends = {sum(lengths[:count]) for count in range(1, len(lengths) + 1)}
    for number in range(steps):
        for rank, (model, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            generator = seeded(1000 * rank + number)
            optimizer.zero_grad()
            model(torch.randn(6, 12, generator=generator)).pow(2).mean().backward()
        if number == 0:
            for same in zip(*(model.parameters() for model in replicas), strict=True):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p.grad.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
        if number + 1 in ends:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in replicas), strict=True):
                    mean = torch.stack(list(same)).mean(0)
                    for p in same:
                        p.copy_(mean)
    return list(replicas[0].parameters())


def case_rounds_are_those_of_local_sgd():
    for base in (momentum, adam):
        model, optimizer = local(Schedule(4), base)
        for number in loader(13):
            step(model, optimizer, number)
            assert together(model) == (int(number) + 1 in (1, 5, 9, 13)), number
        assert_close(model.parameters(), alone(base, 13, [1, 4, 4, 4]), rtol=1e-5, atol=1e-6)


def case_rounds_of_one_step_are_parallel_sgd():
    """Passes of one batch end every round after its first step; for SGD means commute."""
    found = []
    for schedule in (Schedule(4), None):
        model, optimizer = local(schedule)
        for number in range(20):
            for _ in loader(1):
                step(model, optimizer, number)
        assert hasattr(optimizer, "_sync") == (schedule is not None)
        found.append(list(model.parameters()))
        if schedule is not None:
            assert rounds_of(optimizer).running
    assert_close(*found, rtol=1e-5, atol=1e-6)


def case_a_round_never_crosses_the_end_of_a_pass():
    model, optimizer = local(Schedule(4))
    data = loader(10)
    for _ in range(3):
        for number in data:
            step(model, optimizer, number)
        assert together(model)
    assert rounds_of(optimizer).step == 30


def case_leaving_a_pass_early_ends_the_round():
    model, optimizer = local(Schedule(8))
    for data in (loader(50), DataLoader(range(50), batch_size=None, num_workers=1)):
        for index, number in enumerate(data):
            step(model, optimizer, number)
            if index == 12:
                assert not together(model)
                break
        assert together(model)


def case_another_pass_ends_the_round():
    """An evaluation in the middle of a pass, also where somebody holds the iterator."""
    model, optimizer = local(Schedule(8))
    iterator = iter(loader(50))
    for index in range(12):
        step(model, optimizer, next(iterator))
        if index == 4:
            assert not together(model)
            for _ in loader(2):
                assert together(model)
    assert not together(model)


def case_no_known_end_no_local_steps():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(12))

    for data in (range(12), DataLoader(Stream(), batch_size=None)):
        model, optimizer = local(Schedule(4))
        for number in data:
            step(model, optimizer, number)
            assert together(model)
        assert not rounds_of(optimizer).running


def case_a_script_whose_epochs_have_no_known_end_gets_a_message():
    """Once; also where the schedule asks for local steps late in the training only."""
    for schedule in (Schedule(4), Schedule(1, 2, 0.05)):
        model, optimizer = local(schedule)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            for number in range(180):
                if number == 100:
                    optimizer.param_groups[0]["lr"] = 0.02
                step(model, optimizer, number)
        count = said.getvalue().count("no epoch end seen yet")
        assert count == (hvd.rank() == 0), count


def case_no_collective_waits_with_the_states_locked():
    """Another rank may need them to save a checkpoint, before it takes part in the collective."""
    model, optimizer = local(Schedule(2))
    local_steps, held = rounds_of(optimizer), []
    end_round = local_steps._end_round

    def watched(**options):
        held.append(local_steps.states.lock.locked())
        end_round(**options)

    local_steps._end_round = watched
    for number in loader(24):
        optimizer.zero_grad()
        model(batch(int(number))).pow(2).mean().backward()
        if number % 3:
            optimizer.step()
        else:
            optimizer.synchronize()  # and no step, as where gradients have overflowed
    assert len(held) > 8 and not any(held), held


def case_a_script_may_average_by_itself():
    model, optimizer = local(Schedule(4))
    for number in range(42):
        step(model, optimizer, number)
        if number < 16:
            assert together(model)
        if number in (15, 31):
            hvd_autosync.average(optimizer)
            assert together(model)
    assert rounds_of(optimizer).running and not together(model)
    hvd_autosync.average(optimizer)
    assert together(model)
    hvd_autosync.average(torch.optim.SGD(model.parameters(), lr=0.1))  # nothing to do


def case_lengths_follow_the_learning_rate():
    model, optimizer = local(Schedule(2, 2, 0.05, cap=9))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    rates, ends = [], []
    for number in loader(60):
        rates.append(optimizer.param_groups[0]["lr"])
        step(model, optimizer, number)
        scheduler.step()
        if together(model):
            ends.append(int(number) + 1)
    found = [b - a for a, b in zip([0, *ends], ends, strict=False)]
    # A first parallel step, then as the rule has it.
    assert found[0] == 1
    assert found[1:] == list(rounds(Schedule(2, 2, 0.05, cap=9, warmup=0), rates[1:]))
    assert max(found) == 9


def case_the_schedule_starts_late():
    model, optimizer = local(Schedule(4, start=7))
    ends = []
    for number in loader(19):
        step(model, optimizer, number)
        if together(model):
            ends.append(int(number) + 1)
    assert ends == [*range(1, 8), 11, 15, 19]


def case_changes_travel_as_the_plan_says():
    plans = [
        ExchangePlan(buckets=2),
        ExchangePlan(large=ClassPlan(slices=3)),
        ExchangePlan(rest=ClassPlan(codec="int8")),
        ExchangePlan(large=ClassPlan(codec="powersgd"), rest=ClassPlan(codec="bf16")),
        ExchangePlan(order="priority", large=ClassPlan("sharded")),
    ]
    for plan in plans:
        model, optimizer = local(Schedule(3), plan=plan, classes={"large": ("0.weight",)})
        for number in loader(16):
            step(model, optimizer, number)
        assert together(model)
        lossy = any(plan.of(name).codec != "none" for name in ("large", "rest"))
        expected = alone(momentum, 16, [1, 3, 3, 3, 3, 3])
        tolerance = 0.2 if lossy else 1e-5
        assert_close(model.parameters(), expected, rtol=tolerance, atol=tolerance)


def case_an_average_at_the_end_of_an_epoch_has_all_that_codecs_left_out():
    """Gradients do not depend on the parameters here, so the sum of all changes is known."""

    def trained(schedule, plan=None):
        torch.manual_seed(3)
        model, optimizer = local(
            schedule,
            lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
            plan=plan,
            classes={"large": ("weight",)},
            model=nn.Linear(12, 5),
        )
        for number in loader(15):
            optimizer.zero_grad()
            model(batch(int(number))).sum().backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.05  # the first step is no local one
            yield model, optimizer

    *_, (expected, _) = trained(None)
    top = ClassPlan(codec="topk", ratio=0.05)
    low = ClassPlan(codec="powersgd", rank=1)
    for plan in (
        ExchangePlan(large=top, rest=top),
        ExchangePlan(large=low),
        ExchangePlan(rest=top),
    ):
        for schedule in (Schedule(4), Schedule(100)):
            kept = []
            for model, optimizer in trained(schedule, plan):  # noqa: B007 (the last one counts)
                buckets = rounds_of(optimizer)._averaging.dispatcher.buckets
                codecs = [bucket.codec for bucket in buckets if bucket.codec is not None]
                kept.append(any(codec.left_out().any() for codec in codecs))
            assert kept[8] == (schedule.base == 4) and not kept[-1], kept
            assert_close(model.parameters(), expected.parameters(), rtol=1e-5, atol=1e-6)


def case_any_layout_of_memory():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model = model.to(memory_format=torch.channels_last)
    model, optimizer = local(Schedule(3), model=model)
    for number in loader(8):
        optimizer.zero_grad()
        inputs = torch.randn(2, 3, 5, 5, generator=seeded(9 + hvd.rank()))
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        assert together(model) == (int(number) in (0, 3, 6, 7))
    rounds_of(optimizer).make_exact(together=True)


def case_rows_of_tables():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.table = nn.Embedding(50, 4)

    plan = ExchangePlan(embedding=ClassPlan("rows"))
    found = []
    for chosen in (plan, ExchangePlan(buckets=1)):
        model, optimizer = local(
            Schedule(4),
            lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
            chosen,
            {"embedding": ("table*",)},
            Table(),
        )
        for number in loader(17):
            optimizer.zero_grad()
            model.table(torch.tensor([int(number), 20 + hvd.rank()])).pow(2).sum().backward()
            optimizer.step()
        assert together(model)
        found.append(list(model.parameters()))
    assert_close(*found)


def case_statistics_are_equal_where_a_pass_ends():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    model, optimizer = local(Schedule(4), model=model)
    norm = model[1]
    for number in loader(11):
        step(model, optimizer, number)
    before = hvd.allgather(norm.running_mean[None], name="means")
    assert together(model) and torch.equal(before, before[:1].expand_as(before))
    for index, number in enumerate(loader(11)):
        step(model, optimizer, number)
        if index == 3:
            assert together(model)
            means = hvd.allgather(norm.running_mean[None], name="means")
            assert not torch.equal(means, means[:1].expand_as(means))
    assert norm.running_var.isfinite().all() and norm.num_batches_tracked == 22


def case_uneven_passes_and_join():
    model, optimizer = local(Schedule(4))
    for _ in range(3):
        for number in loader(10 + 3 * (hvd.rank() == 0)):
            step(model, optimizer, number)
        last = hvd.join()
        for name, tensor in model.state_dict().items():
            tensor.copy_(hvd.broadcast(tensor, last, name=name))
    for number in loader(8):
        step(model, optimizer, number)
        assert together(model) == (int(number) in (3, 7)), number


def case_accumulation():
    model, optimizer = local(Schedule(2), backward_passes_per_step=2)
    ends = []
    for number in loader(20):
        if int(number) % 2 == 0:
            optimizer.zero_grad()
        model(batch(int(number))).pow(2).mean().backward()
        if int(number) % 2:
            optimizer.step()
            if together(model):
                ends.append((int(number) + 1) // 2)
    assert ends == [1, 3, 5, 7, 9, 10]


def case_gradients_are_clipped_before_the_step():
    model, optimizer = local(Schedule(4))
    for number in loader(9):
        optimizer.zero_grad()
        model(batch(int(number))).pow(2).mean().backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert together(model)


def case_sums_of_gradients_have_no_local_steps():
    model, optimizer = local(Schedule(4), op=hvd.Sum)
    for number in loader(9):
        step(model, optimizer, number)
        assert together(model)


def case_back_to_parallel_steps():
    model, optimizer = local(Schedule(4), adam)
    for number in loader(11):
        step(model, optimizer, number)
        if int(number) == 8:
            rounds_of(optimizer).make_exact(together=True)
    assert together(model) and not rounds_of(optimizer).running
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    assert_same_on_all_ranks([value for value in state if value.dim()])


def case_an_evaluation_on_one_rank_alone_is_named():
    model, optimizer = local(Schedule(8))
    iterator = iter(loader(60))
    for _ in range(4):
        step(model, optimizer, next(iterator))
    with raises(ConfigurationError, "early"):
        if hvd.rank() == 0:
            list(loader(2))
        for _ in range(20):
            step(model, optimizer, next(iterator))


def case_a_checkpoint_of_one_rank_has_the_moments_of_all():
    """Saved on rank 0 in the middle of a round, loaded there, and shared as scripts do."""
    model, optimizer = local(Schedule(4), adam)
    for number in loader(8):
        step(model, optimizer, number)
    for number in loader(7):
        step(model, optimizer, number)
        if int(number) == 5:
            own = [v.clone() for p in model.parameters() for v in optimizer.state[p].values()]
            hvd.barrier()  # ranks that are apart would tell what they have at that moment
            saved = optimizer.state_dict() if hvd.rank() == 0 else None
            break
    rounds_saved = saved["hvd_autosync_rounds"] if saved else {}
    if saved:
        assert (rounds_saved["step"], rounds_saved["done"]) == (14, 2)
        assert sorted(rounds_saved["ranks"]) == list(range(hvd.size()))
    resumed, again = local(Schedule(4), adam)
    if saved:
        again.load_state_dict(saved)
    hvd.broadcast_parameters(resumed.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(again, root_rank=0)
    found = [v for p in resumed.parameters() for v in again.state[p].values()]
    assert rounds_of(again).step == 14
    assert_close(found, own)
    moments = torch.cat([value.flatten() for value in found if value.dim()])
    highest = hvd.allreduce(moments, op=hvd.Max, name="moments.highest")
    assert highest.ne(hvd.allreduce(moments, op=hvd.Min, name="moments.lowest")).any()
    ends = []
    for number in loader(9):
        step(resumed, again, number)
        if together(resumed):
            ends.append(int(number) + 1)
    assert ends == [1, 5, 9] and rounds_of(again).step == 23


def case_a_step_that_one_rank_skips_counts():
    """As under mixed precision, where gradients of one rank alone may overflow."""
    model, optimizer = local(Schedule(4))
    for number in loader(14):
        optimizer.zero_grad()
        model(batch(int(number))).pow(2).mean().backward()
        optimizer.synchronize()
        if hvd.rank() == 0 or int(number) not in (3, 6, 13):
            with optimizer.skip_synchronize():
                optimizer.step()
    assert together(model) and rounds_of(optimizer).step == 14


def case_a_rank_that_refuses_a_step_goes_on_to_an_operation():
    model, optimizer = local(Schedule(4))
    for number in loader(14):
        model(batch(int(number))).pow(2).mean().backward()
        optimizer.synchronize()
        if hvd.rank() == 0 or int(number) not in (4, 6, 13):
            with optimizer.skip_synchronize():
                optimizer.step()
        optimizer.zero_grad()
        hvd.allreduce(torch.ones(1), name="loss")
    assert together(model) and rounds_of(optimizer).step == 14


def case_a_step_that_a_script_refuses_counts_whoever_drops_its_gradients():
    model, optimizer = local(Schedule(4))
    for number in loader(14):
        model.zero_grad()
        model(batch(int(number))).pow(2).mean().backward()
        optimizer.synchronize()
        if int(number) not in (3, 6):
            with optimizer.skip_synchronize():
                optimizer.step()
    assert together(model) and rounds_of(optimizer).step == 14


def case_passes_that_are_synchronized_one_by_one_are_one_step():
    """As Horovod demands where a script accumulates gradients itself."""
    model, optimizer = local(Schedule(4))
    for number in loader(9):
        optimizer.zero_grad()
        for _ in range(3):
            model(batch(int(number))).pow(2).mean().backward()
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert together(model) and rounds_of(optimizer).step == 9


def case_several_evaluations_of_a_closure_are_one_step():
    model, optimizer = local(
        Schedule(4), lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3)
    )
    ends = []
    for number in loader(13):

        def closure(number=number):
            optimizer.zero_grad()
            loss = model(batch(int(number))).pow(2).mean()
            loss.backward()
            optimizer.synchronize()
            return loss

        with optimizer.skip_synchronize():
            optimizer.step(closure)
        if together(model):
            ends.append(int(number) + 1)
    assert rounds_of(optimizer).step == 13 and ends == [1, 5, 9, 13]


def case_replicas_stay_equal_if_a_checkpoint_of_rounds_is_loaded_after_a_fallback():
    model, optimizer = local(Schedule(4))
    for number in loader(9):
        step(model, optimizer, number)
    hvd.barrier()
    own = optimizer.state_dict() if hvd.rank() == 0 else None
    saved = copy.deepcopy(hvd.broadcast_object(own, name="saved"))
    rounds_of(optimizer).make_exact(together=True)
    optimizer.load_state_dict(saved)
    for number in loader(4):
        step(model, optimizer, number)
    assert together(model)
