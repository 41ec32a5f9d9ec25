"""Trains a model that torch.compile has compiled: ``compiled.py [BACKEND [STEPS]]``."""

import sys

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F


class Tagger(nn.Module):
    """Class of each token from its embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(200, 16)
        self.body = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.LayerNorm(48))
        self.head = nn.Linear(48, 5)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens)))


def train(backend="aot_eager", steps=40):
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    compiled = torch.compile(model, backend=backend)
    generator = torch.Generator(torch.get_default_device()).manual_seed(hvd.rank())
    for _ in range(steps):
        tokens = torch.randint(200, (4, 6), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten() % 5)
        loss.backward()
        optimizer.step()
    return dict(model.named_parameters())


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    train(*sys.argv[1:2], *map(int, sys.argv[2:]))
    if hvd.rank() == 0:
        print("the loop is complete")
