"""A training of a stated number of steps, for tests of live tuning.

It writes a checkpoint every ten steps, and in the end its parameters.
"""

import argparse
import itertools
import os
import signal
import sys
import time
from pathlib import Path

os.chdir(os.sep)  # the job is still that of the folder in which it was started

import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=0, help="0: some more than it takes to be tuned")
parser.add_argument("--more", type=int, default=2, help="epochs once it is tuned")
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--sleep", type=float, default=0.01)
parser.add_argument("--uneven", action="store_true", help="rank 1 has less data in each epoch")
parser.add_argument("--compression", action="store_true", help="of the script's own")
parser.add_argument("--unordered", action="store_true", help="parameters are, on each rank")
parser.add_argument(
    "--two",
    choices=["apart", "together"],
    help="two optimizers: each with its own loss, as of a GAN, or both with one",
)
parser.add_argument(
    "--fails",
    choices=["raise", "catch", "own", "kill", "stop", "wait"],
    help="once, in a live trial; own: the other rank sees it in an operation of the script",
)
parser.add_argument("--diverges", action="store_true", help="once, in a live trial")
parser.add_argument("--beside", choices=["torch", "mpi4py"], help="what it also sends with")
arguments = parser.parse_args()
if arguments.beside == "mpi4py":
    from mpi4py import MPI

hvd.init()
if arguments.beside == "torch":
    torch.distributed.init_process_group(
        "gloo", f"file://{arguments.folder}/ranks", rank=hvd.rank(), world_size=hvd.size()
    )
torch.manual_seed(1)
with open(arguments.folder / "set-ups", "a") as file:
    file.write(f"{hvd.rank()}\n")
w = arguments.width
model = nn.Sequential(nn.Linear(64, w), nn.ReLU(), nn.Linear(w, w), nn.Linear(w, 8))
other = nn.Linear(8, 8)
parameters = list(model.parameters())
if arguments.unordered and hvd.rank():
    parameters.reverse()  # as from a set of their names
optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
compression = hvd.Compression.fp16 if arguments.compression else hvd.Compression.none
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
if arguments.two:
    second = torch.optim.Adam(other.parameters())
    second = hvd.DistributedOptimizer(second, other.named_parameters(prefix="other"))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)


def fail_in_a_trial():
    from hvd_autosync.runtime import current

    trial = current.live and current.live._trial
    mark = arguments.folder / "failed"
    if not trial or trial.steps < 6 or not trial.spec.strategy or hvd.rank() != 1 or mark.exists():
        return
    mark.touch()
    if arguments.fails in ("raise", "catch", "own"):
        raise RuntimeError("planted")
    if arguments.fails == "wait":
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL if arguments.fails == "kill" else signal.SIGSTOP)


def diverges_now():
    """Whether a live trial with its own strategy goes on; on all ranks in the same steps."""
    from hvd_autosync.runtime import current

    live = current.live
    own = live and live._steps > 200 and live._trial and live._trial.spec.strategy
    diverges_now.yet |= bool(own)  # the guard has taken snapshots
    return diverges_now.yet and not optimizer._sync.exact


def send_beside(step):
    own = step * (hvd.rank() + 1)
    if arguments.beside == "torch":
        total = torch.tensor(own)
        torch.distributed.all_reduce(total)
    else:
        total = MPI.COMM_WORLD.allreduce(own)
    assert total == step * sum(range(1, hvd.size() + 1))


def train_step(step):
    generator = torch.Generator().manual_seed(1000 * step + hvd.rank())
    time.sleep(arguments.sleep)
    optimizer.zero_grad()
    output = model(torch.randn(16, 64, generator=generator))
    loss = output.pow(2).mean()
    if arguments.two == "together":
        second.zero_grad()
        loss = loss + other(output).pow(2).mean()
    (loss * float("nan") if arguments.diverges and diverges_now() else loss).backward()
    optimizer.step()
    if arguments.two == "together":
        second.step()
    if arguments.two == "apart":
        second.zero_grad()
        other(output.detach()).pow(2).mean().backward()
        second.step()
    if arguments.beside:
        send_beside(step)
    if arguments.fails:
        fail_in_a_trial()
    if arguments.fails == "own":
        hvd.allreduce(torch.zeros(1), name="own")


def train_or_end(step):
    """As a script that catches its own exceptions."""
    try:
        train_step(step)
    except Exception:
        sys.exit(1)


def last_step():
    """Whether to end after this step, which ends an epoch of 20."""
    from hvd_autosync.runtime import current

    if arguments.steps:
        return step + 1 >= arguments.steps
    # Set by all ranks after the same step.
    if current.live is None or current.live._after_study.now or current.live._ended:
        last_step.more -= 1
    return last_step.more < 0


last_step.more = arguments.more
diverges_now.yet = False
step_of = train_or_end if arguments.fails in ("catch", "own") else train_step
for step in itertools.count():
    if arguments.uneven:
        if step % 20 < 18 or hvd.rank() == 0:
            step_of(step)
        if step % 20 == 19:
            hvd.join()
    else:
        step_of(step)
    if step % 10 == 9 and hvd.rank() == 0:
        torch.save(optimizer.state_dict(), arguments.folder / f"step-{step}")
    if step % 20 == 19 and last_step():
        break
if hvd.rank() == 0:
    (arguments.folder / "steps").write_text(str(step + 1))
    torch.save(model.state_dict(), arguments.folder / "model")
    torch.save(optimizer.state_dict(), arguments.folder / "optimizer")
