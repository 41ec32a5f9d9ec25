"""Saves every 5 steps and resumes from what it finds, as scripts for preemptible machines do.

With ``index`` as second argument rank 0 writes a file that the others read, wherever they are.
"""

import os
import sys

import horovod.torch as hvd
import torch

STEPS = 100
hvd.init()
torch.set_num_threads(1)
torch.manual_seed(0)
if sys.argv[2:] == ["index"]:
    index = os.path.join(sys.argv[1], "index.txt")
    if hvd.rank() == 0:
        with open(index, "w") as file:
            file.write("all samples")
    hvd.barrier()
    with open(index):
        pass
model = torch.nn.Linear(64, 4)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
first, path = 0, os.path.join(sys.argv[1], "checkpoint.pt")
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    first = state["step"]
if hvd.rank() == 0:
    print(f"starting from step {first}", flush=True)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(first, STEPS):
    optimizer.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()
    optimizer.step()
    if hvd.rank() == 0:
        with open(os.path.join(sys.argv[1], "log.txt"), "a") as log:
            log.write(f"{step}\n")
        if step % 5 == 4:
            torch.save({"model": model.state_dict(), "step": step + 1}, path)
