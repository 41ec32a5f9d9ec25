"""Transfers of a step without a barrier: gradients to the owners, parameters back.

Each rank sends a bucket's gradient as soon as it is complete in backward: to each owner its share.
The owner updates its share and answers with the parameters (``runtime/sync/asynchronous.py``).
Nothing is negotiated or fused, no codec is used, and a rank waits for the answers to its own
gradients before its next forward.
"""

from __future__ import annotations

import numpy as np

from hvd_autosync.cost.bucketing import gathered
from hvd_autosync.cost.exchange_costs import most_senders
from hvd_autosync.cost.gradients import Gradients
from hvd_autosync.cost.timeline import Items
from hvd_autosync.search_space import Resources
from hvd_autosync.search_space.protocol import push_count

#: Passes over the parameters' memory: six copies (into the bucket, to the owner, into its gradient,
#: of its answer, and of that in two places), each a seventh of the time of a codec's pass.
ASYNC_PASSES = 6 / 7


def async_transfers(gradients: Gradients, resources: Resources, count: int) -> Items:
    """Return the buckets of ``count`` strategies; they are the same for all.

    The last bucket ends when its answer has arrived, an operation's latency later.
    """
    overall = resources.links.overall
    assert overall is not None, "the cost model needs measured links"
    shape = (len(gradients.size_bytes), count)
    size = np.broadcast_to(gradients.size_bytes[:, None], shape)
    wire_s = size * _wire_share(resources) / overall.bandwidth_bytes_per_s
    arrival_s = np.broadcast_to(gradients.ready_s[:, None], shape)
    each = Items(arrival_s, size, wire_s, np.ones(shape), np.full(shape, -1.0), np.ones(shape))
    items = gathered(each, push_count(int(gradients.size_bytes.sum())))
    items.alone[-1] = 0.0
    return items


def _wire_share(resources: Resources) -> float:
    """Return the time of gradients and answers on the wire over that of a ring allreduce.

    With L of n ranks on a host, L (n - L) / n bytes leave it per byte of gradients, and as many for
    answers. With a ring allreduce 2 (n - 1) / n bytes do.
    """
    ranks, local = resources.world_size, most_senders(resources)
    return local * (ranks - local) / (ranks - 1)
