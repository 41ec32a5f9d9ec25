"""Costs of each exchange and codec, on the wire and on the host, by parameter class.

Let S be the bytes of a gradient, n the number of ranks, and B the bytes that a ring allreduce
reduces per second (the measured ``Link``). A ring allreduce takes S / B seconds and sends
2 (n - 1) / n bytes per byte. An allgather with a result of G bytes sends half of that per byte, so
it takes G / 2B.

Shapes: ``c`` strategies, ``m`` gradients of the class.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_autosync.cost.coefficients import COORDINATION_SHARE, DEVICE_SHARE, PASS_S_PER_BYTE
from hvd_autosync.cost.columns import Columns
from hvd_autosync.cost.gradients import Gradients
from hvd_autosync.cost.timeline import FloatArray
from hvd_autosync.search_space import Resources
from hvd_autosync.search_space.exchange_plan import (
    BY_FACTORS,
    EMBEDDING,
    FACTORS,
    HIERARCHICAL_FACTORS,
    LARGE,
    REST,
    class_knob,
)

#: Bytes of an element with a codec; int8 has a scale of four bytes per 256 elements
#: (``runtime/exchange/codecs.py``).
_ELEMENT_BYTES = {"fp16": 2.0, "bf16": 2.0, "int8": 1 + 4 / 256}
#: Bytes with topk: an index and a value for each element that is sent.
_TOPK_BYTES = 8
_NUMBER_BYTES = 4
#: Passes over a gradient's memory for encoding and decoding, measured on gradients of 0.25 to 4 MB
#: on one thread. With fp16 most of it is Horovod's addition of half-precision numbers on a
#: processor. The passes of rows are the search for rows to send.
_PASSES = {"fp16": 8.0, "bf16": 2.0, "int8": 10.0, "powersgd": 4.0}
_ROWS_PASSES = 1.5
#: Passes of one rank's product with its comparison or addition, and for each row of its factors:
#: measured on matrices of 1 to 8 MB and 8 to 128 rows, on one thread.
_FACTORS_PASSES, _FACTORS_ROW_PASSES = 1.4, 0.02
#: Passes over the factors of a rank, each time that they are encoded or decoded, with what Horovod
#: takes to negotiate lengths that differ from step to step: of steps with messages of 70 and 160 KB
#: (``benchmarks/exchanges.py``).
_FACTORS_CODING_PASSES = 40.0
#: The passes of lossless codes where the job's own were not timed, measured on gradients of 0.6 to
#: 6 MB of four models: 0.9 to 2 ns per byte (``benchmarks/lossless.py``).
_LOSSLESS_PASSES = 5.0
#: The consecutive operations of lossless codes, including the participation check.
_LOSSLESS_OPERATIONS = 3.0
#: Passes of topk at a ratio of 0.001, and further ones per factor of ten.
_TOPK_PASSES = 3.5, 5.5
#: All bytes of any gradient.
_WHOLE: FloatArray = np.ones((1, 1))
#: Consecutive operations, including the participation check of ``runtime/exchange/dispatcher.py``.
_OPERATIONS = {
    "hierarchical": 4.0,
    "sharded": 2.0,
    "rows": 3.0,
    FACTORS: 2.0,
    HIERARCHICAL_FACTORS: 3.0,
}
#: Responses of an alltoall: it is never fused, and it first exchanges the sizes (``Alltoall`` in
#: ``horovod/common/controller.cc``).
_ALLTOALL_RESPONSES = 1.0
_CODEC_OPERATIONS = {"fp16": 2.0, "bf16": 3.0, "int8": 3.0, "topk": 2.0, "powersgd": 3.0}
#: Codecs whose codes cannot be summed in a ring: they take an alltoall to the rank that sums each
#: part, and an allgather.
_BY_PARTS = ("bf16", "int8")
#: Codecs that need two operations in place of one allreduce.
_TWOFOLD = (*_BY_PARTS, "powersgd")


@dataclass(frozen=True)
class ExchangeCosts:
    """Arrays of shape ``(m, c)``.

    Attributes:
        wire_s: Seconds on the wire, of what is sent as soon as the gradient is there.
        after_s: Seconds on the wire of what follows the owners' step.
        operations: Number of consecutive operations.
        alone: Number of responses that are not shared with other gradients.
        passes: Passes over the gradient's memory.
        latency: Latency of an operation, times that of one among all ranks.
    """

    wire_s: FloatArray
    after_s: FloatArray
    operations: FloatArray
    alone: FloatArray
    passes: FloatArray
    latency: FloatArray


def exchange_costs(
    name: str,
    gradients: Gradients,
    own: npt.NDArray[np.intp],
    columns: Columns,
    resources: Resources,
) -> ExchangeCosts:
    """Return the costs of one class's gradients under every strategy.

    Args:
        name: The class.
        gradients: All gradients of the model.
        own: Indices of the class's gradients, shape ``(m,)``.
        columns: The strategies.
        resources: The cluster; its link among all ranks is known.
    """
    overall = resources.links.overall
    assert overall is not None, "the cost model needs measured links"
    size = gradients.size_bytes[own][:, None]
    exchange = columns.exchanges_beside_factors(name)
    codec = columns.codecs(name)
    in_parts = np.isin(codec, _BY_PARTS)
    device_share = _device_share(resources)
    share = _wire_share(name, gradients, own, columns, resources.world_size)
    wire_s = size * share / overall.bandwidth_bytes_per_s
    shape = wire_s.shape
    operations = np.ones(shape)
    passes = np.broadcast_to(_passes(name, columns, resources), shape)
    for each, count in _CODEC_OPERATIONS.items():
        operations = np.where(codec == each, count, operations)
    for each, count in _OPERATIONS.items():
        operations = np.where(exchange == each, count, operations)
    # Where no bits repeat, gradients soon travel by plain allreduces. So do the changes of
    # parameters that rounds of local steps exchange.
    asked = columns.lossless(name) & (columns.rounds() == 1)
    lossless = asked & (gradients.coded[own][:, None] < 1)
    coded, summed = gradients.coded[own][:, None], gradients.summed[own][:, None]
    of_two = resources.world_size == 2
    coded_share = coded if of_two else _parts_share(resources, coded, summed)
    flat = lossless & (exchange == "allreduce")
    wire_s = np.where(flat, wire_s * coded_share, wire_s)
    # All but a plain allreduce count the check already.
    further = _LOSSLESS_OPERATIONS - np.where(exchange == "allreduce", 1, 2)
    operations = np.where(lossless, operations + further, operations)
    coding_s, all_bytes = gradients.coding_s[own][:, None], np.maximum(size, 1)
    timed = coding_s / (all_bytes * PASS_S_PER_BYTE)
    coding = np.where(coding_s > 0, timed, _LOSSLESS_PASSES)
    passes = np.where(flat, coding, passes)
    twofold = (exchange == "hierarchical") & np.isin(codec, _TWOFOLD)
    operations = np.where(twofold, operations + 1, operations)
    sharded = exchange == "sharded"
    by_parts = sharded | ((exchange == "allreduce") & in_parts)
    # The allgather of what owners have stepped is half of a ring, and follows backward.
    after_s = np.where(sharded, wire_s / 2, 0.0)
    wire_s = np.where(by_parts, wire_s * _parts_share(resources), wire_s) - after_s
    pieces = columns.numbers("large_slices") if name == LARGE else np.ones(len(columns))
    by_parts = by_parts | in_parts | (flat & (not of_two))
    alone = np.where(by_parts, (1 + _ALLTOALL_RESPONSES) * pieces - 1, np.zeros(shape))
    latency = np.ones(shape)
    within, across = resources.links.within, resources.links.across
    if resources.even_levels and within is not None and across is not None:
        # Each rank of a host has its own part and exchanges it with one rank of each other host.
        hosts = len(resources.hosts)
        by_levels = exchange == "hierarchical"
        passes = np.where(by_levels, passes * hosts / resources.world_size, passes)
        share = _wire_share(
            name, gradients, own, columns, hosts, parts=resources.world_size // hosts
        )
        share = np.where(in_parts, share * _parts_share_across(resources), share)
        between = lossless & by_levels
        across_share = summed if hosts == 2 else _parts_share_across(resources, summed, summed)
        share = np.where(between, across_share, share)
        passes = np.where(between, coding * hosts / resources.world_size, passes)
        levels_s = 1.5 / within.bandwidth_bytes_per_s + share / across.bandwidth_bytes_per_s
        wire_s = np.where(by_levels, size * levels_s, wire_s)
        # Two of three operations are within a host.
        latencies = 2 * within.latency_s + across.latency_s
        latency = np.where(by_levels, _ratio(latencies / 3, overall.latency_s), latency)
    if name == EMBEDDING:
        rows = gradients.rows[own][:, None]
        sparse = travels_sparse(gradients, own, columns)
        # Rounds of local steps send the rows that changed in any of their steps.
        touched = np.minimum(gradients.touched[own][:, None] * columns.rounds(), 1.0)
        # Horovod's optimizer gathers what backward has stored, indices and values at once.
        stored, as_stored = gradients.stored[own][:, None], sparse & columns.unplanned
        touched = np.where(as_stored & (stored > 0), stored, touched)
        gathered = resources.world_size * touched * rows
        row_bytes = size / np.maximum(rows, 1)
        sent = gathered * (row_bytes + np.where(sparse, 2 * _NUMBER_BYTES, _NUMBER_BYTES)) / 2
        # A dense table is sent whole if its rows would be more bytes; a sparse tensor never is.
        sent = np.where(sparse | (gathered < rows), sent, size)
        by_rows = (exchange == "rows") | sparse
        wire_s = np.where(by_rows, sent / overall.bandwidth_bytes_per_s, wire_s)
        after_s = np.where(by_rows, 0.0, after_s)
        passes = np.where(by_rows, _ROWS_PASSES * device_share, passes)
        planned = np.where(as_stored, 1.0, _OPERATIONS["rows"])
        operations = np.where(by_rows, planned, operations)
        alone = np.where(by_rows, 0.0, alone)
        latency = np.where(by_rows, 1.0, latency)  # rows are gathered among all ranks
    by_factors = travels_by_factors(name, gradients, own, columns, resources)
    codes = asked & (gradients.coded_factors[own][:, None] < 1)
    factor_bytes = gradients.factor_bytes[own][:, None]
    sent = np.where(codes, gradients.coded_factors[own][:, None], 1.0) * factor_bytes
    byte_s = np.full((1, len(columns)), 1 / overall.bandwidth_bytes_per_s)
    by_two_levels = columns.exchanges(name) == HIERARCHICAL_FACTORS
    if resources.even_levels and within is not None and across is not None:
        # The slots of a host exchange at once with those of other hosts, then what they have.
        gather_s = 1 / within.bandwidth_bytes_per_s + 1 / across.bandwidth_bytes_per_s
        byte_s = np.where(by_two_levels, gather_s, byte_s)
        gathers_s = (within.latency_s + across.latency_s) / 2
        own_latency = np.where(by_two_levels, _ratio(gathers_s, overall.latency_s), 1.0)
        latency = np.where(by_factors, own_latency, latency)
    wire_s = np.where(by_factors, resources.world_size * sent / 2 * byte_s, wire_s)
    sides = gradients.rows_of_matrix[own] + gradients.columns_of_matrix[own]
    batch = gradients.factor_bytes[own] / np.maximum(gradients.item_bytes[own] * sides, 1)
    product = device_share * (_FACTORS_PASSES + _FACTORS_ROW_PASSES * batch[:, None])
    products = resources.world_size * product
    # A rank makes one code of its factors, and decodes those of all.
    coding = np.where(codes, _FACTORS_CODING_PASSES * (1 + resources.world_size), 0.0)
    products = products + coding * factor_bytes / all_bytes
    passes = np.where(by_factors, products, passes)
    gathers = np.where(by_two_levels, _OPERATIONS[HIERARCHICAL_FACTORS], _OPERATIONS[FACTORS])
    operations = np.where(by_factors, gathers, operations)
    alone = np.where(by_factors, np.where(by_two_levels, 2 * _ALLTOALL_RESPONSES, 0.0), alone)
    return ExchangeCosts(wire_s, after_s, operations, alone, passes, latency)


def travels_sparse(
    gradients: Gradients, own: npt.NDArray[np.intp], columns: Columns
) -> npt.NDArray[np.bool_]:
    """Return whether gradients travel as sparse tensors, ``m x c``.

    Rounds of local steps exchange the changes of parameters, which are dense
    (``runtime/sync/averaging.py``).
    """
    every_step: npt.NDArray[np.bool_] = columns.rounds() == 1
    return gradients.sparse[own][:, None] & every_step


def travels_by_factors(
    name: str,
    gradients: Gradients,
    own: npt.NDArray[np.intp],
    columns: Columns,
    resources: Resources,
) -> npt.NDArray[np.bool_]:
    """Return whether gradients of a class are sent by factors, ``m x c``.

    Those whose factors are more bytes or cannot be gathered, or that are no product of factors, are
    sent as with ``allreduce``.
    """
    gathered = resources.world_size * gradients.factor_bytes[own]
    pay = (gathered > 0) & (gathered < gradients.most_factor_bytes[own])
    chosen: npt.NDArray[np.bool_] = pay[:, None] & np.isin(columns.exchanges(name), BY_FACTORS)
    return chosen


def _ratio(latency_s: float, overall_s: float) -> float:
    """Return the latency of operations of some ranks, times that of one among all.

    All ranks agree on them in the same cycles, whose shortest is that share of it.
    """
    if overall_s <= 0:
        return 1.0
    return COORDINATION_SHARE + (1 - COORDINATION_SHARE) * latency_s / overall_s


def _device_share(resources: Resources) -> float:
    return DEVICE_SHARE["accelerator" if resources.has_gpu else "cpu"]


def _passes(name: str, columns: Columns, resources: Resources) -> FloatArray:
    """Return the memory passes of a class's codec, as those of a processor, shape ``(c,)``."""
    codec = columns.codecs(name)
    passes = np.zeros(len(codec))
    for each, count in _PASSES.items():
        passes = np.where(codec == each, count, passes)
    if name != REST:
        few, more = _TOPK_PASSES
        tenfold = np.log10(columns.numbers(class_knob(name, "ratio")) / 1e-3)
        passes = np.where(codec == "topk", few + more * tenfold, passes)
    # Without NCCL processors add the halves of accelerators, too.
    added_there = (codec != "fp16") | resources.build.nccl
    return np.where(added_there, passes * _device_share(resources), passes)


