"""Habits of scripts: each exact exchange trains the same, whatever a script does between its steps.

A habit is a function of what a script can reach. It is called at one place of each step, and may
return tensors that the script has seen, which are compared, too. None changes a gradient that may
be in flight: what Horovod makes of that depends on the moment.
"""

import copy
import functools
import time

import horovod.torch as hvd
import torch
from cases_exchanges import plan
from cases_loops import PLANS
from common import HOROVODS, OURS, assert_close, exchange_of, seeded
from torch import nn

from hvd_autosync.runtime.collectives.operation_names import name_operations
from hvd_autosync.runtime.sync.synchronizer import switch
from hvd_autosync.search_space.exchange_plan import ExchangePlan
from hvd_autosync.search_space.sync_plan import SyncPlan

#: As in a job under the flag.
name_operations()
STEPS = 6
CLASSES = {"embedding": ("table.*",), "large": ("wide.*", "narrow.*")}


class Model(nn.Module):
    """A table of which batches touch few rows, matrices with biases, and a number."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(60, 12)
        self.wide, self.narrow = nn.Linear(12, 40), nn.Linear(40, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, rows):
        return self.narrow(torch.tanh(self.wide(self.table(rows)))) * self.scale


class Script:
    """One training, step by step.

    Attributes:
        network: The class of its model.
        model: The model.
        optimizer: The distributed optimizer.
        number: The number of the step.
        seen: What its habit has seen.
    """

    network = Model

    def __init__(self, factory, chosen):
        torch.manual_seed(4)
        self.model = self.network()
        named = list(self.model.named_parameters())
        base = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
        with plan(chosen, CLASSES):
            self.optimizer = factory(base, named_parameters=named)
        self.number, self.seen = 0, []

    @property
    def parameters(self):
        return list(self.model.parameters())

    @property
    def loss(self):
        rows = torch.randint(60, (5,), generator=seeded(100 * hvd.rank() + self.number))
        return self.model(rows).pow(2).mean()

    def run(self, habit, place):
        for self.number in range(STEPS):
            self.optimizer.zero_grad()
            self.loss.backward()
            if place == "before the step":
                self.seen += habit(self) or []
            if place == "in place of the step":
                self.seen += habit(self) or []
            else:
                self.optimizer.step()
            if place == "after the step":
                self.seen += habit(self) or []
        return [*map(torch.Tensor.detach, self.parameters), *self.seen]


class Uneven(Script):
    """Its ranks compute the last gradients at different speeds, while the first ones travel."""

    def __init__(self, factory, chosen):
        super().__init__(factory, chosen)
        for layer in (self.model.wide, self.model.table):
            layer.weight.register_hook(lambda _: time.sleep(0.01 + 0.01 * hvd.rank()))


class Contrastive(Uneven):
    """Its loss is of the features of all ranks: Horovod reduces without names inside backward."""

    @property
    def loss(self):
        rows = torch.randint(60, (5,), generator=seeded(100 * hvd.rank() + self.number))
        features = hvd.allgather(self.model(rows))
        return (features @ features.t()).exp().mean()


def habit(place, *, with_order=True, script=Script):
    """Make a case of a habit, which scripts have at ``place``.

    Some are none for the knob ``order``, which is not offered without being allowed.
    """
    plans = {k: v for k, v in PLANS.items() if with_order or v.order != "priority"}

    def register(function):
        def trained(factory, chosen):
            return [each.clone() for each in script(factory, chosen).run(function, place)]

        @functools.wraps(function)
        def case():
            expected = trained(HOROVODS, None)
            for label, chosen in plans.items():
                try:
                    assert_close(trained(OURS, chosen), expected, atol=2e-5, rtol=2e-5)
                except AssertionError as error:
                    raise AssertionError(f"under the plan {label!r}") from error

        return case

    return register


@habit("after the step")
def case_a_script_that_looks_at_gradients_after_the_step(script):
    if script.number % 2:
        return [each.grad.norm() for each in script.parameters]
    return []


@habit("after the step")
def case_a_script_that_prunes_by_gradients_after_the_step(script):
    with torch.no_grad():
        for each in script.parameters:
            each[each.grad.abs() < 1e-4] = 0


@habit("in place of the step", with_order=False)
def case_a_script_that_keeps_gradients_from_before_the_step(script):
    gradients = [each.grad for each in script.parameters]
    script.optimizer.step()
    return [each.norm() for each in gradients]


@habit("after the step", with_order=False)
def case_a_script_that_takes_gradients_after_the_step_and_drops_them(script):
    gradients = [each.grad for each in script.parameters]
    script.model.zero_grad()
    return [each.norm() for each in gradients]


@habit("in place of the step", with_order=False)
def case_a_script_that_keeps_gradients_until_the_next_step(script):
    seen = [each.norm() for each in vars(script).get("kept", [])]
    script.optimizer.step()
    script.kept = [each.grad for each in script.parameters]
    return seen


@habit("after the step")
def case_a_script_that_keeps_things_in_the_state(script):
    for each in script.parameters:
        state = script.optimizer.state[each]
        slow = state.setdefault("slow", each.detach().clone())
        with torch.no_grad():
            each.copy_(slow.lerp_(each, 0.7))


@habit("after the step", with_order=False)
def case_a_script_that_restarts_the_momentum(script):
    if script.number == 3:
        for state in script.optimizer.state.values():
            state["momentum_buffer"].zero_()


@habit("after the step")
def case_a_script_that_forgets_the_state(script):
    if script.number == 3:
        script.optimizer.state.clear()


@habit("after the step")
def case_a_script_that_forgets_the_state_and_looks_at_it(script):
    script.optimizer.state.clear()
    return [torch.tensor(float(len(script.optimizer.state))), script.parameters[0].grad.norm()]


@habit("after the step", with_order=False)
def case_a_script_that_empties_states_one_by_one(script):
    if script.number % 2:
        for each in script.parameters:
            script.optimizer.state[each] = {}


@habit("after the step")
def case_a_script_that_goes_back_to_a_checkpoint(script):
    if script.number == 2:
        script.saved = copy.deepcopy((script.model.state_dict(), script.optimizer.state_dict()))
    if script.number == 4:
        script.model.load_state_dict(script.saved[0])
        script.optimizer.load_state_dict(script.saved[1])


@habit("after the step")
def case_a_script_that_saves_on_one_rank(script):
    if hvd.rank() == 0:
        script.optimizer.state_dict()


@habit("after the step")
def case_a_script_that_decays_learning_rates_by_rank(script):
    script.optimizer.param_groups[0]["lr"] *= 0.9 - 0.1 * hvd.rank()


@habit("after the step")
def case_a_script_that_changes_weights_by_rank(script):
    with torch.no_grad():
        script.parameters[-1].mul_(1 - 0.01 * hvd.rank())


@habit("after the step")
def case_a_script_that_changes_weights_through_data(script):
    for each in script.parameters:
        each.data.clamp_(-0.5, 0.5)


@habit("after the step")
def case_a_script_that_gives_weights_other_memory(script):
    for each in script.parameters:
        each.data = each.data.clone()


@habit("in place of the step")
def case_a_script_that_clips(script):
    script.optimizer.synchronize()
    norm = torch.nn.utils.clip_grad_norm_(script.parameters, 0.1)
    with script.optimizer.skip_synchronize():
        script.optimizer.step()
    return [norm]


@habit("in place of the step")
def case_a_script_that_leaves_out_steps(script):
    script.optimizer.synchronize()
    if script.number != 3:
        with script.optimizer.skip_synchronize():
            script.optimizer.step()


@habit("in place of the step")
def case_a_script_that_steps_with_a_closure(script):
    script.optimizer.step(lambda: torch.zeros(()))


@habit("after the step")
def case_a_script_that_reduces_without_names(script):
    """The operations of ranks meet by their number."""
    return [hvd.allreduce(torch.full((2,), float(hvd.rank() + script.number)))]


@habit("before the step", script=Uneven)
def case_a_script_that_reduces_without_names_before_the_step(script):
    """Ranks have started different numbers of operations until then."""
    return [hvd.allreduce(torch.full((2,), float(hvd.rank() + script.number)))]


@habit("before the step", script=Contrastive)
def case_a_script_that_gathers_features_in_its_loss(script):
    return [script.loss.detach()]


@habit("before the step")
def case_a_script_that_evaluates_before_the_step(script):
    with torch.no_grad():
        return [script.loss]


@habit("after the step")
def case_a_script_that_empties_gradients_of_the_model(script):
    script.model.zero_grad(set_to_none=bool(script.number % 2))


@habit("before the step")
def case_a_script_that_looks_at_the_state_before_the_step(script):
    if script.number > 2:
        return [
            script.optimizer.state[each]["momentum_buffer"].norm() for each in script.parameters
        ]
    return []


class Whole(Model):
    """Of a layer factors are refused, of a table all rows are touched; then come two tables."""

    def __init__(self):
        super().__init__()
        self.small, self.last = nn.Embedding(4, 12), nn.Embedding(60, 12)

    def forward(self, rows):
        found = self.last(rows) + self.table(rows) + self.small(torch.arange(len(rows)) % 4)
        penalty = self.wide.weight.pow(2).mean()
        return self.narrow(torch.tanh(self.wide(found))) * self.scale + penalty


class Slow(Script):
    """While its last gradients are computed, and before its step, the first ones are reduced."""

    network = Whole

    def __init__(self, factory, chosen):
        super().__init__(factory, chosen)
        for table in (self.model.small, self.model.table, self.model.last):
            table.weight.register_hook(lambda _: time.sleep(0.02))


def case_gradients_that_change_by_no_script_travel_during_backward():
    """Also those that are reduced in their own memory, as rows and factors that do not pay are."""
    for label, chosen in PLANS.items():
        script = Slow(OURS, chosen)
        exchange = exchange_of(script.optimizer)
        reduced = dict.fromkeys(script.parameters, 0)

        def wait(script, exchange=exchange, reduced=reduced):
            time.sleep(0.02)
            for bucket in exchange.dispatcher.buckets:
                if bucket.started and bucket.sent_in_place:
                    for each in bucket.parameters:
                        reduced[each] += 1

        script.run(wait, "before the step")
        script.run(wait, "before the step")
        assert not exchange.dispatcher.hold, label
        if label == "factors":
            assert reduced[script.model.wide.weight]
        if label == "rows":
            assert reduced[script.model.small.weight]


def case_gradients_that_a_script_changes_are_held_back_by_the_plans_that_follow():
    def halve(script):
        if script.number == 3:
            for each in script.parameters:
                each.grad.data.mul_(0.5)

    for label in ("buckets", "sharded", "factors", "rows", "slices", "lossless", "mixed"):
        script = Script(OURS, PLANS[label])
        script.run(lambda _: None, "before the step")
        assert not exchange_of(script.optimizer).dispatcher.hold, label
        script.run(halve, "before the step")
        assert exchange_of(script.optimizer).dispatcher.hold, label
        switch(script.optimizer, SyncPlan(ExchangePlan(2), CLASSES))
        script.run(lambda _: None, "after the step")
        assert exchange_of(script.optimizer).dispatcher.hold, label


def case_gradients_that_are_views_of_one_buffer_are_not_changed_by_each_other():
    """Their version is that of the buffer."""

    def put_into_one_buffer(script):
        flat = torch.zeros(sum(each.numel() for each in script.parameters))
        parts = flat.split([each.numel() for each in script.parameters])
        for each, part in zip(script.parameters, parts, strict=True):
            each.grad = part.view_as(each)

    for label in ("buckets", "as Horovod"):  # as with the flag, and in live tuning
        script = Script(OURS, PLANS[label])
        put_into_one_buffer(script)
        script.optimizer.zero_grad = functools.partial(script.model.zero_grad, set_to_none=False)
        script.run(lambda _: None, "before the step")
        switch(script.optimizer, SyncPlan(PLANS["buckets"], CLASSES))
        script.run(lambda _: None, "before the step")
        assert all(each.grad._is_view() for each in script.parameters)
        assert not exchange_of(script.optimizer).dispatcher.hold, label
