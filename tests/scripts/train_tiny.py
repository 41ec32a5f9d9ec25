"""A small Horovod training, independent of hvd_autosync, with options that make it fail."""

import argparse
import math
import os
import signal
import subprocess
import sys
import time

import horovod.torch as hvd
import torch


def misbehave(kind: str, step: int, rank: int) -> None:
    """Do what the test asked for, at its step and on its rank."""
    if kind == "crash":
        raise RuntimeError(f"deliberate crash at step {step}")
    if kind == "exit":
        os._exit(7)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        time.sleep(3600)
    if kind == "print":
        for _ in range(2000):
            sys.stdout.write("x" * 9999 + "\n")
    if kind == "flood":
        line = "x" * (1 << 20)  # first without an end of line, then with
        for number in range(128):
            sys.stdout.write(line if number < 64 else line + "\n")
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if kind == "children":
        for _ in range(3):
            subprocess.Popen(["sleep", "3600"], start_new_session=True)
    if kind == "memory":
        # As under a kernel that kills who takes too much: address space is not resident memory.
        hoard = []
        while sum(map(len, hoard)) < 400 << 20:
            hoard.append(bytearray(os.urandom(1 << 20)))
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "disk":
        with open(os.environ["FULL_DISK"] + "/data", "wb") as file:
            while True:
                file.write(bytes(1 << 20))


parser = argparse.ArgumentParser(fromfile_prefix_chars="@")  # @FILE: an argument in each line
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--fault", default="")
parser.add_argument("--at", type=int, default=-1)
parser.add_argument("--rank", type=int, default=-1)
parser.add_argument("--under", default="", help="NAME=VALUE of a variable; else no fault")
parser.add_argument("--under-any", default="", help="no fault unless this variable is set")
parser.add_argument("--print-random", action="store_true")
parser.add_argument("--nan-at", type=int, default=-1, help="a loss that is no number")
parser.add_argument("--status", type=int, default=0)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--password", default="", help="is not needed")
parser.add_argument("--by-hand", action="store_true")
args = parser.parse_args()
if args.under:
    name, _, value = args.under.partition("=")
    if os.environ.get(name) != value:
        args.fault = ""
if args.under_any and args.under_any not in os.environ:
    args.fault = ""
if args.print_random:
    import random

    import numpy

    print("random", random.random(), numpy.random.random(), torch.initial_seed(), flush=True)

# Under either controller, so that it does the same under both.
RANKS = [f"{launcher}_RANK" for launcher in ("HOROVOD", "OMPI_COMM_WORLD")]
own_rank = next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)
if args.fault and args.at < 0 and own_rank in (args.rank, 0):
    misbehave(args.fault, args.at, 0)
hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.Linear(128, 4)
)
optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if not args.by_hand:
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
data = torch.utils.data.TensorDataset(torch.randn(100_000, 64))
loader = torch.utils.data.DataLoader(data, batch_size=32, num_workers=args.workers)
for step, (batch,) in enumerate(loader):
    if step == args.steps:
        break
    if args.fault and step == args.at and args.rank in (-1, hvd.rank()):
        misbehave(args.fault, step, hvd.rank())
    optimizer.zero_grad()
    loss = model(batch).square().mean() * (math.nan if args.nan_at == step else 1.0)
    loss.backward()
    optimizer.step()
if hvd.rank() == 0:
    print(f"trained {min(args.steps, len(loader))} steps")
sys.exit(args.status)
