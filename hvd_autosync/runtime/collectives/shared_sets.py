"""Process sets that the script may have, too: Horovod has at most one of the same ranks.

Neither side removes the other's: the script can add a set that we have, once, and remove it again,
and sees what it would see without us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from horovod.common.process_sets import ProcessSet, add_process_set

from hvd_autosync.runtime.collectives.initialization import registered_process_sets
from hvd_autosync.util import patches

_Ranks = tuple[int, ...]
#: Our process sets.
_OURS: dict[_Ranks, ProcessSet] = {}
#: Ranks of those that the script has, too.
_SCRIPTS: set[_Ranks] = set()
#: The number of no process set.
_NONE = -1


def shared_process_set(ranks: Sequence[int]) -> ProcessSet:
    """Return a process set, which the script may have already, or later; a collective.

    Raises:
        ValueError: There is none, and none can be added to this job.
    """
    own = ProcessSet(ranks)
    key = tuple(own.ranks)
    if (known := _OURS.get(key)) is not None and _is_registered(known):
        return known
    patches.install("shared process sets", _adding, _removing)
    registered = {tuple(its): number for number, its in registered_process_sets().items()}
    if key in registered:
        own.process_set_id = registered[key]
        _SCRIPTS.add(key)
    else:
        add_process_set(own)
        _SCRIPTS.discard(key)
    _OURS[key] = own
    return own


def _is_registered(own: ProcessSet) -> bool:
    """Return whether Horovod, which the script may have initialized since, has a set of ours."""
    return bool(registered_process_sets().get(own.process_set_id) == own.ranks)


def _adding(add: Callable[[list[int]], int | None]) -> Callable[[list[int]], int | None]:
    # Of the library, because scripts may import the Python functions under many names.
    def adding(ranks: list[int]) -> int | None:
        number = add(ranks)
        if number is not None:  # a set of ours with these ranks was an earlier Horovod's
            _OURS.pop(tuple(ranks), None)
            return number
        own = _OURS.get(tuple(ranks))
        if own is None or tuple(ranks) in _SCRIPTS:
            return number
        _SCRIPTS.add(tuple(ranks))
        return int(own.process_set_id)

    return adding


def _removing(remove: Callable[[int], int | None]) -> Callable[[int], int | None]:
    def removing(number: int) -> int | None:
        found = [ranks for ranks, own in _OURS.items() if own.process_set_id == number]
        if not found or not _is_registered(_OURS[found[0]]):
            return remove(number)
        remove(_NONE)  # raises what it would raise for the set
        if found[0] not in _SCRIPTS:
            return None
        _SCRIPTS.remove(found[0])
        return number

    return removing
