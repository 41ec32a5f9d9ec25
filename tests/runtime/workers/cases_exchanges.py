"""Every exchange gives the parameters that Horovod's own optimizer gives."""

import contextlib
import copy
import gc
import itertools
import os
import time
import unittest

import horovod.torch as hvd
import torch
from common import (
    HOROVODS,
    OURS,
    assert_close,
    assert_same_on_all_ranks,
    clipped_step,
    exchange_of,
    raises,
    seeded,
    synchronized_by,
)
from torch import nn
from torch.nn import functional as F

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.sync.synchronizer import switch
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.sync_plan import SyncPlan

ROWS, COLUMNS = 40, 6
FEW, STEPS = 6, 12  # a short batch is the first, and every tenth after it
CLASSES = {"embedding": ("table*",), "large": ("body.*weight", "tied*")}
HIERARCHICAL, BY_ROWS, SHARDED, BY_FACTORS = map(
    ClassPlan, ("hierarchical", "rows", "sharded", "factors")
)
PLANS = {
    "as Horovod": ExchangePlan(),
    "one bucket": ExchangePlan(buckets=1),
    "ordered": ExchangePlan(buckets=3),
    "by size": ExchangePlan(buckets=3, rule="size"),
    "slices": ExchangePlan(embedding=ClassPlan(slices=3), large=ClassPlan(slices=7)),
    "rows": ExchangePlan(buckets=2, embedding=BY_ROWS),
    "sharded": ExchangePlan(2, "ordered", "arrival", SHARDED, SHARDED, SHARDED),
    "sharded in part": ExchangePlan(0, "size", "arrival", BY_ROWS, ClassPlan("sharded", slices=3)),
    "factors": ExchangePlan(3, embedding=BY_ROWS, large=BY_FACTORS),
    "priority": ExchangePlan(order="priority"),
    "priority mixed": ExchangePlan(3, "ordered", "priority", BY_ROWS, SHARDED),
    "hierarchical": ExchangePlan(0, "ordered", "arrival", *[HIERARCHICAL] * 3),
    "mixed": ExchangePlan(
        2, "size", "arrival", BY_ROWS, ClassPlan("hierarchical", slices=2), HIERARCHICAL
    ),
}
#: Adam's usual epsilon makes whole steps of what is rounding alone.
OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=0.01, eps=1e-3),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, eps=1e-3),
}


def plan(chosen, classes=CLASSES):
    return synchronized_by(SyncPlan(chosen, classes))


def plans():
    """Those of two levels where there are several hosts, else the others."""
    return [item for item in PLANS.items() if item[1].two_levels == (hvd.cross_size() > 1)]


