"""Trains the head alone for a while, then all layers, then freezes the first.

``at first`` wraps the optimizer while all layers can be trained; ``again`` wraps a new one whenever
that changes; ``too late`` wraps one while the body is frozen: Horovod never reduces its gradients.
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


def loss_of(model, tokens):
    hidden = model["body"](model["embedding"](tokens).mean(1))
    return F.cross_entropy(model["head"](hidden), tokens[:, 0] % 5)


def train(how="at first", steps=42):
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(80, 20),
            "body": nn.Sequential(nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20)),
            "head": nn.Linear(20, 5),
        }
    )
    optimizer = wrap(model) if how == "at first" else None
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator(torch.get_default_device()).manual_seed(hvd.rank())
    for step in range(steps):
        third = 3 * step // steps
        if 3 * step % steps < 3:
            model["body"].requires_grad_(third > 0)
            model["embedding"].requires_grad_(third == 1)
            if optimizer is None or how == "again":
                del optimizer
                gc.collect()  # Horovod's hooks refer to the old one, and graphs to the hooks
                optimizer = wrap(model)
        tokens = torch.randint(80, (5, 3), generator=generator)
        optimizer.zero_grad()
        loss_of(model, tokens).backward()
        optimizer.step()
    return dict(model.named_parameters())


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    train(*sys.argv[1:])
    if hvd.rank() == 0:
        print("the loop is complete")
