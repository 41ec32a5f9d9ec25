"""A tiny training that fails unless its rank has the variables and threads that it is told of."""

import argparse
import json
import os

import horovod.torch as hvd
import torch

parser = argparse.ArgumentParser(fromfile_prefix_chars="@")  # @FILE: an argument in each line
parser.add_argument("--variables", type=json.loads, default={}, help="name -> value or null")
parser.add_argument("--threads", type=int, default=0, help="of torch; 0: any number")
parser.add_argument("--set-threads", type=int, default=0)
arguments = parser.parse_args()

if arguments.set_threads:
    torch.set_num_threads(arguments.set_threads)
hvd.init()
seen = {name: os.environ.get(name) for name in arguments.variables}
assert seen == arguments.variables, f"rank {hvd.rank()} has {seen}"
assert arguments.threads in (0, torch.get_num_threads()), f"{torch.get_num_threads()} threads"
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
)
for _ in range(40):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