def most_senders(resources: Resources) -> int:
    """Return the largest number of ranks that share a host's network link; 1 on a single host."""
    return max(host.slots for host in resources.hosts) if resources.several_hosts else 1


def _parts_share(
    resources: Resources, sent: FloatArray = _WHOLE, gathered: FloatArray = _WHOLE
) -> FloatArray:
    """Return the time of an alltoall and an allgather over that of a ring allreduce.

    The alltoall sends the share ``sent`` of the bytes, the allgather the share ``gathered``.

    With L ranks on each of several hosts, n in all, an alltoall sends L (n - L) / n bytes per byte
    from a host over the network, and an allgather (n - 1) / n. With Gloo a rank in an alltoall
    sends and receives alternately, so a single rank on a host uses one direction at a time. That
    explains the measurements with one rank per host (tables of 2026-11-22: 1.5 times a ring) and
    with two (``benchmarks/exchanges.py``: 1.17). It lasts until the slowest host has sent.
    """
    ranks = resources.world_size
    local = {host.slots for host in resources.hosts} if resources.several_hosts else {1}
    least = 1 if _sends_both_ways(resources) else 2
    alltoall = max(max(each, least) * (ranks - each) for each in local) / ranks
    allgather = (ranks - 1) / ranks
    return (sent * alltoall + gathered * allgather) / (2 * allgather)


