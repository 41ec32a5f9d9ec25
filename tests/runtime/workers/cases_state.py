"""State of our optimizer: saved, broadcast, copied, and its hooks."""

import copy
import io

import cloudpickle
import horovod.torch as hvd
import torch
from common import HOROVODS, OURS, assert_identical, batch, mlp, sgd, strategy, wrap
from torch import nn

BASES = {
    "sgd": lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr),
    "momentum": lambda model, lr: torch.optim.SGD(
        model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "adam": lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr),
    "adagrad": lambda model, lr: torch.optim.Adagrad(model.parameters(), lr=lr),
    "rmsprop": lambda model, lr: torch.optim.RMSprop(model.parameters(), lr=lr, centered=True),
}


def _step(model, distributed, step=0):
    distributed.zero_grad()
    model(batch(step)).pow(2).mean().backward()
    distributed.step()


def _state(distributed):
    state = distributed.state_dict()["state"]
    return [torch.as_tensor(v) for entry in state.values() for v in entry.values() if v is not None]


def case_state_dict_round_trip():
    for make in BASES.values():
        model = mlp()
        distributed = wrap(OURS, model, make(model, 0.1))
        _step(model, distributed)
        file = io.BytesIO()
        torch.save(distributed.state_dict(), file)
        file.seek(0)
        again = mlp()
        restored = wrap(OURS, again, make(again, 0.5))
        restored.load_state_dict(torch.load(file))
        assert restored.param_groups[0]["lr"] == 0.1
        assert_identical(_state(restored), _state(distributed))
        _step(again, restored, 1)


def case_load_state_dict_after_backward():
    model = mlp()
    distributed = wrap(OURS, model)
    saved = copy.deepcopy(distributed.state_dict())
    model(batch(0)).pow(2).mean().backward()
    distributed.synchronize()
    distributed.load_state_dict(saved)
    _step(model, distributed)


def case_broadcast_optimizer_state():
    for name, make in BASES.items():
        model = mlp()
        distributed = wrap(OURS, model, make(model, 0.1 if hvd.rank() == 0 else 0.7))
        if hvd.rank() == 0:
            # Only rank 0 has a state, as after it alone has loaded a checkpoint.
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            super(type(distributed), distributed).step()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(distributed, root_rank=0)
        if _state(distributed):  # Horovod broadcasts nothing of an optimizer without state
            assert distributed.param_groups[0]["lr"] == 0.1, name
        for index, tensor in enumerate(_state(distributed)):
            assert torch.equal(tensor, hvd.broadcast(tensor, 0, name=f"{name}.{index}")), name
        _step(model, distributed)


def case_broadcast_state_with_frozen_parameters():
    model = mlp()
    model[0].weight.requires_grad_(False)
    distributed = wrap(OURS, model)
    hvd.broadcast_optimizer_state(distributed, root_rank=0, model=model)
    assert model[0].weight.grad is None
    _step(model, distributed)


def case_broadcast_state_is_no_step():
    from hvd_autosync.runtime import current

    before = len(current.run.recorder.step_s)
    model = mlp()
    hvd.broadcast_optimizer_state(wrap(OURS, model), root_rank=0)
    assert len(current.run.recorder.step_s) == before


def case_several_parameter_groups():
    def run(factory):
        model = mlp()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() == 2], "lr": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.01},
        ]
        distributed = wrap(factory, model, torch.optim.SGD(groups, lr=1.0))
        _step(model, distributed)
        return [parameter.detach() for parameter in model.parameters()]

    with strategy(buckets=2):
        ours = run(OURS)
    assert_identical(ours, run(HOROVODS))


def case_closure():
    for factory in (HOROVODS, OURS):
        model = nn.Linear(12, 1)
        distributed = wrap(factory, model)
        model(batch(0)).sum().backward()
        assert distributed.step(lambda: 42) == 42
        model(batch(0)).sum().backward()
        assert distributed.step(closure=lambda: 43) == 43


def case_step_hooks():
    def run(factory):
        model, calls = mlp(), []
        distributed = wrap(factory, model)
        distributed.register_step_pre_hook(lambda *_: calls.append("before"))
        distributed.register_step_post_hook(lambda *_: calls.append("after"))
        _step(model, distributed)
        return calls

    assert run(OURS) == run(HOROVODS)


def case_class():
    model = mlp()
    base = sgd(model)
    ours, theirs = wrap(OURS, model, base), wrap(HOROVODS, model, base)
    assert isinstance(ours, torch.optim.SGD)
    assert type(ours).__name__ == type(theirs).__name__ == "SGD"
    assert type(ours).__module__ == type(theirs).__module__
    assert repr(ours) == repr(theirs)


def case_deep_copy():
    for factory in (HOROVODS, OURS):
        model = mlp()
        distributed = wrap(factory, model)
        _step(model, distributed)
        assert_identical(_state(copy.deepcopy(distributed)), _state(distributed))


def case_cloudpickle():
    for factory in (HOROVODS, OURS):
        model = mlp()
        distributed = wrap(factory, model)
        _step(model, distributed)
        restored = cloudpickle.loads(cloudpickle.dumps(distributed))
        assert_identical(_state(restored), _state(distributed))
