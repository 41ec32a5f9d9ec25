"""An exchange of one file: every rank gathers all gradients and adds them up itself.

A ring of n ranks sends 2 (n - 1) / n of a tensor, in 2 (n - 1) steps; this sends n - 1 of it, in
n - 1. So it may win where latency counts: for few ranks and small tensors.

    HVD_AUTOSYNC_EXTENSIONS=examples/extending/gather_exchange.py \
      horovodrun -np 2 --autosync python train.py
"""

import torch
from horovod.torch.mpi_ops import global_process_set, size

from hvd_autosync.extensions import add_exchange
from hvd_autosync.runtime.exchange.exchanges import Scaling, Steps, gather_into


class Gather:
    """Makes tensors of one bucket equal on all ranks, step after step.

    All ranks add in the same order, so that their replicas stay the same, bit for bit.

    Args:
        count: Elements of the tensor.
        like: A tensor of its type, on its device.
        scaling: Factors of each rank's tensor, and of the sum.
    """

    def __init__(self, count: int, like: torch.Tensor, scaling: Scaling) -> None:
        self._scaling = scaling
        self._all = like.new_empty(size(), count)

    def __call__(self, tensor: torch.Tensor, name: str) -> Steps:
        """Exchange ``tensor``, shape ``(count,)``, in place."""
        tensor.mul_(self._scaling.before)
        yield gather_into(self._all.view(-1), tensor, name, global_process_set)
        torch.sum(self._all, dim=0, out=tensor)
        tensor.mul_(self._scaling.after)


add_exchange("gather", Gather, classes=("large", "rest"))
