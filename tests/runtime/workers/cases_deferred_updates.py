"""Deferred updates: a parameter is updated before anything reads it in the next forward."""

import copy
import gc
import io
import time
import weakref

import horovod.torch as hvd
import torch
from cases_exchanges import plan
from common import (
    HOROVODS,
    OURS,
    assert_close,
    batch,
    exchange_of,
    mlp,
    raises,
    skip_unless_steps_wait,
    wrap,
)
from torch import nn

from hvd_autosync.errors import AutosyncError, ConfigurationError
from hvd_autosync.runtime.collectives.operations import collectives
from hvd_autosync.search_space.exchange_plan import ExchangePlan

LATE = ExchangePlan(order="priority")
IN_BUCKETS = ExchangePlan(buckets=3, order="priority")


def make(factory=OURS, chosen=LATE, model=None, **options):
    model = model or mlp()
    with plan(chosen, {}):
        return model, wrap(factory, model, **options)


def step(model, distributed, number):
    distributed.zero_grad()
    model(batch(number)).pow(2).mean().backward()
    distributed.step()


def steps(model, distributed, count=5):
    for number in range(count):
        step(model, distributed, number)


def expected(count=5):
    model, distributed = make(HOROVODS)
    steps(model, distributed, count)
    return [parameter.detach() for parameter in model.parameters()]


def unseen(parameters):
    """What is in their memory, though their steps may wait."""
    with torch._C.DisableTorchFunctionSubclass():
        return [parameter.detach() for parameter in parameters]


def waits(distributed):
    return len(exchange_of(distributed)._deferred_update._waiting)


def case_steps_wait_until_forward():
    skip_unless_steps_wait()
    for chosen in (LATE, IN_BUCKETS):
        model, distributed = make(chosen=chosen)
        held = list(model.parameters())
        steps(model, distributed)
        assert waits(distributed) == len(held)
        before = [parameter.clone() for parameter in unseen(held)]
        model[4](torch.zeros(1, 8))  # one layer's forward
        now = unseen(held)
        changed = [not torch.equal(new, old) for new, old in zip(now, before, strict=True)]
        assert any(changed) and not all(changed), changed
        assert waits(distributed) == changed.count(False)
        assert_close(list(model.parameters()), expected())
        assert waits(distributed) == 0


def case_no_step_waits_where_horovod_copies_gradients():
    """As on a GPU without NCCL, where a copy looks like a change of the script's."""
    own = collectives()
    own.copies_to_host = lambda tensor: True
    try:
        model, distributed = make(chosen=IN_BUCKETS)
        steps(model, distributed)
        assert waits(distributed) == 0
        assert_close(list(model.parameters()), expected())
    finally:
        del own.copies_to_host


def case_every_way_to_a_parameter():
    skip_unless_steps_wait()
    ways = {
        "attribute": lambda m: [m[i].__getattr__(n) for i in (0, 2, 4) for n in ("weight", "bias")],
        "parameters": lambda m: list(m.parameters()),
        "state_dict": lambda m: list(m.state_dict().values()),
        "deepcopy": lambda m: list(copy.deepcopy(m).parameters()),
        "pickle": lambda m: list(pickled(m).parameters()),
        "get_parameter": lambda m: [m.get_parameter(n) for n, _ in mlp().named_parameters()],
        "replica": lambda m: list(copy.copy(m).parameters()),
        "functional": lambda m: list(dict(m.named_parameters()).values()),
    }
    for name, way in ways.items():
        model, distributed = make()
        steps(model, distributed)
        assert waits(distributed)
        try:
            assert_close([p.detach() for p in way(model)], expected())
        except AssertionError as error:
            raise AssertionError(name) from error


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def case_a_schedule_that_moves_on_before_the_step_is_taken():
    results = []
    for factory in (OURS, HOROVODS):
        model, distributed = make(factory)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(distributed, 0.5)
        for number in range(6):
            step(model, distributed, number)
            scheduler.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert_close(*results)


