"""What travels in a step without a barrier: gradients to the owners, whose answers come back.

Each rank sends a bucket's gradient as soon as it is complete in backward, each owner its share;
the owner steps that and answers with its parameters (``runtime/sync/asynchronous.py``). Nothing is
negotiated or fused, no codec is used, and before its next forward a rank waits for its own answers.
"""

from __future__ import annotations

import numpy as np

from hvd_autosync.cost.bucketing import gathered
from hvd_autosync.cost.exchange_costs import most_senders
from hvd_autosync.cost.gradients import Gradients
from hvd_autosync.cost.timeline import Items
from hvd_autosync.search_space import Resources
from hvd_autosync.search_space.protocol import push_count

#: Passes over the parameters' memory: six copies, into the bucket, to the owner, into its gradient,
#: of its answer and of that in two places; each takes a seventh of what a pass of a codec does.
PUSH_PASSES = 6 / 7


def async_transfers(gradients: Gradients, resources: Resources, count: int) -> Items:
    """The buckets of ``count`` strategies, all the same.

    The last one is through when its answer has come, an operation's latency later.
    """
    overall = resources.links.overall
    assert overall is not None, "a cost model is made of measured links"
    shape = (len(gradients.size_bytes), count)
    size = np.broadcast_to(gradients.size_bytes[:, None], shape)
    wire_s = size * _wire_share(resources) / overall.bandwidth_bytes_per_s
    arrival_s = np.broadcast_to(gradients.ready_s[:, None], shape)
    each = Items(arrival_s, size, wire_s, np.ones(shape), np.full(shape, -1.0))
    items = gathered(each, push_count(int(gradients.size_bytes.sum())))
    items.alone[-1] = 0.0
    return items


def _wire_share(resources: Resources) -> float:
    """Seconds that pushes and answers take, over those of a ring allreduce.

    With L of n ranks on a host, L (n - L) / n bytes leave it for each byte of gradients, and as
    many as answers; of a ring 2 (n - 1) / n do.
    """
    ranks, local = resources.world_size, most_senders(resources)
    return local * (ranks - local) / (ranks - 1)
