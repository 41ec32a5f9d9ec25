"""A small Horovod training of a large table, of which a batch touches few rows."""

import argparse

import horovod.torch as hvd
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=30_000)
parser.add_argument("--steps", type=int, default=40)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(3)
model = torch.nn.ModuleDict(
    {"table": torch.nn.Embedding(args.rows, 16), "body": torch.nn.Linear(16, 4)}
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
generator = torch.Generator().manual_seed(hvd.rank())
for _ in range(args.steps):
    optimizer.zero_grad()
    chosen = torch.randint(args.rows, (64,), generator=generator)
    model["body"](model["table"](chosen)).pow(2).mean().backward()
    optimizer.step()
if hvd.rank() == 0:
    plan = getattr(getattr(optimizer, "_sync", None), "plan", None)
    total = sum(p.double().sum() for p in model.parameters())
    print(f"plan {plan}")
    print(f"trained to {total:.10f}", flush=True)
