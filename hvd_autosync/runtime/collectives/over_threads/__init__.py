"""Collectives over threads: several ranks in one process, for tests of what ranks do together.

::

    ranks = ThreadRanks(3, seed=7)
    results = ranks.run(body)        # body() runs as rank 0, 1, 2; or ranks.run([a, b, c])

One rank runs at a time. Each call of an operation, and each poll, may pass the turn to another rank
that can go on, as the seed says: another seed is another order, and the same seed the same one. If
no rank can go on, all of them get an error that names what each of them waits for.

A rank that blocks elsewhere than in an operation, as for a message of another rank, would keep its
turn. With ``turns=False`` all ranks run at once, and the order is the machine's.
"""

from hvd_autosync.runtime.collectives.over_threads.ranks import RankDied as RankDied
from hvd_autosync.runtime.collectives.over_threads.ranks import ThreadRanks as ThreadRanks
