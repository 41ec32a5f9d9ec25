"""Process sets of two levels where ``hvd.init()`` has not made them."""

import horovod.torch as hvd
import torch

from hvd_autosync.runtime.collectives.levels import two_levels


def case_levels_are_added():
    levels = two_levels()
    assert levels is two_levels()
    host = hvd.rank() // 2
    assert levels.within.ranks == [2 * host, 2 * host + 1]
    assert levels.across.ranks == [hvd.local_rank(), hvd.local_rank() + 2]
    own = torch.tensor([float(hvd.rank())])
    within = hvd.allreduce(own, op=hvd.Sum, name="within", process_set=levels.within)
    total = hvd.allreduce(within, op=hvd.Sum, name="across", process_set=levels.across)
    assert (within.item(), total.item()) == (4.0 * host + 1, 6.0)
