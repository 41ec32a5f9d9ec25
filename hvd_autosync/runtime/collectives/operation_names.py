"""Names for the operations that a script starts without one.

Horovod names such an operation by the number of all operations of its process before
(``GetOpName`` in ``horovod/torch/mpi_ops_v2.cc``), and those of ranks meet by their names. While
gradients are under way, ranks may have started different numbers of our operations: one polls
earlier. So a script's own operations are numbered by themselves, in each process set.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from hvd_autosync.runtime.collectives.initialization import (
    record_initialization,
    watch_initialization,
)
from hvd_autosync.search_space.horovod_settings import is_elastic
from hvd_autosync.util import patches

#: Ranks of a process set, whose own number another may get -> numbers of its operations.
_NUMBERS: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


def name_operations() -> None:
    """Name operations from now on; call it at the same place on all ranks."""
    if not patches.is_installed("operations without a name") and is_elastic(os.environ):
        # A worker that joins the job begins at 0.
        record_initialization()
        watch_initialization(lambda: None, _NUMBERS.clear)
    patches.install("operations without a name", _naming)


def _naming(start: Callable[..., int]) -> Callable[..., int]:
    parameters = list(inspect.signature(start).parameters)
    place, of_set = parameters.index("name"), parameters.index("process_set")
    kind = start.__name__.strip("_")

    @functools.wraps(start)
    def naming(*arguments: Any) -> int:
        if arguments[place] is None:
            own = arguments[of_set]
            number = next(_NUMBERS[tuple(own.ranks or ())])
            name = f"{kind}.unnamed.{own.process_set_id}.{number}"
            arguments = (*arguments[:place], name, *arguments[place + 1 :])
        return start(*arguments)

    return naming
