"""Live tuning of an elastic job: whenever its ranks change, it starts over.

Elastic Horovod shuts down and initializes again with other ranks (``horovod/common/elastic.py``).
Rank 0 may be another process then, and some ranks are new: they create their model and optimizer
while the others wait in ``hvd.init()``, or in the middle of a step. What all have in common is the
end of ``hvd.init()``, so everything is counted from there: steps, boundaries, trials. Optimizers go
back to Horovod's own exchange without a word to ranks that may be gone. The new rank 0 starts a
helper, which finds in the store what is known of the job on its hosts: a winner, or an interrupted
study, or none.

A rank that vanishes in a trial may have been taken away, or have failed by the strategy. Horovod
goes on without its host, so the trial counts as crashed, and the tuning does not outlive several
such ends in a row.
"""

from __future__ import annotations

from collections.abc import Callable

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.initialization import watch_initialization
from hvd_autosync.runtime.collectives.operations import rank, size
from hvd_autosync.runtime.live.helper import Helper
from hvd_autosync.runtime.live.live_tuning import LiveTuning
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.print_line import print_line

#: So many trials in a row in which ranks have vanished, as a process has seen, end the tuning.
_MOST_VANISHED = 3


class ElasticTuning:
    """Lets live tuning start over at each ``hvd.init()`` of this process.

    Args:
        tuning: The live tuning of this process.
        start_helper: Starts the helper of rank 0; returns ``None`` if that fails.
    """

    def __init__(self, tuning: LiveTuning, start_helper: Callable[[], Helper | None]) -> None:
        self._tuning = tuning
        self._start_helper = start_helper
        self._again = False

    def watch(self) -> None:
        """Watch each ``hvd.init()`` from now on."""
        watch_initialization(self.ranks_change, self.ranks_are_there)

    def ranks_change(self) -> None:
        """Horovod was shut down, and is about to be initialized again."""
        tuning = self._tuning
        if current.live is not tuning:  # a child process of the script's
            return
        self._again = True
        tuning.ranks_change()
        if tuning.vanished.in_a_row >= _MOST_VANISHED:
            tuning.barred = f"ranks have vanished in {_MOST_VANISHED} trials in a row"
        for optimizer in tuning.living():
            sync = vars(optimizer).get("_sync")
            if sync is not None:
                sync.start_over()

    def ranks_are_there(self) -> None:
        """Horovod was initialized."""
        if current.live is not self._tuning:
            return
        first = rank() == 0
        if first and self._again:
            ranks = amount(size(), "rank")
            print_line(f"the elastic job goes on with {ranks}, and its tuning starts over")
        self._tuning.start_over(self._start_helper() if first else None)
