"""Gradients that travel together, as :mod:`hvd_autosync.runtime.planning` puts them in buckets.

Gradients of classes with the same plan share buckets; what travels by rows, is cut into slices or
coded by PowerSGD travels by itself. Arrays are ``k x c``: gradients in the order of their arrival,
strategies.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hvd_autosync.cost.columns import Columns
from hvd_autosync.cost.gradients import Gradients
from hvd_autosync.cost.timeline import FloatArray, Items
from hvd_autosync.search_space.exchange_plan import EMBEDDING, LARGE, REST, class_knob

#: Bytes of a bucket of what Horovod cannot fuse, where no number is asked for
#: (``runtime/planning.py``).
_BUCKET_BYTES = 8 * 1024 * 1024

BoolArray = npt.NDArray[np.bool_]


def bucketed(gradients: Gradients, columns: Columns, items: Items) -> Items:
    """Buckets in place of gradients, where a strategy has some.

    They are closed at equal shares of the bytes of what they are made of; one by size holds
    gradients of all of backward, so that all of them are complete at its end. A bucket stands where
    its last gradient stood, the others of it are gone.
    """
    classes = [name for name in (EMBEDDING, LARGE, REST) if (gradients.classes == name).any()]
    plans = np.array([_plans(name, columns) for name in classes])
    gathers = np.array([_gathers(name, gradients, columns) for name in classes])
    plain = np.array([_is_plain(name, columns) for name in classes])
    place = np.array([classes.index(name) for name in gradients.classes])
    size = gradients.size_bytes[:, None]
    by_rows = np.array([columns.exchanges(n) == "rows" for n in classes])[place]
    total = np.where(by_rows | gradients.sparse[:, None], 0.0, size).sum(axis=0)
    wanted = columns.numbers("buckets")
    whole = [np.array(each) for each in (items.arrival_s, items.size_bytes, items.wire_s,
                                         items.operations, items.alone)]  # fmt: skip
    for lane in range(len(classes)):
        # Of several classes with one plan, the first stands for the lane.
        first = ~np.any(plans[:lane] == plans[lane], axis=0)
        members = (gathers & (plans == plans[lane]) & first)[place] & ~gradients.sparse[:, None]
        own, several = (size * members).sum(axis=0), members.sum(axis=0)
        share = np.maximum(np.round(wanted * own / np.maximum(total, 1.0)), 1)
        without = np.where(plain[lane], several, np.ceil(own / _BUCKET_BYTES))
        count = np.where(wanted > 0, share, without)
        merged = (count < several) & (several > 0)
        if merged.any():
            _merge(items, whole, members & merged, count, own)
    arrival_s, *rest = whole
    late = columns.words("bucket_rule") == "size"
    arrival_s[:, late & (wanted > 0)] = items.arrival_s[-1:, late & (wanted > 0)]
    return Items(arrival_s, *rest)


def _merge(
    items: Items, whole: list[FloatArray], members: BoolArray, count: FloatArray, own: FloatArray
) -> None:
    """Put ``members``, ``k x c``, of ``own`` bytes into ``count`` buckets, in ``whole``."""
    _, size, wire_s, operations, alone = whole
    strategies = members.shape[1]
    reached, closed, open_size, open_wire, open_alone = np.zeros((5, strategies))
    open_operations = np.ones(strategies)
    left = members.sum(axis=0)
    for k in np.flatnonzero(members.any(axis=1)):
        here = members[k]
        reached += np.where(here, items.size_bytes[k], 0.0)
        open_size += np.where(here, items.size_bytes[k], 0.0)
        open_wire += np.where(here, items.wire_s[k], 0.0)
        open_operations = np.where(
            here, np.maximum(open_operations, items.operations[k]), open_operations
        )
        open_alone = np.where(here, np.maximum(open_alone, items.alone[k]), open_alone)
        left = left - here
        closes = here & ((reached * count >= own * (closed + 1) * (1 - 1e-9)) | (left == 0))
        size[k] = np.where(closes, open_size, np.where(here, 0.0, size[k]))
        wire_s[k] = np.where(closes, open_wire, np.where(here, 0.0, wire_s[k]))
        operations[k] = np.where(closes, open_operations, operations[k])
        alone[k] = np.where(closes, open_alone, alone[k])
        closed = closed + closes
        for opened, start in ((open_size, 0.0), (open_wire, 0.0), (open_alone, 0.0),
                              (open_operations, 1.0)):  # fmt: skip
            opened[closes] = start


def _plans(name: str, columns: Columns) -> npt.NDArray[np.str_]:
    """One text per strategy, equal for equal plans of classes."""
    exchange, codec = columns.exchanges(name), columns.words(class_knob(name, "codec"))
    plan = np.char.add(np.char.add(exchange, "/"), codec)
    if name == REST:
        return plan
    ratio = columns.numbers(class_knob(name, "ratio")).astype(np.str_)
    return np.where(codec == "topk", np.char.add(plan, ratio), plan)


def _gathers(name: str, gradients: Gradients, columns: Columns) -> BoolArray:
    """Whether gradients of a class are put into buckets, shape ``(c,)``."""
    exchange, codec = columns.exchanges(name), columns.words(class_knob(name, "codec"))
    apart = (exchange == "rows") | (codec == "powersgd")
    if name == LARGE:
        apart |= columns.numbers("large_slices") > 1
    gathers: BoolArray = ~apart
    return gathers


def _is_plain(name: str, columns: Columns) -> BoolArray:
    """Whether Horovod itself fuses gradients of a class, shape ``(c,)``."""
    exchange, codec = columns.exchanges(name), columns.words(class_knob(name, "codec"))
    plain: BoolArray = (exchange == "allreduce") & (codec == "none")
    return plain
