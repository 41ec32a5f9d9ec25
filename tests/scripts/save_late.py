"""Trains a little; rank 0 saves when the other ranks have ended their scripts."""

import sys
import time

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(300, 300)
optimizer = hvd.DistributedOptimizer(
    torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters()
)
for step in range(5):
    generator = torch.Generator().manual_seed(10 * step + hvd.rank())
    optimizer.zero_grad()
    model(torch.randn(4, 300, generator=generator)).pow(2).mean().backward()
    optimizer.step()
if hvd.rank() == 0:
    time.sleep(2)
    torch.save([model.state_dict(), optimizer.state_dict()["state"]], sys.argv[1])
print(f"rank {hvd.rank()} of {type(optimizer).__name__} ends", flush=True)
