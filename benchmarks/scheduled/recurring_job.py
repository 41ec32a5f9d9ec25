"""A short training on handwritten digits that reports its outcome; an ordinary Horovod script."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import horovod.torch as hvd
import torch

import hvd_autosync

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scheduled.jobs import JOBS, rate_factor

_PASSES = 6


def main() -> None:
    """One run, with the seed of the environment."""
    hvd.init()
    torch.set_num_threads(1)
    job = JOBS["digits"](int(os.environ["RECURRING_SEED"]))
    optimizer = hvd.DistributedOptimizer(job.optimizer, job.model.named_parameters())
    steps = _PASSES * len(job.loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, steps))
    for number in range(_PASSES):
        job.begin_pass(number)
        for batch in job.loader:
            optimizer.zero_grad()
            job.loss(batch).backward()
            optimizer.step()
            scheduler.step()
    hvd_autosync.outcome(job.quality())


if __name__ == "__main__":
    main()
