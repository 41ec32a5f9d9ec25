"""A knob of one file: which cores Horovod's own threads run on.

Horovod reads ``HOROVOD_THREAD_AFFINITY`` in each ``hvd.init()``: a core for each rank of a host,
where the thread that negotiates and reduces is pinned. Unset, the system moves it as it likes.

    HVD_AUTOSYNC_EXTENSIONS=examples/extending/affinity_knob.py \
      horovodrun -np 2 --autosync python train.py
"""

import os

from hvd_autosync.extensions import add_knob
from hvd_autosync.search_space.knob_spec import KnobSpec, Variable
from hvd_autosync.search_space.knobs import categorical_knob

CORES = os.cpu_count() or 1
#: The last cores, the highest first: "3,2,1,0" on four.
LAST = ",".join(str(core) for core in reversed(range(CORES)))

add_knob(
    KnobSpec(
        categorical_knob("thread_affinity", ("free", LAST), "free", help="Horovod's cores."),
        sets=Variable("HOROVOD_THREAD_AFFINITY", reread=True),
        when="each rank of a host can have a core of its own",
        applies=lambda job: max(host.slots for host in job.resources.hosts) <= CORES,
    )
)
