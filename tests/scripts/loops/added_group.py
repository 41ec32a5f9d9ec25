"""Adds a layer to the model and to the optimizer in the midst of the training.

Horovod's optimizer does not reduce gradients of parameters that it was not created with. So the
script reduces them itself (``by hand``, the default), wraps a new optimizer (``again``), or leaves
them to each rank (``not at all``).
"""

import gc
import sys

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F


def wrap(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def with_layer(states, layer):
    """The states of an optimizer of ``layer`` too, which has none yet."""
    (group,) = states["param_groups"]
    count = len(group["params"])
    parameters = [*range(count + len([*layer.parameters()]))]
    return {**states, "param_groups": [{**group, "params": parameters}]}


def loss_of(model, tokens):
    hidden = model["embedding"](tokens).mean(1)
    if "added" in model:
        hidden = hidden + torch.tanh(model["added"](hidden))
    return F.cross_entropy(model["head"](hidden), tokens[:, 0] % 5)


def train(how="by hand", steps=40):
    torch.manual_seed(0)
    model = nn.ModuleDict({"embedding": nn.Embedding(100, 20), "head": nn.Linear(20, 5)})
    optimizer = wrap(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator(torch.get_default_device()).manual_seed(hvd.rank())
    added = None
    for step in range(steps):
        if step == steps // 2:
            torch.manual_seed(1)
            added = model["added"] = nn.Linear(20, 20)
            if how == "again":
                states = with_layer(optimizer.state_dict(), added)
                del optimizer
                gc.collect()  # Horovod's hooks refer to the old one, and graphs to the hooks
                optimizer = wrap(model)
                optimizer.load_state_dict(states)
            else:
                optimizer.add_param_group({"params": [*added.parameters()], "lr": 0.02})
        tokens = torch.randint(100, (5, 3), generator=generator)
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        if how == "by hand" and added is not None:
            for name, parameter in added.named_parameters():
                parameter.grad = hvd.allreduce(parameter.grad, name=f"added.{name}")
        optimizer.step()
    return dict(model.named_parameters())


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    train(*sys.argv[1:])
    if hvd.rank() == 0:
        print("the loop is complete")
