"""Trains in passes, saves after each on rank 0, and goes on from there; knows nothing of us.

train_passes.py CHECKPOINT [--die-at STEP] [--die-rank RANK] [--fault-at STEP]
"""

import argparse
import os
import signal

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

PASSES, BATCHES = 6, 22
parser = argparse.ArgumentParser()
parser.add_argument("checkpoint")
parser.add_argument("--die-at", type=int, default=-1)
parser.add_argument("--die-rank", type=int, default=-1, help="only this one")
parser.add_argument("--fault-at", type=int, default=-1)
args = parser.parse_args()
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
data = TensorDataset(torch.randn(BATCHES * 8, 16), torch.randn(BATCHES * 8, 1))
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, PASSES * BATCHES)
begin = 0
if os.path.exists(args.checkpoint) and hvd.rank() == 0:
    saved = torch.load(args.checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begin = saved["passes"]
begin = int(hvd.broadcast(torch.tensor(begin), root_rank=0, name="begin"))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for _ in range(begin * BATCHES):
    scheduler.step()
step = begin * BATCHES
for number in range(begin, PASSES):
    for inputs, targets in DataLoader(data, batch_size=8):
        step += 1
        if step == args.die_at and args.die_rank in (-1, hvd.rank()):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        if step == args.fault_at:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        model.eval()
        loss = (model(data.tensors[0]) - data.tensors[1]).square().mean()
        model.train()
    state = torch.cat([value.double().flatten() for value in model.state_dict().values()])
    spread = hvd.allreduce(state, op=hvd.Max, name="max") - hvd.allreduce(
        state, op=hvd.Min, name="min"
    )
    loss = hvd.allreduce(loss, name="loss")
    if hvd.rank() == 0:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**saved, "passes": number + 1}, args.checkpoint)
        print(f"pass {number + 1} loss {loss:.6f} apart {spread.max():g}", flush=True)
