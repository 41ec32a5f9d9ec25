"""A training for the tests of a run's end: endless without --steps.

Prints ``pids ...`` of itself and of the processes it started, each with the time of its start,
``planned ...`` of its optimizer, and ``done`` when it reaches its own end.
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10**9)
parser.add_argument("--manual", action="store_true", help="reduce by hand and mark steps")
parser.add_argument("--loader", action="store_true", help="load data in forked processes")
parser.add_argument("--fork", action="store_true", help="fork a child that steps too")
parser.add_argument("--close-stderr", action="store_true")
parser.add_argument("--mpi4py", action="store_true", help="initialize MPI before Horovod")
parser.add_argument("--endpoint", action="store_true", help="have an endpoint open at the end")
parser.add_argument("--uneven", action="store_true", help="epochs of 3 and 5 steps, then join")
parser.add_argument("--fail", action="store_true", help="end with an exception")
parser.add_argument("--step-s", type=float, default=0.0, help="extra seconds per step")
args = parser.parse_args()

if args.mpi4py:
    from mpi4py import MPI  # noqa: F401
import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402

from hvd_autosync.runtime import mark_step  # noqa: E402


def with_start(pid):
    """Another process may have the same number later."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return f"{pid}:{stat.rpartition(')')[2].split()[19]}"


def batches():
    data = torch.utils.data.TensorDataset(torch.randn(64, 16))
    workers = 2 if args.loader else 0
    loader = torch.utils.data.DataLoader(
        data, 16, num_workers=workers, persistent_workers=args.loader
    )
    iterator = iter(loader)
    if args.loader:
        pids = [os.getpid(), *(worker.pid for worker in iterator._workers)]
        print("pids", *map(with_start, pids), flush=True)
    while True:
        for (batch,) in iterator:
            yield batch
        iterator = iter(loader)


def step_by_hand(model, optimizer):
    for name, parameter in model.named_parameters():
        hvd.allreduce_(parameter.grad, name=name)
    optimizer.step()
    mark_step()


def fork_a_child(optimizer):
    """The child steps the optimizer, which is no step of this run."""
    pid = os.fork()
    if pid == 0:
        optimizer.step()
        mark_step()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


hvd.init()
torch.manual_seed(hvd.rank())
if args.close_stderr:
    sys.stderr.flush()
    os.close(2)
if args.endpoint:
    from hvd_autosync.runtime.collectives.messaging import open_endpoint

    endpoint = open_endpoint("train", lambda *message: None)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if not args.manual:
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    print("planned", hasattr(optimizer, "_sync"), flush=True)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step, batch in enumerate(batches()):
    if step == args.steps:
        break
    if args.uneven and step > 0 and step % (3 + 2 * hvd.rank()) == 0:
        hvd.join()
    optimizer.zero_grad()
    model(batch).pow(2).mean().backward()
    time.sleep(args.step_s)
    if args.manual:
        step_by_hand(model, optimizer)
    else:
        optimizer.step()
    if step == 0 and args.fork:
        fork_a_child(optimizer)
if args.fail:
    raise RuntimeError("the script failed")
print("done, threads:", *(thread.name for thread in threading.enumerate()), flush=True)