class Model(nn.Module):
    """A table, a body with a shared, a frozen and an unused layer, and a head for some ranks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.table = nn.Embedding(ROWS, COLUMNS, padding_idx=0)
        self.body = nn.Sequential(nn.Linear(COLUMNS, 10), nn.Tanh(), nn.Linear(10, 10))
        self.frozen, self.unused = nn.Linear(10, 10), nn.Linear(3, 3)
        self.norm = nn.LayerNorm(10)
        self.heads = nn.ModuleList([nn.Linear(10, 4), nn.Linear(10, 4)])
        self.scale = nn.Parameter(torch.tensor(1.5))  # a single element, without a dimension
        self.frozen.requires_grad_(False)

    def forward(self, x):
        hidden = self.body(self.table(x).mean(1))
        hidden = self.norm(self.frozen(torch.tanh(hidden) + self.body[2](hidden)))
        return self.heads[min(hvd.rank(), 1)](hidden) * self.scale


def inputs(step, rows=None):
    generator = seeded(1000 * hvd.rank() + step)
    count = (6 if step % 10 else 2) if rows is None else rows  # a short last batch
    return torch.randint(0, ROWS, (count, 3), generator=generator)


def loss_of(model, step, **options):
    x = inputs(step, **options)
    return F.cross_entropy(model(x), x[:, 0] % 4)


def groups_of(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [{"params": matrices}, {"params": others, "lr": 0.02}]


def train(factory, optimizer="momentum", step=None, passes=1, steps=None, after=None, hook=None):
    # Four ranks of Gloo on two processors take 20 times as long for a step as two.
    steps = steps or (FEW if hvd.cross_size() > 1 else STEPS)
    model = Model()
    base = OPTIMIZERS[optimizer](groups_of(model))
    options = {"backward_passes_per_step": passes} if passes > 1 else {}
    distributed = factory(base, named_parameters=model.named_parameters(), **options)
    for parameter in model.parameters() if hook is not None else ():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hook)
    for number in range(steps if isinstance(steps, int) else steps[hvd.rank()]):
        distributed.zero_grad()
        for part in range(passes):
            (loss_of(model, passes * number + part) / passes).backward()
        (step or type(distributed).step)(distributed)
    if after is not None:
        after()
    return [parameter.detach() for parameter in model.parameters()]


def compare(*, same_on_all_ranks=True, **options):
    expected = train(HOROVODS, **options)
    for name, chosen in plans():
        with plan(chosen):
            ours = train(OURS, **options)
        try:
            assert_close(ours, expected, atol=2e-5, rtol=2e-5)
            if same_on_all_ranks:
                assert_same_on_all_ranks(ours)
        except AssertionError as error:
            raise AssertionError(f"under the plan {name!r}") from error


def case_sgd():
    compare(optimizer="SGD")


def case_momentum():
    compare(optimizer="momentum")


def case_adam():
    compare(optimizer="Adam")


def case_adamw():
    compare(optimizer="AdamW")


def case_clipping():
    compare(step=clipped_step, steps=FEW)


def case_accumulation():
    compare(passes=3, steps=FEW)


def case_hooks_of_the_script_change_gradients_before_they_are_sent():
    """Also those that it registers after it has wrapped its optimizer."""

    def clip(parameter):
        time.sleep(0.002)  # what has been sent too early arrives meanwhile
        parameter.grad.clamp_(-0.01, 0.01)

    compare(steps=FEW, hook=clip)


def case_gradients_that_the_script_replaces_before_the_step():
    """The step finds the mean of what has arrived, as Horovod's does."""

    def step(distributed):
        for parameter in distributed._requires_update:
            if parameter.grad is not None:
                parameter.grad = torch.nan_to_num(parameter.grad)
        distributed.step()

    compare(step=step, steps=FEW)


def case_gradients_that_the_script_scales_before_the_step():
    """Without ``synchronize()``; under plain allreduces, too, it may hit one that is running."""

    def scale(distributed):
        for parameter in distributed._requires_update:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def scaled_step(distributed):
        scale(distributed)
        distributed.step()

    def right_step(distributed):
        distributed.synchronize()
        scale(distributed)
        with distributed.skip_synchronize():
            distributed.step()

    expected = train(HOROVODS, step=right_step, steps=FEW)
    for name, chosen in plans():
        if name not in ("as Horovod", "priority"):
            with plan(chosen):
                ours = train(OURS, step=scaled_step, steps=FEW)
            assert_same_on_all_ranks(ours)
            assert_close(ours, expected, atol=2e-5, rtol=2e-5)


def case_join():
    uneven = [FEW + 2 * rank for rank in range(hvd.size())]
    # Who has joined takes no further steps.
    compare(steps=uneven, after=hvd.join, same_on_all_ranks=False)


def case_gradients_kept_between_steps():
    """With zero_grad(set_to_none=False) gradients stay where they are."""

    def step(distributed):
        distributed.step()
        for group in distributed.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    compare(step=step, steps=FEW)


