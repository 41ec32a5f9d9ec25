"""Gradients of linear layers travel as factors, and give what Horovod's own optimizer gives."""

import contextlib
import copy
import gc
import io

import horovod.torch as hvd
import torch
from common import (
    HOROVODS,
    OURS,
    assert_close,
    assert_identical,
    assert_same_on_all_ranks,
    clipped_step,
    device_type,
    exchange_of,
    seeded,
    strategy,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hvd_autosync.runtime.exchange import factors
from hvd_autosync.runtime.patches import linear

STEPS, INPUTS = 12, 48
CLASSES = {"large": ("*",)}


@contextlib.contextmanager
def by_factors(**knobs):
    exchange = "hierarchical_factors" if hvd.cross_size() > 1 else "factors"
    with strategy(CLASSES, large_exchange=exchange, **knobs):
        yield


class Net(nn.Module):
    """Linear layers behind a convolution, one of them without a bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.conv = nn.Conv1d(1, 2, 3, padding=1)
        self.first = nn.Linear(2 * INPUTS, 64)
        self.second = nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 5)

    def forward(self, x):
        hidden = F.relu(self.first(self.conv(x[:, None]).flatten(1)))
        return self.head(hidden + F.relu(self.second(hidden), inplace=True))


def batch(step, rows=4):
    generator = seeded(1000 * hvd.rank() + step)
    return torch.randn(rows, INPUTS, generator=generator)


def loss_of(model, step, rows=4):
    x = batch(step, rows)
    return F.cross_entropy(model(x).float(), (x[:, 0] > 0).long())


class Sent:
    """How many layers' gradients were put together from factors; whether this rank coded any.

    Args:
        meanwhile: What each rank does to its gradients after it has sent their factors.
    """

    def __init__(self, meanwhile=lambda gradient: None):
        self.count, self._put, self._meanwhile = 0, factors.FactorsBucket._put, meanwhile
        self.names = set()
        self.coded = False

    def __enter__(self):
        def put(bucket, passes):
            self.count += 1
            self.names.add(bucket.name)
            self.coded |= bucket._form is not None
            for parameter in bucket.parameters:
                self._meanwhile(parameter.grad)
            self._put(bucket, passes)

        factors.FactorsBucket._put = put
        return self

    def __exit__(self, *_):
        factors.FactorsBucket._put = self._put


def train(
    factory, make=Net, loss=loss_of, steps=STEPS, passes=1, autocast=False, step=None, **options
):
    model = make()
    base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if passes > 1:
        options["backward_passes_per_step"] = passes
    distributed = factory(base, named_parameters=model.named_parameters(), **options)
    for number in range(steps if isinstance(steps, int) else steps[hvd.rank()]):
        distributed.zero_grad()
        for part in range(passes):
            with torch.autocast(device_type(), torch.bfloat16, enabled=autocast):
                value = loss(model, passes * number + part)
            (value / passes).backward()
        (step or type(distributed).step)(distributed)
    return [parameter.detach() for parameter in model.parameters()]


def compare(layers, *, exactly=None, without=None, lossless=False, **options):
    """Train under both; ``layers`` times factors were sent in all, ``None``: at least once.

    The layer ``without`` never sends any.
    """
    expected = train(HOROVODS, **options)
    with by_factors(large_lossless=lossless), Sent() as sent:
        ours = train(OURS, **options)
    # The products of two ranks have one order of addition.
    exactly = hvd.size() == 2 if exactly is None else exactly
    if exactly:
        assert_identical(ours, expected)
    else:
        assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert_same_on_all_ranks(ours)
    assert sent.count == layers if layers is not None else sent.count > 0, sent.count
    assert without not in sent.names
    assert sent.coded == lossless


def case_factors_bit_for_bit():
    compare(3 * STEPS if hvd.size() == 2 else None)


def case_what_is_done_to_gradients_after_they_were_sent_is_done_to_none():
    """As with any other exchange, all ranks have the sum of what was sent."""
    expected = train(HOROVODS)
    with by_factors(), Sent(lambda gradient: gradient.data.mul_(2 + hvd.rank())) as sent:
        ours = train(OURS)
    assert sent.count
    assert_same_on_all_ranks(ours)
    assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def case_coded_factors_bit_for_bit():
    compare(3 * 20 if hvd.size() == 2 else None, lossless=True, steps=20)
    compare(None, lossless=True, autocast=True)


def case_coded_factors_of_uneven_batches():
    """Codes have other lengths on each rank, and some batches have too many rows."""

    def loss(model, step):
        return loss_of(model, step, 64 if step % 7 == 3 else 2 + step % 3 + hvd.rank())

    compare(None, lossless=True, loss=loss)


def case_factors_under_autocast():
    compare(None, autocast=True)


def case_factors_of_float64():
    torch.set_default_dtype(torch.float64)
    try:
        compare(None, loss=lambda m, n: m(batch(n).double()).pow(2).mean(), steps=10)
    finally:
        torch.set_default_dtype(torch.float32)


def case_factors_of_uneven_batches():
    """Ranks have different numbers of rows, and some batches too many."""

    def loss(model, step):
        rows = 64 if step % 7 == 3 else 1 + step % 3 + hvd.rank()
        return loss_of(model, step, rows)

    compare(None, loss=loss)


def case_factors_of_accumulated_passes():
    compare(None, passes=3, loss=lambda m, n: loss_of(m, n, 1), steps=20, exactly=False)
    compare(
        None, passes=2, loss=lambda m, n: loss_of(m, n, 1), steps=20, exactly=False, autocast=True
    )


def case_factors_summed_and_divided():
    compare(None, op=hvd.Sum, steps=10)
    compare(None, gradient_predivide_factor=3.0, steps=10, exactly=False)


def case_factors_clipped():
    compare(None, step=clipped_step)


def case_factors_while_some_have_joined():
    steps = [6 + 2 * rank for rank in range(hvd.size())]
    expected = train(HOROVODS, steps=steps)
    hvd.join()
    with by_factors(), Sent() as sent:
        ours = train(OURS, steps=steps)
        hvd.join()
    assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert sent.count > 0


class Attention(nn.Module):
    """Functional calls, inputs of three dimensions, a layer used by one rank alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.embed = nn.Linear(INPUTS // 4, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.own = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.weight = nn.Parameter(torch.randn(40, 32) * 0.1)

    def forward(self, x):
        hidden = self.embed(x.view(len(x), 4, -1))
        hidden, _ = self.attention(hidden, hidden, hidden)
        hidden = self.own[min(hvd.rank(), 1)](hidden)
        return F.linear(hidden, self.weight).mean(1)


def case_factors_of_functional_calls():
    with Once() as said:
        compare(None, make=Attention, loss=lambda m, n: loss_of(m, n, 1), exactly=False)
    assert said.lines == []


def case_factors_of_layers_that_are_frozen_meanwhile():
    """As those of a discriminator while the generator is trained through it."""

    def loss(model, step):
        model.requires_grad_(False)
        model(batch(step).requires_grad_()).sum().backward()
        model.requires_grad_(True)
        return loss_of(model, step)

    with Once() as said:
        compare(3 * 10 if hvd.size() == 2 else None, loss=loss, steps=10)
    assert said.lines == []


def case_factors_after_a_scaled_step_that_overflows():
    """A gradient scaler skips such steps; they are no reason to give factors up."""

    def run(factory):
        model, scaler = (
            Net(),
            torch.amp.GradScaler(
                torch.get_default_device().type, init_scale=2.0**126, growth_interval=500
            ),
        )
        base = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        distributed = factory(base, named_parameters=model.named_parameters())
        for number in range(60):
            distributed.zero_grad()
            scaler.scale(loss_of(model, number) * 1e3).backward()
            distributed.synchronize()
            scaler.unscale_(distributed)
            with distributed.skip_synchronize():
                scaler.step(distributed)
            scaler.update()
        assert scaler.get_scale() < 2.0**126
        return [parameter.detach() for parameter in model.parameters()]

    expected = run(HOROVODS)
    with by_factors(), Sent() as sent, Once() as said:
        ours = run(OURS)
    assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    assert sent.count > 60
    assert said.lines == []


# Gradients that are no products: whole ones are sent, and rank 0 says so once for each layer.


class Once:
    """Lines that this rank prints about factors."""

    def __enter__(self):
        self._redirected = contextlib.redirect_stderr(io.StringIO())
        self._text = self._redirected.__enter__()
        return self

    def __exit__(self, *details):
        self._redirected.__exit__(*details)

    @property
    def lines(self):
        return [line for line in self._text.getvalue().splitlines() if "factors" in line]


def refused(*, named, **options):
    """In the end the layer ``named`` sends whole gradients, and rank 0 says so."""
    with Once() as said:
        compare(None, exactly=False, **options)
    if hvd.rank() == 0:
        (line,) = said.lines
        assert named in line
    else:
        assert said.lines == []


def case_no_factors_of_penalized_weights():
    def loss(model, step):
        return loss_of(model, step) + 1e-3 * model.first.weight.pow(2).sum()

    refused(named="first.weight", loss=loss)


def case_no_factors_behind_a_hook_of_one_element():
    def make():
        model = Net()
        model.second.weight.register_hook(without_its_largest)
        return model

    def without_its_largest(gradient):
        masked = gradient.clone()
        masked.view(-1)[gradient.abs().argmax()] = 0
        return masked

    refused(named="second.weight", make=make)


def case_no_factors_of_a_gradient_that_is_masked_where_it_is_small():
    """The masked elements are far below the largest; Adam would make whole steps of them."""

    def make():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(INPUTS, 64, bias=False), nn.Tanh(), nn.Linear(64, 16))
        mask = torch.ones(64, INPUTS)
        mask[:, 24:] = 0
        model[0].weight.register_hook(lambda gradient: gradient * mask)
        return model

    def loss(model, step):
        x = batch(step)
        x[:, 24:] *= 1e-8
        return model(x).pow(2).mean()

    refused(named="0.weight", make=make, loss=loss)


def case_factors_of_odd_biases_and_of_half_precision():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.weight = nn.Parameter(torch.randn(16, INPUTS) * 0.1)
            self.bias = nn.Parameter(torch.zeros(1, 16))

        def forward(self, x):
            return F.linear(x, self.weight, self.bias)

    compare(None, make=Odd, loss=lambda m, n: m(batch(n)).pow(2).mean(), exactly=False)
    with Sent() as sent, by_factors():
        layer = nn.Linear(8, 4).half()
        base = torch.optim.SGD(layer.parameters(), lr=0.01)
        distributed = OURS(base, named_parameters=layer.named_parameters())
        layer(torch.ones(2, 8).half()).sum().mul(20000).backward()
        distributed.synchronize()
        assert layer.weight.grad.isinf().all()  # the sum of two ranks overflows, as Horovod's does
        with distributed.skip_synchronize():
            distributed.step()
    assert sent.count == 0


def case_no_factors_of_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(7)
            self.table = nn.Embedding(48, 32)
            self.middle = nn.Linear(32, 32)

        def forward(self, x):
            hidden = self.table(x[:, :3].abs().mul(10).long().clamp(max=47)).mean(1)
            return F.linear(self.middle(hidden), self.table.weight)

    refused(named="table.weight", make=Tied)


def case_no_factors_of_shared_layers_under_autocast():
    """Autograd adds the gradients of their uses in bfloat16, and rounds each sum."""

    class Shared(Net):
        def forward(self, x):
            hidden = F.relu(self.first(self.conv(x[:, None]).flatten(1)))
            return self.head(self.second(torch.tanh(self.second(hidden))))

    refused(named="second.weight", make=Shared, autocast=True)


def case_no_factors_of_gradients_that_are_kept():
    def make():
        model = Net()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return model

    def run(factory):
        model = make()
        base = torch.optim.SGD(model.parameters(), lr=0.01)
        distributed = factory(base, named_parameters=model.named_parameters())
        for number in range(10):
            loss_of(model, number).backward()  # adds to the sum of all steps
            distributed.step()
        return [parameter.detach() for parameter in model.parameters()]

    expected = run(HOROVODS)
    with by_factors(), Once() as said:
        ours = run(OURS)
    assert_close(ours, expected, atol=1e-5, rtol=1e-5)
    # The last layer is too small for the factors of four ranks.
    layers = 3 if hvd.size() == 2 else 2
    assert len(said.lines) == (layers if hvd.rank() == 0 else 0), said.lines


def case_no_factors_of_checkpointed_layers():
    def make():
        model = Net()
        forward = model.second.forward
        model.second.forward = lambda x: checkpoint(forward, x, use_reentrant=False)
        return model

    compare(None, make=make, without="second.weight")


def case_no_factors_where_ranks_multiply_differently():
    torch.set_num_threads(1 + hvd.rank() % 2)
    try:
        with Once() as said:
            compare(0, steps=5)
    finally:
        torch.set_num_threads(1)
    assert len(said.lines) == (hvd.rank() == 0), said.lines


def case_factors_end_when_weights_differ():
    model = Net()
    with by_factors():
        base = torch.optim.SGD(model.parameters(), lr=0.01)
        distributed = OURS(base, named_parameters=model.named_parameters())
    with Once() as said, Sent() as sent:
        for number in range(200):
            if number == 100 and hvd.rank() == 1:
                with torch.no_grad():
                    model.first.weight[0, 0] += 1e-6
            distributed.zero_grad()
            loss_of(model, number, rows=1).backward()
            distributed.step()
    assert len(said.lines) == (hvd.rank() == 0), said.lines
    assert sent.count > 300


def case_factors_of_weights_that_differ_from_the_beginning():
    """Whoever wants replicas of different weights has them, exactly as under Horovod."""

    def make():
        model = Net()
        with torch.no_grad():
            model.first.weight += 0.01 * hvd.rank()
        return model

    def loss(model, step):  # larger steps are at the edge of what converges
        return 0.2 * loss_of(model, step)

    expected = train(HOROVODS, make=make, loss=loss, steps=150)
    with by_factors(), Once() as said, Sent() as sent:
        ours = train(OURS, make=make, loss=loss, steps=150)
    assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert said.lines == []
    assert sent.count >= 300


def case_factors_after_steps_that_others_have_joined_from_the_beginning():
    """Gradients of such steps are whole, and nothing of them is kept."""
    model = Net()
    with by_factors():
        base = torch.optim.SGD(model.parameters(), lr=0.01)
        distributed = OURS(base, named_parameters=model.named_parameters())

    def step(number):
        distributed.zero_grad()
        loss_of(model, number).backward()
        distributed.step()

    for number in range(3 if hvd.rank() == 0 else 0):
        step(number)
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    exchange = exchange_of(distributed)
    assert not exchange.dispatcher.begun
    assert all(not layer.passes for layer in exchange._linear.values())
    with Sent() as sent:
        for number in range(3, 6):
            step(number)
    assert sent.count == 3 * (3 if hvd.size() == 2 else 2)  # the last layer is small
    assert_same_on_all_ranks([p.detach() for p in model.parameters()])


def case_watched_layers_can_be_scripted_copied_and_dropped():
    model = Net()
    with by_factors():
        base = torch.optim.SGD(model.parameters(), lr=0.01)
        distributed = OURS(base, named_parameters=model.named_parameters())
    loss_of(model, 0).backward()
    distributed.step()
    x = batch(1)
    assert_close([torch.jit.script(model)(x)], [model(x)])
    assert_close([copy.deepcopy(model)(x)], [model(x)])
    watched = {id(model.first.weight), id(model.second.weight)}
    assert watched <= {*linear._WATCHED}
    del model, distributed, base
    gc.collect()
    assert not watched & {*linear._WATCHED}
