"""Buckets of gradients, as :mod:`hvd_autosync.runtime.exchange.planning` makes them.

Gradients of classes with the same plan share buckets. Gradients that are sent by rows or by
factors, cut into slices or encoded by PowerSGD are sent alone. Arrays are ``k x c``: gradients in
the order of their arrival, strategies.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from hvd_autosync.cost.columns import Columns
from hvd_autosync.cost.exchange_costs import travels_by_factors, travels_sparse
from hvd_autosync.cost.gradients import Gradients
from hvd_autosync.cost.timeline import FloatArray, Items
from hvd_autosync.search_space import Resources
from hvd_autosync.search_space.exchange_plan import EMBEDDING, LARGE, REST, class_knob

#: Bytes of a bucket of gradients that Horovod cannot fuse, if ``buckets`` is 0
#: (``runtime/exchange/planning.py``).
_BUCKET_BYTES = 8 * 1024 * 1024

BoolArray = npt.NDArray[np.bool_]


def bucketed(gradients: Gradients, columns: Columns, resources: Resources, items: Items) -> Items:
    """Replace gradients by buckets, for strategies that have buckets.

    Buckets are closed at equal shares of the bytes of their gradients. With ``bucket_rule`` "size"
    a bucket has gradients from all of backward, so all buckets are complete at its end, if any
    bucket has several gradients. A bucket takes the place of its last gradient; the places of its
    other gradients are empty.
    """
    classes = [name for name in (EMBEDDING, LARGE, REST) if (gradients.classes == name).any()]
    plans = np.array([_plans(name, columns) for name in classes])
    gathers = np.array([_gathers(name, columns) for name in classes])
    plain = np.array([_is_plain(name, columns) for name in classes])
    place = np.array([classes.index(name) for name in gradients.classes])
    size = gradients.size_bytes[:, None]
    apart = np.zeros(items.size_bytes.shape, dtype=np.bool_)
    for name in classes:
        own = np.flatnonzero(gradients.classes == name)
        apart[own] = (
            (columns.exchanges(name) == "rows")
            | travels_sparse(gradients, own, columns)
            | travels_by_factors(name, gradients, own, columns, resources)
        )
    total = np.where(apart, 0.0, size).sum(axis=0)
    wanted = columns.numbers("buckets")
    whole = _copied(items)
    at_end = np.zeros(len(wanted), dtype=np.bool_)
    for lane in range(len(classes)):
        # The first of several classes with one plan handles all of them.
        first = ~np.any(plans[:lane] == plans[lane], axis=0)
        members = (gathers & (plans == plans[lane]) & first)[place] & ~apart
        their, several = (size * members).sum(axis=0), members.sum(axis=0)
        share = np.maximum(np.round(wanted * their / np.maximum(total, 1.0)), 1)
        without = np.where(plain[lane], several, np.ceil(their / _BUCKET_BYTES))
        count = np.where(wanted > 0, share, without)
        merged = (count < several) & (several > 0)
        at_end |= merged & (wanted > 0) & (columns.words("bucket_rule") == "size")
        if merged.any():
            _merge(items, whole, members & merged, count, their)
    arrival_s, *rest = whole
    arrival_s[:, at_end] = items.arrival_s[-1:, at_end]
    return Items(arrival_s, *rest)


def gathered(items: Items, count: int) -> Items:
    """Put all ``items`` into ``count`` buckets, in the order of their arrival."""
    whole = _copied(items)
    everything = np.ones(items.size_bytes.shape, dtype=np.bool_)
    _merge(items, whole, everything, np.array(float(count)), items.size_bytes.sum(axis=0))
    return Items(*whole)


def _copied(items: Items) -> list[FloatArray]:
    return [np.array(getattr(items, field.name)) for field in fields(Items)]


def _merge(
    items: Items, whole: list[FloatArray], members: BoolArray, count: FloatArray, own: FloatArray
) -> None:
    """Put ``members``, ``k x c``, of ``own`` bytes into ``count`` buckets, in ``whole``.

    A gradient closes at most one bucket, if the bucket's share is reached. So the number of closed
    buckets after it is the number of shares reached, or one more than before if that is less: a
    running minimum. All members have the same plan, hence the same operations.
    """
    _, size, wire_s, *_ = whole
    place = np.cumsum(members, axis=0)
    reached = _running(items.size_bytes, members)
    shares = np.floor(reached * count / np.maximum(own, 1.0) * (1 + 1e-9))
    closed = place + np.minimum.accumulate(np.minimum(shares - place, 0.0), axis=0)
    before = np.vstack([np.zeros_like(closed[:1]), closed[:-1]])
    closes = members & ((closed > before) | (place == place[-1]))
    for sums, into in ((reached, size), (_running(items.wire_s, members), wire_s)):
        ends = np.maximum.accumulate(np.where(closes, sums, 0.0), axis=0)
        begins = np.vstack([np.zeros_like(ends[:1]), ends[:-1]])
        into[members] = np.where(closes, sums - begins, 0.0)[members]


def _running(values: FloatArray, members: BoolArray) -> FloatArray:
    return np.cumsum(np.where(members, values, 0.0), axis=0)


def _plans(name: str, columns: Columns) -> npt.NDArray[np.str_]:
    """Return a string per strategy, shape ``(c,)``; classes with equal strings share a plan."""
    exchange = columns.exchanges_beside_factors(name)
    codec = columns.words(class_knob(name, "codec"))
    plan = np.char.add(np.char.add(exchange, "/"), codec)
    plan = np.char.add(plan, np.where(columns.lossless(name), "/lossless", ""))
    if name == REST:
        return plan
    ratio = columns.numbers(class_knob(name, "ratio")).astype(np.str_)
    return np.where(codec == "topk", np.char.add(plan, ratio), plan)


def _gathers(name: str, columns: Columns) -> BoolArray:
    """Return whether the plan of a class lets its gradients share buckets, shape ``(c,)``."""
    gathers: BoolArray = columns.words(class_knob(name, "codec")) != "powersgd"
    if name == LARGE:
        gathers = gathers & (columns.numbers("large_slices") <= 1)
    return gathers


def _is_plain(name: str, columns: Columns) -> BoolArray:
    """Return whether Horovod itself fuses gradients of a class, shape ``(c,)``."""
    exchange = columns.exchanges_beside_factors(name)
    codec = columns.words(class_knob(name, "codec"))
    plain: BoolArray = (exchange == "allreduce") & (codec == "none") & ~columns.lossless(name)
    return plain
