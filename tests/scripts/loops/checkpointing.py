"""Trains with gradient checkpointing: ``checkpointing.py [reentrant]``."""

import sys

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    """Residual blocks whose activations are computed again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.embedding = nn.Embedding(150, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 24))
            for _ in range(3)
        )
        self.head = nn.Linear(24, 6)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant)
        return self.head(hidden)


def train(reentrant=False, steps=40):
    torch.manual_seed(0)
    model = Blocks(reentrant)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator(torch.get_default_device()).manual_seed(hvd.rank())
    for _ in range(steps):
        tokens = torch.randint(150, (2, 5), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() % 6).backward()
        optimizer.step()
    return dict(model.named_parameters())


if __name__ == "__main__":
    hvd.init()
    torch.set_num_threads(1)
    train(sys.argv[1:] == ["reentrant"])
    if hvd.rank() == 0:
        print("the loop is complete")
