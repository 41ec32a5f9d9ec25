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
from hvd_autosync.search_space.exchange_plan import (
    EMBEDDING,
    LARGE,
    PARAMETER_CLASSES,
    REST,
    class_knob,
)

#: Bytes of a bucket of gradients that Horovod cannot fuse, if ``buckets`` is 0
#: (``runtime/exchange/planning.py``).
_BUCKET_BYTES = 8 * 1024 * 1024

BoolArray = npt.NDArray[np.bool_]


def bucketed(gradients: Gradients, columns: Columns, resources: Resources, items: Items) -> Items:
    """Replace gradients by buckets, for strategies that have buckets.

    Buckets are closed at equal shares of the bytes of their gradients, which are taken in the order
    of their arrival or, with ``bucket_rule`` "size", of their sizes. A bucket takes the place of
    the gradient that arrives last; the places of its other gradients are empty.
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
        apart[own] = _apart(name, gradients, own, columns, resources)
    total = np.where(apart, 0.0, size).sum(axis=0)
    wanted = columns.numbers("buckets")
    by_size = (wanted > 0) & (columns.words("bucket_rule") == "size")
    whole = _copied(items)
    for lane in range(len(classes)):
        # The first of several classes with one plan handles all of them.
        first = ~np.any(plans[:lane] == plans[lane], axis=0)
        members = (gathers & (plans == plans[lane]) & first)[place] & ~apart
        their, several = (size * members).sum(axis=0), members.sum(axis=0)
        share = np.maximum(np.round(wanted * their / np.maximum(total, 1.0)), 1)
        without = np.where(plain[lane], several, np.ceil(their / _BUCKET_BYTES))
        count = np.where(wanted > 0, share, without)
        merged = (count < several) & (several > 0)
        for rule, chosen in (("ordered", merged & ~by_size), ("size", merged & by_size)):
            if chosen.any():
                _merge(items, whole, members & chosen, count, their, rule)
    return Items(*whole)


def deferrable_share(gradients: Gradients, columns: Columns, resources: Resources) -> FloatArray:
    """Return the share of the bytes whose buckets are one plain allreduce each, shape ``(c,)``.

    The runtime defers no other (``runtime/exchange/deferred_update.py``).
    """
    found = np.zeros(len(columns))
    for name in PARAMETER_CLASSES:
        own = np.flatnonzero(gradients.classes == name)
        apart = _apart(name, gradients, own, columns, resources)
        single = _is_plain(name, columns)
        if name == LARGE:
            single = single & (columns.numbers("large_slices") <= 1)
        found += np.where(apart | ~single, 0.0, gradients.size_bytes[own][:, None]).sum(axis=0)
    share: FloatArray = found / max(float(gradients.size_bytes.sum()), 1.0)
    return share


def _apart(
    name: str,
    gradients: Gradients,
    own: npt.NDArray[np.intp],
    columns: Columns,
    resources: Resources,
) -> BoolArray:
    """Return which gradients of a class travel by rows or by factors, ``m x c``."""
    apart: BoolArray = (
        (columns.exchanges(name) == "rows")
        | travels_sparse(gradients, own, columns)
        | travels_by_factors(name, gradients, own, columns, resources)
    )
    return apart


def gathered(items: Items, count: int) -> Items:
    """Put all ``items`` into ``count`` buckets, in the order of their arrival."""
    whole = _copied(items)
    everything = np.ones(items.size_bytes.shape, dtype=np.bool_)
    whole_bytes = items.size_bytes.sum(axis=0)
    _merge(items, whole, everything, np.full(len(whole_bytes), float(count)), whole_bytes)
    return Items(*whole)


def _copied(items: Items) -> list[FloatArray]:
    return [np.array(getattr(items, field.name)) for field in fields(Items)]


def _merge(
    items: Items,
    whole: list[FloatArray],
    members: BoolArray,
    count: FloatArray,
    own: FloatArray,
    rule: str = "ordered",
) -> None:
    """Put ``members``, ``k x c``, of ``own`` bytes into ``count`` buckets, in ``whole``.

    All members have the same plan, hence the same operations.
    """
    _, size, wire_s, *_ = whole
    # Most strategies have no such buckets.
    some = np.flatnonzero(members.any(axis=0))
    sizes, wires, members = items.size_bytes[:, some], items.wire_s[:, some], members[:, some]
    total, width = sizes.size, len(some)
    order = np.arange(len(sizes))
    if rule == "size":
        order = np.argsort(-sizes[:, 0], kind="stable")
    bucket = np.empty(sizes.shape, dtype=np.intp)
    bucket[order] = _buckets(sizes[order], members[order], count[some], own[some])
    place = (bucket * width + np.arange(width))[members]
    # Where an index is repeated, the last value stays: that of the gradient that arrives last.
    last = np.full(total, -1)
    last[place] = np.nonzero(members)[0]
    there = np.flatnonzero(last >= 0)
    for values, into in ((sizes, size), (wires, wire_s)):
        sums = np.bincount(place, weights=values[members], minlength=total)
        merged = into[:, some]
        merged[members] = 0.0
        merged[last[there], there % width] = sums[there]
        into[:, some] = merged


def _buckets(
    sizes: FloatArray, members: BoolArray, count: FloatArray, own: FloatArray
) -> npt.NDArray[np.intp]:
    """Return the number of each member's bucket, from 0; that of others means nothing.

    A gradient closes at most one bucket, if the bucket's share is reached. So the number of closed
    buckets after it is the number of shares reached, or one more than before if that is less: a
    running minimum.
    """
    place = np.cumsum(members, axis=0)
    reached = np.cumsum(np.where(members, sizes, 0.0), axis=0)
    shares = np.floor(reached * count / np.maximum(own, 1.0) * (1 + 1e-9))
    closed = place + np.minimum.accumulate(np.minimum(shares - place, 0.0), axis=0)
    before = np.vstack([np.zeros_like(closed[:1]), closed[:-1]])
    return before.astype(np.intp)


def _plans(name: str, columns: Columns) -> npt.NDArray[np.str_]:
    """Return a string per strategy, shape ``(c,)``; classes with equal strings share a plan."""
    exchange = columns.exchanges_beside_factors(name)
    codec = columns.codecs(name)
    plan = np.char.add(np.char.add(exchange, "/"), codec)
    plan = np.char.add(plan, np.where(columns.lossless(name), "/lossless", ""))
    if name == REST:
        return plan
    ratio = columns.numbers(class_knob(name, "ratio")).astype(np.str_)
    return np.where(codec == "topk", np.char.add(plan, ratio), plan)


def _gathers(name: str, columns: Columns) -> BoolArray:
    """Return whether the plan of a class lets its gradients share buckets, shape ``(c,)``."""
    gathers: BoolArray = columns.codecs(name) != "powersgd"
    if name == LARGE:
        gathers = gathers & (columns.numbers("large_slices") <= 1)
    return gathers


def _is_plain(name: str, columns: Columns) -> BoolArray:
    """Return whether Horovod itself fuses gradients of a class, shape ``(c,)``."""
    exchange = columns.exchanges_beside_factors(name)
    codec = columns.codecs(name)
    plain: BoolArray = (exchange == "allreduce") & (codec == "none") & ~columns.lossless(name)
    return plain
