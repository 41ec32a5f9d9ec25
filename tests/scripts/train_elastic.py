"""An elastic training of which every parameter is known: gradients are constants.

It ends once a file ``end`` is there. Rank 0 writes what each step has seen, and in the end by how
much parameters are off, relative to what the means of gradients over the ranks of each step give.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from torch import nn

MOMENTUM, RATE = 0.5, 1 / 1024

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--vanishing", default="", help="host whose rank is killed, once, in a trial")
arguments = parser.parse_args()
folder = arguments.folder

hvd.init()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8))
for parameter in model.parameters():
    nn.init.zeros_(parameter)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())


def tuning():
    """What live tuning does, as this rank sees it."""
    from hvd_autosync.runtime import current

    live = current.live
    trial = live and live._trial
    return {
        "watching": bool(live and live._after_study.now),
        "ended": bool(live and live._ended),
        "trial": dict(trial.spec.strategy) if trial else None,
        "measured": trial.steps if trial else 0,
    }


def vanish(now):
    mark = folder / "vanished"
    if now["trial"] and now["measured"] >= 4 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def train_step(state):
    time.sleep(0.005)
    optimizer.zero_grad()
    loss = sum(parameter.sum() for parameter in model.parameters()) * (hvd.rank() + 1)
    loss.backward()
    optimizer.step()
    state.step += 1
    state.velocity = MOMENTUM * state.velocity + (hvd.size() + 1) / 2  # the mean
    state.expected -= RATE * state.velocity


@hvd.elastic.run
def train(state):
    while True:
        train_step(state)
        now = tuning()
        if os.environ["HOROVOD_HOSTNAME"] == arguments.vanishing:
            vanish(now)
        if hvd.rank() == 0:
            now |= {"step": state.step, "size": hvd.size(), "process": os.getpid()}
            with open(folder / "steps", "a") as file:
                file.write(f"{json.dumps(now)}\n")
        if state.step % 5 == 0:
            state.commit()
            ends = torch.tensor(float((folder / "end").exists()))
            if hvd.allreduce(ends, name="ends", op=hvd.Sum) > 0:
                return


state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0, velocity=0.0, expected=0.0)
train(state)
off = max((p / state.expected - 1).abs().max().item() for p in model.parameters())
off = hvd.allreduce(torch.tensor(off), name="off", op=hvd.Max).item()
if hvd.rank() == 0:
    (folder / "off").write_text(str(off))