def case_a_learning_rate_that_is_a_tensor():
    results = []
    for factory in (OURS, HOROVODS):
        model = mlp()
        base = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.05))
        model, distributed = make(factory, model=model, base=base)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(distributed, 0.5)
        for number in range(6):
            step(model, distributed, number)
            scheduler.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert_close(*results)


def case_two_optimizers_of_one_module():
    results = []
    for factory in (OURS, HOROVODS):
        model = mlp()
        parts = {"weights": [], "biases": []}
        for name, parameter in model.named_parameters():
            parts["weights" if parameter.dim() > 1 else "biases"].append((name, parameter))
        with plan(LATE, {}):
            optimizers = [
                factory(torch.optim.SGD([p for _, p in named], lr=0.05), named)
                for named in parts.values()
            ]
        for number in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(batch(number)).pow(2).mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        results.append([parameter.detach() for parameter in model.parameters()])
    assert_close(*results)


def case_two_networks_in_turn_with_parameters_of_equal_names():
    """An update of the first may wait while gradients of the second are sent."""
    results = []
    for factory in (OURS, HOROVODS):
        models = [mlp(), mlp()]
        with plan(LATE, {}):
            optimizers = [
                factory(torch.optim.SGD(m.parameters(), lr=0.05), m.named_parameters())
                for m in models
            ]
        for number in range(8):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(batch(number)).pow(2).mean().backward()
                if hvd.rank() == 1 and number > 4:
                    time.sleep(0.02)  # so that the other rank's exchange is still under way
                optimizer.step()
        results.append([p.detach() for model in models for p in model.parameters()])
    assert_close(*results)


def case_groups_and_states_that_are_dropped_before_the_step_is_taken():
    """The steps that wait are those of before; later ones are without what was dropped."""
    skip_unless_steps_wait()

    def drop_group(optimizer):
        del optimizer.param_groups[0]

    def drop_states(optimizer):
        optimizer.state.clear()

    def drop_buffers(optimizer):
        for state in optimizer.state.values():
            state.pop("momentum_buffer", None)

    for drop in (drop_group, drop_states, drop_buffers):
        results = []
        for factory in (OURS, HOROVODS):
            model = mlp()
            groups = [
                {"params": layer.parameters(), "lr": 0.1 + place / 10}
                for place, layer in enumerate((model[0], model[2], model[4]))
            ]
            base = torch.optim.SGD(groups, momentum=0.9)
            model, distributed = make(factory, model=model, base=base)
            for number in range(8):
                step(model, distributed, number)
                if number == 5 or (number == 6 and drop is drop_states):
                    assert factory is HOROVODS or waits(distributed)
                    drop(distributed)
            results.append([parameter.detach() for parameter in model.parameters()])
        try:
            assert_close(*results)
        except AssertionError as error:
            raise AssertionError(drop.__name__) from error


def case_an_optimizer_without_states_gets_none():
    skip_unless_steps_wait()
    model = mlp()
    model, distributed = make(model=model, base=torch.optim.SGD(model.parameters(), lr=0.1))
    steps(model, distributed)
    assert waits(distributed)
    assert distributed.state_dict()["state"] == {} and not distributed.state


def case_parameters_that_are_added_while_steps_wait():
    results = []
    for factory in (OURS, HOROVODS):
        model, distributed = make(factory)
        steps(model, distributed, 4)
        extra = nn.Parameter(torch.zeros(2))
        distributed.add_param_group({"params": [extra]})
        results.append([parameter.detach() for parameter in model.parameters()])
    assert_close(*results)


def case_a_dropped_optimizer_makes_room_for_another():
    """Steps of the first wait when it is dropped; they are made, and its hooks act no more."""
    skip_unless_steps_wait()
    results = []
    for factory in (OURS, HOROVODS):
        model, distributed = make(factory)
        steps(model, distributed, 6)
        assert factory is HOROVODS or waits(distributed)
        dropped = weakref.ref(distributed)
        del distributed
        gc.collect()
        _, distributed = make(factory, model=model)
        assert dropped() is None
        steps(model, distributed, 6)
        results.append([parameter.detach() for parameter in model.parameters()])
    assert_close(*results)


