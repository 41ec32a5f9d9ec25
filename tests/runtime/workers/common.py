"""What the case files share: two optimizers to compare, small models, a strategy for a while."""

import contextlib
import itertools
import unittest

import horovod.torch as hvd
import torch
from torch import nn

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.operations import copies_to_host
from hvd_autosync.runtime.exchange.gradient_exchange import GradientExchange
from hvd_autosync.runtime.guard.guard import Guard
from hvd_autosync.runtime.optimizer import optimizer
from hvd_autosync.runtime.sync.local_steps import LocalSteps
from hvd_autosync.runtime.sync.phases import ProtocolPhases
from hvd_autosync.search_space.sync_plan import sync_plan

OURS = hvd.DistributedOptimizer
HOROVODS = optimizer._horovods_own
HOROVODS_BROADCAST = optimizer._horovods_broadcast
RUN = current.run


@contextlib.contextmanager
def strategy(classes=None, **values):
    """Optimizers that are created meanwhile are under this strategy."""
    with synchronized_by(sync_plan(values, classes)):
        yield


@contextlib.contextmanager
def synchronized_by(plan):
    """Optimizers that are created meanwhile have this plan."""
    before, current.sync_plan = current.sync_plan, plan
    try:
        yield
    finally:
        current.sync_plan = before


def exchange_of(optimizer) -> GradientExchange:
    """What exchanges the gradients of a strategy optimizer."""
    return _method_of(optimizer, GradientExchange)


def rounds_of(optimizer) -> LocalSteps:
    """The local steps of a strategy optimizer."""
    return _method_of(optimizer, LocalSteps)


def phases_of(optimizer) -> ProtocolPhases:
    """The phases of a strategy optimizer."""
    return _method_of(optimizer, ProtocolPhases)


def guard_of(optimizer) -> Guard | None:
    """The loss guard of a strategy optimizer."""
    return optimizer._sync.guard.guard


def _method_of(optimizer, kind):
    method = optimizer._sync.method
    while not isinstance(method, kind):
        method = method.inner
    return method


def mlp(dtype=torch.float32, sizes=(12, 20, 8, 3)) -> nn.Module:
    """The same small network on every rank and at every call."""
    torch.manual_seed(7)
    layers = [nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))


def device_type() -> str:
    """Of the device on which the cases compute."""
    return torch.get_default_device().type


def skip_unless_steps_wait() -> None:
    """No step is deferred where Horovod copies gradients of a GPU, which has its own case."""
    if copies_to_host(torch.empty(0)):
        raise unittest.SkipTest("this Horovod reduces a GPU's gradients on the host")


def seeded(seed: int) -> torch.Generator:
    """Random numbers of a seed, on the device of the cases."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


def batch(step: int, dtype=torch.float32, rows=6, columns=12) -> torch.Tensor:
    """This rank's data of one step."""
    generator = seeded(1000 * hvd.rank() + step)
    return torch.randn(rows, columns, generator=generator, dtype=dtype)


def sgd(model, **options) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def wrap(factory, model, base=None, **options) -> torch.optim.Optimizer:
    """``base`` (SGD when ``None``) wrapped by ``factory`` with the model's names."""
    options.setdefault("named_parameters", model.named_parameters())
    return factory(sgd(model) if base is None else base, **options)


def train(factory, steps=5, dtype=torch.float32, base=sgd, **options) -> list[torch.Tensor]:
    """The parameters of a small network after some steps under an optimizer of ``factory``."""
    model = mlp(dtype)
    distributed = wrap(factory, model, base(model), **options)
    for step in range(steps):
        distributed.zero_grad()
        model(batch(step, dtype)).pow(2).mean().backward()
        distributed.step()
    return [parameter.detach() for parameter in model.parameters()]


def clipped_step(distributed) -> None:
    """A step that clips the reduced gradients."""
    distributed.synchronize()
    parameters = [p for group in distributed.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, 0.05)
    with distributed.skip_synchronize():
        distributed.step()


def assert_identical(left, right) -> None:
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


def assert_close(left, right, **tolerances) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, **tolerances)


def assert_same_on_all_ranks(tensors) -> None:
    for index, tensor in enumerate(tensors):
        first = hvd.broadcast(tensor, root_rank=0, name=f"first.{index}")
        assert torch.equal(tensor, first)


@contextlib.contextmanager
def raises(error, text=""):
    """The block raises ``error`` with ``text`` in its message."""
    try:
        yield
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(f"{error.__name__} was not raised")