def _parts_share_across(
    resources: Resources, sent: FloatArray = _WHOLE, gathered: FloatArray = _WHOLE
) -> FloatArray:
    """Return the same between hosts, where each rank of a host has its own part of the gradient."""
    local = min(host.slots for host in resources.hosts)
    one_way = 1.0 if _sends_both_ways(resources) else max(local, 2) / local
    return (sent * one_way + gathered) / 2


def _sends_both_ways(resources: Resources) -> bool:
    """Return whether a rank in an alltoall sends and receives at once, as with NCCL."""
    return resources.has_gpu and resources.build.nccl


def _wire_share(
    name: str,
    gradients: Gradients,
    own: npt.NDArray[np.intp],
    columns: Columns,
    ranks: int,
    parts: int = 1,
) -> FloatArray:
    """Return the bytes on the wire over those of an uncompressed ring, shape ``(m, c)``.

    Args:
        name: The class.
        gradients: All gradients of the model.
        own: Indices of the class's gradients.
        columns: The strategies.
        ranks: Number of ranks that reduce a tensor.
        parts: Number of parts of a tensor that are reduced in parallel.
    """
    codec = columns.codecs(name)
    item_bytes = gradients.item_bytes[own][:, None]
    share = np.ones((len(own), len(codec)))
    for each, value in _ELEMENT_BYTES.items():
        share = np.where(codec == each, value / item_bytes, share)
    if name != REST:
        ratio = columns.numbers(class_knob(name, "ratio"))
        gathered = ranks * ratio * _TOPK_BYTES / item_bytes / 2
        share = np.where(codec == "topk", gathered, share)
    if name == LARGE:
        # Each slice of its rows, and each part of one, has a right factor of its own.
        rows, width = gradients.rows_of_matrix[own], gradients.columns_of_matrix[own]
        sides = rows[:, None] + parts * columns.numbers("large_slices") * width[:, None]
        factors_bytes = columns.numbers("large_rank") * sides * item_bytes
        size = gradients.size_bytes[own][:, None]
        share = np.where(codec == "powersgd", factors_bytes / size, share)
    return share
