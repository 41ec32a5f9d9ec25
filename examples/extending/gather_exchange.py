"""An exchange of one file: every rank gathers all gradients and adds them up itself.

A ring of n ranks sends 2 (n - 1) / n of a tensor, in 2 (n - 1) steps; this sends n - 1 of it, in
n - 1. So it may win where latency counts: for few ranks and small tensors.

    HVD_AUTOSYNC_EXTENSIONS=examples/extending/gather_exchange.py \
      horovodrun -np 2 --autosync python train.py
"""

import torch

from hvd_autosync.extensions import add_exchange
from hvd_autosync.runtime.collectives.operations import all_ranks, size
from hvd_autosync.runtime.exchange.exchanges import Exchange, Scaling, Steps, gather_into


def gather(count: int, like: torch.Tensor, scaling: Scaling) -> Exchange:
    """Make the exchange of one bucket: ``count`` elements of the type and device of ``like``."""
    rows = like.new_empty(size(), count)

    def exchange(tensor: torch.Tensor, name: str) -> Steps:
        tensor.mul_(scaling.before)
        yield gather_into(rows.view(-1), tensor, name, all_ranks())
        # All ranks add in the same order, so that replicas stay the same, bit for bit.
        torch.sum(rows, dim=0, out=tensor).mul_(scaling.after)

    return exchange


add_exchange("gather", gather, classes=("large", "rest"))