def case_an_exchange_begins_in_the_midst_of_backward():
    """What has arrived travels while earlier layers compute; not so in the first step."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for name in ("ordered", "by size", "slices"):
        with plan(PLANS[name], {"large": ("3.weight",)}):
            distributed = OURS(OPTIMIZERS["SGD"](model.parameters()), model.named_parameters())
        under_way = []
        for _ in range(4):
            distributed.zero_grad()
            hidden = model[0](torch.randn(4, 8))
            dispatcher = exchange_of(distributed).dispatcher
            hidden.register_hook(lambda _: under_way.append(dispatcher.busy))  # noqa: B023
            model[1:](hidden).pow(2).mean().backward()
            distributed.step()
        assert under_way == [False, True, True, True], (name, under_way)


def case_gradients_of_earlier_steps_stay():
    """A gradient that the script keeps is not overwritten by the next step."""
    for name, chosen in plans():
        with plan(chosen):
            model = Model()
            distributed = OURS(OPTIMIZERS["SGD"](model.parameters()), model.named_parameters())
        for number in range(3):
            distributed.zero_grad()
            loss_of(model, number).backward()
            distributed.step()
            if number == 1:
                kept = [p.grad for p in model.parameters() if p.grad is not None]
                copies = [gradient.clone() for gradient in kept]
        for gradient, before in zip(kept, copies, strict=True):
            assert torch.equal(gradient, before), name


def case_bfloat16():
    """Horovod cannot reduce it; the mean is that of float32, rounded once."""
    for name, chosen in plans():
        with plan(chosen):
            model = nn.ModuleDict({"table": nn.Embedding(ROWS, 8), "body": nn.Linear(8, 4)})
            model = model.to(torch.bfloat16)
            distributed = OURS(
                torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
            )
        model["body"](model["table"](inputs(1)).mean(1)).float().pow(2).mean().backward()
        own = {n: p.grad.float() for n, p in model.named_parameters()}
        distributed.synchronize()
        for key, parameter in model.named_parameters():
            mean = hvd.allreduce(own[key], name=f"expected.{key}").to(torch.bfloat16)
            assert parameter.grad.dtype is torch.bfloat16
            torch.testing.assert_close(parameter.grad, mean, msg=lambda m: f"{name}: {m}")  # noqa: B023
        with distributed.skip_synchronize():
            distributed.step()


def case_float16_has_the_bits_of_horovods():
    """Its sums overflow, and small numbers vanish, in the same elements."""

    def run(factory):
        table, body = (nn.Parameter(torch.zeros(ROWS, 8, dtype=torch.float16)) for _ in range(2))
        named = [("table", table), ("body", body)]
        distributed = factory(torch.optim.SGD([table, body], lr=1.0), named)
        for step in range(2):
            distributed.zero_grad()
            gradient = torch.zeros_like(table)
            gradient[step] = torch.arange(8) * 2.0**-24  # the smallest numbers
            gradient[2 + step] = 60000.0
            ((table + body) * gradient).sum().backward()
            distributed.synchronize()
            reduced = [each.grad.clone() for each in (table, body)]
            with distributed.skip_synchronize():
                distributed.step()
        return reduced

    expected = run(HOROVODS)
    for name, chosen in plans():
        with plan(chosen, {"embedding": ("table",), "large": ("body",)}):
            for ours, theirs in zip(run(OURS), expected, strict=True):
                assert torch.equal(ours, theirs), (name, ours[ours != theirs])


def case_load_state_dict_in_the_midst_of_a_step():
    """What has begun on some ranks is ended on all, however much of it each has sent."""
    for name, chosen in plans():
        with plan(chosen):
            model, saved = Model(), {}
            distributed = OURS(OPTIMIZERS["Adam"](model.parameters()), model.named_parameters())
        for number in range(4):
            distributed.zero_grad()
            if number == 2 and hvd.rank() == 0:
                time.sleep(0.1)  # it finds the others there, and they do not find it
            loss_of(model, number).backward()
            if number == 2:
                distributed.load_state_dict(saved)
                continue
            distributed.step()
            saved = copy.deepcopy(distributed.state_dict())
        try:
            assert_same_on_all_ranks([parameter.detach() for parameter in model.parameters()])
        except AssertionError as error:
            raise AssertionError(f"under the plan {name!r}") from error


def _sparse(factory, optimizer):
    torch.manual_seed(3)
    model = nn.ModuleDict({"table": nn.Embedding(ROWS, 4, sparse=True), "body": nn.Linear(4, 2)})
    groups = model.parameters() if optimizer is torch.optim.SGD else model["table"].parameters()
    distributed = factory(optimizer(groups, lr=0.1), model.named_parameters())
    for step in range(FEW):
        distributed.zero_grad()
        model["body"](model["table"](inputs(step)).mean(1)).pow(2).mean().backward()
        assert model["table"].weight.grad.is_sparse
        distributed.step()
    return [parameter.detach() for parameter in model.parameters()]


def case_sparse_gradients():
    for optimizer in (torch.optim.SGD, torch.optim.SparseAdam):
        expected = _sparse(HOROVODS, optimizer)
        for _, chosen in plans():
            with plan(chosen):
                assert_close(_sparse(OURS, optimizer), expected)


def case_gradients_that_are_sparse_in_two_dimensions():
    """As ``torch.gather`` makes them."""

    def run(factory):
        torch.manual_seed(3)
        table = nn.Parameter(torch.randn(ROWS, 3))
        distributed = factory(torch.optim.SGD([table], lr=0.1), [("table", table)])
        for step in range(FEW):
            distributed.zero_grad()
            torch.gather(table, 1, inputs(step) % 3, sparse_grad=True).pow(2).sum().backward()
            assert table.grad.sparse_dim() == 2
            distributed.step()
        return [table.detach()]

    expected = run(HOROVODS)
    for _, chosen in plans():
        with plan(chosen):
            assert_close(run(OURS), expected)


def case_tied_weights_travel_whole():
    """A table that is also the output layer gets a gradient in every row."""

    def run(factory):
        torch.manual_seed(5)
        table = nn.Embedding(ROWS, COLUMNS)
        distributed = factory(
            torch.optim.SGD(table.parameters(), lr=0.1), [("table.weight", table.weight)]
        )
        for step in range(12):
            distributed.zero_grad()
            x = inputs(step)
            logits = table(x[:, 1]) @ table.weight.T
            F.cross_entropy(logits, x[:, 0]).backward()
            distributed.step()
        return [table.weight.detach()]

    with plan(PLANS["rows"]):
        ours = run(OURS)
    assert_close(ours, run(HOROVODS))


def case_batches_that_fill_the_table():
    """The choice between rows and the whole changes from step to step."""

    def run(factory):
        torch.manual_seed(5)
        table = nn.Embedding(ROWS, COLUMNS)
        distributed = factory(
            torch.optim.SGD(table.parameters(), lr=0.1), [("table.weight", table.weight)]
        )
        for step in range(30):
            distributed.zero_grad()
            table(inputs(step, rows=1 if step % 3 else 200)).pow(2).mean().backward()
            distributed.step()
        return [table.weight.detach()]

    with plan(PLANS["rows"]):
        ours = run(OURS)
    assert_close(ours, run(HOROVODS))


def case_untouched_tables():
    """No rank, or only one, uses the table."""

    def run(factory):
        torch.manual_seed(5)
        model = nn.ModuleDict({"table": nn.Embedding(ROWS, 4), "body": nn.Linear(4, 2)})
        distributed = factory(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(6):
            distributed.zero_grad()
            used = step > 3 or (step > 1 and hvd.rank() == 0)
            hidden = model["table"](inputs(step)).mean(1) if used else torch.ones(2, 4)
            model["body"](hidden).pow(2).mean().backward()
            distributed.step()
        return [parameter.detach() for parameter in model.parameters()]

    with plan(PLANS["rows"]):
        ours = run(OURS)
    assert_close(ours, run(HOROVODS))


def case_ranks_with_different_models():
    sizes = [4, 5 + hvd.rank()]
    model = nn.Sequential(nn.Linear(3, sizes[0]), nn.Linear(sizes[0], sizes[1]))
    with plan(PLANS["ordered"]), raises(AutosyncError, "1.weight"):
        OURS(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def case_ranks_with_different_plans():
    model = nn.Linear(3, 4)
    mine = PLANS["ordered" if hvd.rank() == 0 else "one bucket"]
    with plan(mine), raises(AutosyncError, "the plan"):
        OURS(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def case_hierarchical_on_one_host():
    if hvd.cross_size() > 1:
        raise unittest.SkipTest("this job has several hosts")
    model = nn.Linear(3, 3)
    with plan(PLANS["hierarchical"]), raises(AutosyncError, "hierarchical"):
        OURS(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


@contextlib.contextmanager
def elastic():
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        yield
    finally:
        del os.environ["HOROVOD_ELASTIC"]


def case_elastic_jobs_begin_under_no_plan():
    model = nn.Linear(3, 3)
    with elastic(), plan(PLANS["ordered"]), raises(AutosyncError, "elastic"):
        OURS(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


def case_elastic_jobs_begin_and_start_over_without_a_word_to_other_ranks():
    def alone(action):
        """It would hang if it were a collective."""
        if hvd.rank():
            hvd.barrier()
            return action()
        done = action()
        hvd.barrier()
        return done

    def trained(make, between=lambda *_: None):
        model = Model()
        named = model.named_parameters()
        optimizer = alone(lambda: make(OPTIMIZERS["momentum"](groups_of(model)), named))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            between(optimizer, step)
        return list(model.parameters())

    def between(optimizer, step):
        if step == 2:
            switch(optimizer, SyncPlan(PLANS["ordered"], CLASSES))
        elif step == 6:
            alone(optimizer._sync.start_over)

    with elastic(), synchronized_by(SyncPlan()):
        ours = trained(OURS, between)
    assert_close(ours, trained(HOROVODS))


def case_arguments_are_checked_as_horovod_does():
    model = nn.Linear(3, 3)
    for options in (
        {"backward_passes_per_step": 0},
        {"op": hvd.Sum, "gradient_predivide_factor": 2.0},
    ):
        with plan(PLANS["ordered"]), raises(ValueError):
            base = torch.optim.SGD(model.parameters(), lr=0.1)
            OURS(base, model.named_parameters(), **options)


def case_two_optimizers_in_one_backward():
    def run(factory):
        torch.manual_seed(9)
        parts = {name: nn.Embedding(ROWS, 4) for name in ("table_a", "table_b")}
        optimizers = [
            factory(torch.optim.SGD(part.parameters(), lr=0.1), part.named_parameters(prefix=name))
            for name, part in parts.items()
        ]
        for step in range(8):
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(part(inputs(step)).pow(2).mean() for part in parts.values()).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach() for part in parts.values() for p in part.parameters()]

    with plan(PLANS["rows"]):
        ours = run(OURS)
    assert_close(ours, run(HOROVODS))


def case_a_dropped_optimizer_is_gone():
    model, reference = Model(), Model()
    for network, factory, chosen in ((model, OURS, PLANS["rows"]), (reference, HOROVODS, None)):
        with plan(chosen):
            first = factory(OPTIMIZERS["SGD"](network.parameters()), network.named_parameters())
            loss_of(network, 0).backward()
            first.step()
            first.zero_grad()
            del first
            gc.collect()
            again = factory(OPTIMIZERS["Adam"](network.parameters()), network.named_parameters())
        for number in range(1, 4):
            again.zero_grad()
            loss_of(network, number).backward()
            again.step()
    assert_close(list(model.parameters()), list(reference.parameters()))


def case_sparse_gradients_that_some_rank_lacks():
    def run(factory, at_first):
        torch.manual_seed(5)
        table = nn.Embedding(ROWS, 4, sparse=True)
        model = nn.ModuleDict({"table": table, "body": nn.Linear(4, 2)})
        distributed = factory(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
        for step in range(4):
            distributed.zero_grad()
            used = hvd.rank() != 0 or (step > 0) == at_first
            hidden = model["table"](inputs(step)).mean(1) if used else torch.ones(2, 4)
            model["body"](hidden).pow(2).mean().backward()
            distributed.step()
        return [parameter.detach() for parameter in model.parameters()]

    for at_first in (True, False):
        with plan(PLANS["rows"]):
            assert_same_on_all_ranks(run(OURS, at_first))


def case_later_sparse_gradients():
    """The first step has shown a dense gradient, or none."""

    def run(factory, base, used_at_first):
        torch.manual_seed(5)
        model = nn.ModuleDict({"table": nn.Embedding(ROWS, 4), "body": nn.Linear(4, 2)})
        distributed = factory(base(model.parameters()), model.named_parameters())
        for step in range(5):
            distributed.zero_grad()
            model["table"].sparse = step > 0
            used = step > 0 or used_at_first
            hidden = model["table"](inputs(step)).mean(1) if used else torch.ones(2, 4)
            model["body"](hidden).pow(2).mean().backward()
            distributed.step()
            assert model["table"].weight.grad.is_sparse == (step > 0)
        return [parameter.detach() for parameter in model.parameters()]

    bases = (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    )
    for base, used_at_first in itertools.product(bases, (True, False)):
        expected = run(HOROVODS, base, used_at_first)
        for name in ("one bucket", "rows", "slices", "sharded"):
            with plan(PLANS[name]):
                ours = run(OURS, base, used_at_first)
            assert_same_on_all_ranks(ours)
            assert_close(ours, expected)