def case_the_state_is_up_to_date_when_it_is_saved():
    skip_unless_steps_wait()
    _, reference = (pair := make(HOROVODS))
    model, distributed = make()
    steps(*pair)
    steps(model, distributed)
    assert waits(distributed)
    saved, theirs = distributed.state_dict(), reference.state_dict()
    for place, state in theirs["state"].items():
        assert_close([saved["state"][place]["momentum_buffer"]], [state["momentum_buffer"]])


def case_one_rank_evaluates_alone():
    """What a rank waits for needs nothing of the others that they have not done."""
    model, distributed = make()
    for number in range(5):
        step(model, distributed, number)
        if hvd.rank() == 0:
            model(batch(0))
        hvd.allreduce(torch.ones(1), name="metric")
    assert_close(list(model.parameters()), expected())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.lstm, self.attention = nn.LSTM(12, 8), nn.MultiheadAttention(8, 2)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)

    def forward(self, x):
        hidden, _ = self.lstm(x[:, None])
        return self.layer(self.attention(hidden, hidden, hidden)[0])


def case_modules_that_reach_for_parameters_in_their_own_ways():
    results = []
    for factory in (OURS, HOROVODS):
        model, distributed = make(factory, model=Recurrent())
        steps(model, distributed, 6)
        results.append([parameter.detach() for parameter in model.parameters()])
        assert factory is HOROVODS or waits(distributed) == 0
    assert_close(*results, atol=2e-5, rtol=2e-5)


def case_parameters_without_modules_never_wait():
    results = []
    for factory in (OURS, HOROVODS):
        free = [nn.Parameter(torch.ones(3) * place) for place in range(1, 4)]
        named = [(f"p{place}", parameter) for place, parameter in enumerate(free)]
        with plan(LATE, {}):
            distributed = factory(torch.optim.SGD(free, lr=0.1), named)
        for _ in range(5):
            distributed.zero_grad()
            sum(((1 + hvd.rank()) * parameter).pow(2).sum() for parameter in free).backward()
            distributed.step()
        results.append([parameter.detach() for parameter in free])
    assert_close(*results)


def case_a_gradient_that_is_changed_after_the_step_is_noticed():
    skip_unless_steps_wait()
    model, distributed = make()
    steps(model, distributed)
    gradient, _ = next(iter(exchange_of(distributed)._deferred_update._own_steps.values()))._used[0]
    gradient.zero_()
    with raises(AutosyncError, "changed in place"):
        try:
            list(model.parameters())
        except ConfigurationError as error:  # live tuning would take the plan for one that
            raise AssertionError from error  # does not fit, and go on without the update
    model, distributed = make()
    for number in range(6):  # who does so from the start is seen to do it
        step(model, distributed, number)
        for parameter in model.parameters():
            parameter.grad.zero_()
    assert waits(distributed) == 0
    assert_close(list(model.parameters()), expected(6))


def case_a_state_that_is_changed_after_the_step_is_noticed():
    skip_unless_steps_wait()
    model, distributed = make()
    steps(model, distributed)
    next(iter(distributed.state.values()))["momentum_buffer"].zero_()
    with raises(AutosyncError, "changed in place"):
        list(model.parameters())


def case_first_layers_are_sent_first():
    """Of what is left when backward ends, what arrived last goes first."""
    model, distributed = make()
    steps(model, distributed, 3)
    list(model.parameters())
    begun = []
    for bucket in exchange_of(distributed).dispatcher.buckets:

        def start(bucket=bucket, original=bucket.start):
            begun.append(exchange_of(distributed).dispatcher._place[bucket])
            return original()

        bucket.start = start
    exchange_of(distributed).dispatcher._room = lambda: False
    step(model, distributed, 3)
    assert begun == sorted(begun, reverse=True) and len(begun) == 6
    list(model.parameters())
