"""A knob of one file: which cores Horovod's own threads run on.

Horovod reads ``HOROVOD_THREAD_AFFINITY`` in ``hvd.init()``: a core for each rank of a host, where
the thread that negotiates and reduces is pinned. Unset, the system moves it as it likes.

    HVD_AUTOSYNC_EXTENSIONS=examples/extending/affinity_knob.py \
      horovodrun -np 2 --autosync python train.py
"""

import os

from hvd_autosync.extensions import add_knob
from hvd_autosync.search_space import ModelProfile, Resources
from hvd_autosync.search_space.knobs import categorical_knob

#: The last cores, the highest first: "3,2,1,0" on four.
LAST_CORES = ",".join(str(core) for core in reversed(range(os.cpu_count() or 1)))

AFFINITY = categorical_knob(
    "thread_affinity",
    ("free", LAST_CORES),
    "free",
    help="Cores that the ranks' threads of Horovod are pinned to.",
)


def applies(model: ModelProfile, resources: Resources) -> bool:
    """Whether each rank of a host can have a core of its own."""
    return max(host.slots for host in resources.hosts) <= (os.cpu_count() or 1)


add_knob(AFFINITY, "HOROVOD_THREAD_AFFINITY", applies)
