"""What is measured while ranks train together, and what ranks decide together."""

import time
import unittest.mock

import horovod.torch as hvd
import torch
from common import OURS, RUN, batch, device_type, mlp, strategy, wrap
from torch import nn

from hvd_autosync.runtime.collectives import agreement, over_horovod
from hvd_autosync.runtime.collectives.operations import Sum, allreduce
from hvd_autosync.runtime.exchange.lossless import seconds_to_code
from hvd_autosync.runtime.measure.profiler import Profiler
from hvd_autosync.runtime.measure.step_classifier import StepClassifier
from hvd_autosync.runtime.optimizer.arguments import EXCHANGE_KNOBS
from hvd_autosync.runtime.trial import ending


def case_steps_and_waiting():
    slept_s, count = 0.2, 9
    model = mlp()
    distributed = wrap(OURS, model)
    RUN._classifier = StepClassifier()
    recorder = RUN.recorder
    hvd.barrier()
    recorder.restart_clock()
    recorder.blocked = 0.0
    first, arrived = len(recorder.step_s), []
    for step in range(count):
        distributed.zero_grad()
        time.sleep(slept_s if hvd.rank() == 0 else 0.0)
        loss = model(batch(step)).pow(2).mean()
        arrived.append(time.perf_counter())  # of this host's one clock
        loss.backward()
        distributed.step()
    steps, blocked = recorder.step_s[first:], recorder.blocked_s[first:]
    own = torch.tensor([[blocked, arrived]], dtype=torch.float64)
    waited, arrivals = hvd.allgather(own, name="waited").unbind(1)
    assert len(steps) == len(blocked) == count
    assert all(0 <= b <= s for b, s in zip(blocked, steps, strict=True))
    # Rank 0 is the slow one: rank 1 waits for it, and not the other way round.
    assert hvd.rank() == 1 or min(steps) > 0.9 * slept_s, steps
    early = arrivals[0] - arrivals[1]
    assert (waited[1] - early).median() > -0.05, (waited, early)
    assert (waited[1] - waited[0] - early).median() > -0.4 * slept_s, (waited, early)


def case_a_rank_that_waits_leaves_its_processor_to_others():
    """Of a rank with one processor, which Horovod's thread needs, too."""
    late_s = 3.0
    with unittest.mock.patch.object(over_horovod, "_one_processor_each", lambda ranks: True):
        hvd.barrier()
        if hvd.rank() == 1:
            time.sleep(late_s)
        begin, used = time.perf_counter(), time.thread_time()
        total = allreduce(torch.ones(3), name="waited.for", op=Sum)
        waited, used = time.perf_counter() - begin, time.thread_time() - used
    assert total.tolist() == [hvd.size()] * 3
    assert hvd.rank() == 1 or (waited > 0.5 * late_s and used < 0.3 * waited), (waited, used)


def case_second_optimizer_is_part_of_the_step():
    model, other = mlp(), nn.Linear(12, 1)
    first = wrap(OURS, model)
    second = wrap(OURS, other, named_parameters=other.named_parameters(prefix="other"))
    RUN._classifier = StepClassifier()
    before = len(RUN.recorder.step_s)
    for step in range(3):
        for network, distributed in ((model, first), (other, second), (other, second)):
            distributed.zero_grad()
            network(batch(step)).pow(2).mean().backward()
            distributed.step()
    assert len(RUN.recorder.step_s) == before + 3


def case_losses():
    model = mlp()
    distributed = wrap(OURS, model)
    RUN._classifier = StepClassifier()
    RUN.recorder.take_news(wait_for_device=True)
    RUN.recorder.losses.may_skip()  # another case may have ended after backward()
    expected = []
    for step in range(3):
        distributed.zero_grad()
        loss = model(batch(step)).pow(2).mean()
        expected.append(loss.item())
        loss.backward()
        distributed.step()
    assert RUN.recorder.take_news(wait_for_device=True)["losses"] == expected


def case_scaled_losses():
    model = mlp()
    distributed = wrap(OURS, model)
    RUN._classifier = StepClassifier()
    RUN.recorder.take_news(wait_for_device=True)
    RUN.recorder.losses.may_skip()
    scaler = torch.amp.GradScaler(device_type(), init_scale=64.0)
    loss = model(batch(0)).pow(2).mean()
    scaler.scale(loss).backward()
    distributed.synchronize()
    scaler.unscale_(distributed)
    with distributed.skip_synchronize():
        scaler.step(distributed)
    scaler.update()
    assert RUN.recorder.take_news(wait_for_device=True)["losses"] == [loss.item()]


def case_profile():
    model = mlp(sizes=(12, 200, 8, 3))
    model[0].weight.requires_grad_(False)
    unused = nn.Linear(2, 2)
    both = nn.ModuleList([model, unused])
    distributed = wrap(OURS, both)
    profiler = RUN.profiling.profiler = Profiler([distributed], seconds_to_code)
    for step in range(3):
        distributed.zero_grad()
        model(batch(step)).pow(2).mean().backward()
        distributed.step()
        profiler.step_ends()
    RUN.profiling.profiler = None
    profile = profiler.finish()
    orders = {p.name: p.ready_order for p in profile.parameters}
    assert orders["0.0.weight"] == -1, orders
    # Zeros are exchanged for the unused layer.
    assert {orders["1.weight"], orders["1.bias"]} == {5, 6}, orders
    assert sorted(orders.values()) == [-1, 0, 1, 2, 3, 4, 5, 6], orders
    assert orders["0.4.bias"] < orders["0.0.bias"], orders
    assert profile.wrapped and profile.backward_s > 0 and profile.forward_s > 0
    ready = [p.ready_s for p in profile.parameters if 0 <= p.ready_order < 5]
    assert all(0 < seconds < profile.backward_s for seconds in ready)
    # The others are small, or have no gradient.
    assert [p.name for p in profile.parameters if p.coding_s > 0] == ["0.2.weight"]


def case_pruning_needs_all_ranks():
    slow, fast = [0.2] * 8, [0.1] * 8
    assert ending.vote_prune(slow, 0.15)
    assert not ending.vote_prune(fast, 0.15)
    assert not ending.vote_prune(slow if hvd.rank() == 0 else fast, 0.15)


def case_pruning_allows_for_noise():
    noisy = [0.1, 0.3, 0.12, 0.25, 0.11, 0.35, 0.1, 0.3]
    assert sum(noisy) / 8 > 0.15
    assert not ending.vote_prune(noisy, 0.15)


def case_as_many_steps_as_the_mean_of_all_ranks_needs():
    assert ending.agree_enough([9.0, 0.5 + hvd.rank(), 0.1], 40) == 15
    assert ending.agree_enough([0.01 + hvd.rank() * 0.01] * 3, 40) == 40
    if hvd.rank() == 0:
        hvd.join()
    else:
        assert ending.agree_enough([1.0], 40) == 30, "in join() a step takes no time"
        hvd.join()


def case_no_pruning_while_a_rank_has_joined():
    if hvd.rank() == 0:
        hvd.join()
    else:
        assert not ending.vote_prune([0.2] * 8, 0.1)
        hvd.join()


def case_most_steps():
    assert agreement.agree_steps(10**9 + hvd.rank(), "case") == 10**9 + hvd.size() - 1


def case_owned_knobs():
    with strategy(buckets=2):
        wrap(OURS, mlp(), groups=3)
        wrap(OURS, mlp())
    assert [*RUN._optimizers._fixed.values()][-2:] == [EXCHANGE_KNOBS, frozenset()]
