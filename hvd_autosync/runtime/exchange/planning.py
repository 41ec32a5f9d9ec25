"""Makes buckets from an exchange plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch

from hvd_autosync.errors import SpaceError
from hvd_autosync.extensions import EXCHANGES
from hvd_autosync.runtime.collectives.agreement import same_on_all
from hvd_autosync.runtime.collectives.levels import hosts_and_slots, two_levels
from hvd_autosync.runtime.collectives.operations import MOST_GATHERED_BYTES, rank, size
from hvd_autosync.runtime.collectives.warn_once import warn_on_rank_0
from hvd_autosync.runtime.exchange.buckets import (
    Bucket,
    FlatBucket,
    GradientBucket,
    slice_bounds,
    split_evenly,
    wire_dtype,
)
from hvd_autosync.runtime.exchange.codecs import make_codec
from hvd_autosync.runtime.exchange.exchanges import (
    Exchange,
    Flat,
    Hierarchical,
    Reduction,
    Scaling,
    allreduce,
    own_bounds,
)
from hvd_autosync.runtime.exchange.factors import FactorsBucket
from hvd_autosync.runtime.exchange.gathering import Gathering, LevelsGathering
from hvd_autosync.runtime.exchange.lossless_sum import LosslessSum
from hvd_autosync.runtime.exchange.rows import RowsBucket
from hvd_autosync.runtime.exchange.zero_bucket import ZeroBucket, can_be_owned
from hvd_autosync.runtime.measure.arithmetic import arithmetic
from hvd_autosync.runtime.patches.linear import LinearLayer
from hvd_autosync.search_space.exchange_plan import (
    BY_FACTORS,
    HIERARCHICAL_FACTORS,
    LARGE,
    PARAMETER_CLASSES,
    ClassPlan,
    ExchangePlan,
    matrix_shape,
)

#: Size of buckets, bytes, for what Horovod cannot fuse, if the plan has no number of buckets.
_BUCKET_BYTES = 8 * 1024 * 1024

#: Most elements whose numbers fit into the messages of ``topk``.
_MOST_NUMBERED = 2**31 - 1

#: What gradients in one bucket have in common.
_Lane: TypeAlias = tuple[ClassPlan, torch.dtype, torch.device]


class Planning:
    """Makes the buckets of a plan.

    Args:
        plan: The plan.
        names: Parameter -> its name and its class.
        scaling: Factors of the reductions.
        on_change: Called when an exchange sees that the script changes gradients that it has sent.
    """

    def __init__(
        self,
        plan: ExchangePlan,
        names: Mapping[torch.nn.Parameter, tuple[str, str]],
        scaling: Scaling,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan = plan
        self._on_change = on_change
        self._names = names
        self._scaling = scaling

    def buckets(
        self,
        order: Sequence[torch.nn.Parameter],
        sparse: Mapping[torch.nn.Parameter, int],
        shared: Collection[torch.nn.Parameter] = (),
        linear: Collection[LinearLayer] = (),
    ) -> list[Bucket]:
        """Return the buckets for parameters in the order in which their gradients arrive.

        A collective under PowerSGD, and with factors over two levels.

        Args:
            order: Every parameter, once.
            sparse: Those whose gradients are sparse tensors, with the sparse dimensions of these.
            shared: Those of which other parameters share memory.
            linear: The watched layers whose gradients are sent by factors.
        """
        low_rank = [p for p in order if self._plan.of(self._names[p][1]).codec == "powersgd"]
        alike = not low_rank or _multiply_alike(low_rank[0].device, self._name(low_rank[0]))
        lanes: dict[_Lane, list[torch.nn.Parameter]] = {}
        gathering = self._gathering() if linear else Gathering(size())
        buckets: list[Bucket] = [self._of_layer(layer, gathering) for layer in linear]
        by_factors = {parameter for bucket in buckets for parameter in bucket.parameters}
        for parameter in order:
            if parameter in by_factors:
                continue
            plan = self._plan.of(self._names[parameter][1])
            if plan.codec == "powersgd" and not alike:
                plan = replace(plan, codec="none")
            if plan.exchange in BY_FACTORS:  # it belongs to no linear layer
                plan = replace(plan, exchange="allreduce")
            if plan.exchange == "rows" and parameter.dtype == torch.float16:
                plan = replace(plan, exchange="allreduce")  # sums of Horovod's may overflow
            if plan.exchange == "sharded" and (not can_be_owned(parameter) or parameter in shared):
                plan = ClassPlan()  # owners of shared memory would overwrite each other's
            if plan.lossless and not _codes_bits(plan, parameter):
                plan = replace(plan, lossless=False)
            if plan.exchange == "rows" or parameter in sparse:
                rows = RowsBucket(
                    self._name(parameter),
                    parameter,
                    self._scaling,
                    sparse_dimensions=sparse.get(parameter, 0),
                )
                buckets.append(rows)
            else:
                lane = (plan, parameter.dtype, parameter.device)
                lanes.setdefault(lane, []).append(parameter)
        total = sum(_bytes(parameter) for members in lanes.values() for parameter in members)
        for (plan, _, _), members in lanes.items():
            buckets += self._of_lane(plan, members, total)
        return buckets

    def _gathering(self) -> Gathering:
        if self._plan.of(LARGE).exchange == HIERARCHICAL_FACTORS:
            return LevelsGathering(hosts_and_slots(), rank())
        return Gathering(size())

    def _of_layer(self, layer: LinearLayer, gathering: Gathering) -> Bucket:
        parameters = [p for p in (layer.weight, layer.bias) if p is not None]
        name = self._name(parameters[0])
        lossless = self._plan.of(self._names[parameters[0]][1]).lossless
        return FactorsBucket(
            name, layer, parameters, self._scaling, rank(), gathering, lossless=lossless
        )

    def _of_lane(
        self, plan: ClassPlan, members: list[torch.nn.Parameter], total: int
    ) -> list[Bucket]:
        sliced, whole = [], []
        for parameter in members:
            slices = max(plan.slices, math.ceil(_load(plan, parameter)))
            if slices > 1:
                sliced += self._slices(plan, parameter, slices)
            else:
                whole.append(parameter)
        return sliced + (self._whole(plan, whole, total) if whole else [])

    def _whole(
        self, plan: ClassPlan, members: list[torch.nn.Parameter], total: int
    ) -> list[Bucket]:
        own = sum(map(_bytes, members))
        if self._plan.buckets and plan.codec != "powersgd":  # powersgd needs single matrices
            count = max(round(self._plan.buckets * own / max(total, 1)), 1)
        elif plan.codec == "powersgd" or plan.plain:
            count = len(members)
        else:
            count = math.ceil(own / _BUCKET_BYTES)
        if self._plan.rule == "size":
            members = sorted(members, key=_bytes, reverse=True)
        if count >= len(members):
            groups = [[parameter] for parameter in members]
        else:
            indices = split_evenly([_bytes(parameter) for parameter in members], count)
            groups = [[members[index] for index in group] for group in indices]
        return [
            self._bucket(plan, self._name(*run), run)
            for group in groups
            for run in _runs_to_gather(plan, group)
        ]

    def _slices(self, plan: ClassPlan, parameter: torch.nn.Parameter, count: int) -> list[Bucket]:
        unit = matrix_shape(parameter.shape)[1] if plan.codec == "powersgd" else 1
        return [
            self._bucket(plan, f"{self._name(parameter)}[{index}]", [parameter], piece)
            for index, piece in enumerate(slice_bounds(parameter.numel(), count, unit))
        ]

    def _bucket(
        self,
        plan: ClassPlan,
        name: str,
        group: Sequence[torch.nn.Parameter],
        bounds: tuple[int, int] | None = None,
    ) -> Bucket:
        first = group[0]
        whole = len(group) == 1 and bounds is None
        if whole and plan == ClassPlan() and wire_dtype(first.dtype) == first.dtype:
            return GradientBucket(name, first, self._scaling)
        if plan.exchange == "sharded":
            return ZeroBucket(name, group, self._scaling, size(), bounds)
        count = bounds[1] - bounds[0] if bounds else sum(p.numel() for p in group)
        like = first.new_empty(0, dtype=wire_dtype(first.dtype))
        columns = matrix_shape(first.shape)[1] if len(group) == 1 else 1
        plain = Flat(self._scaling)
        exchange: Exchange | None = None
        coded_from = 0
        levels = two_levels() if plan.exchange == "hierarchical" else None
        unit = 1 if plan.codec == "none" else columns
        if levels is not None and count >= unit * levels.within.size():
            own = own_bounds(count, unit, levels)
            coded_from = own[0]
            codec = make_codec(plan, own[1] - own[0], like, levels.across.size(), columns)
            exact: Reduction = LosslessSum(self._on_change) if plan.lossless else allreduce
            exchange = Hierarchical(levels, own, like, self._scaling, codec or exact)
        elif plan.exchange in EXCHANGES:
            codec, exchange = None, EXCHANGES[plan.exchange](count, like, self._scaling)
        elif plan.exchange != "allreduce" and levels is None:
            raise SpaceError(
                f"no exchange is called {plan.exchange!r} on this rank",
                hint="Load the file that adds it on every rank: HVD_AUTOSYNC_EXTENSIONS=FILE.",
            )
        else:
            codec = make_codec(plan, count, like, size(), columns)
            coded = LosslessSum(self._on_change) if plan.lossless else codec
            exchange = Flat(self._scaling, coded) if coded else None
        return FlatBucket(name, group, plain, exchange, codec, bounds, coded_from)

    def plain(self, parameters: Sequence[torch.nn.Parameter]) -> list[Bucket]:
        """Buckets of one gradient each, for plain allreduces."""
        scaling = self._scaling
        return [FlatBucket(self._name(p), (p,), Flat(scaling)) for p in parameters]

    def _name(self, *parameters: torch.nn.Parameter) -> str:
        first = self._names[parameters[0]][0]
        return first if len(parameters) == 1 else f"{first}+{len(parameters) - 1}"


def layout(plan: ExchangePlan, parameters: Sequence[torch.nn.Parameter]) -> list[str]:
    """Describe of each parameter what buckets of several follow from, and ranks may differ in.

    Horovod's own exchange of single gradients does without, so nothing is described for plans that
    make none.
    """
    if not plan.buckets and all(_singly(plan.of(name)) for name in PARAMETER_CLASSES):
        return [""] * len(parameters)
    numbers: dict[torch.device, int] = {}  # in order: another device elsewhere may be as well
    devices = [numbers.setdefault(p.device, len(numbers)) for p in parameters]
    ordered = [not plan.sharded or p.is_contiguous() for p in parameters]
    return [
        f"on device {device} of the model{'' if whole else ', not contiguous'}"
        for device, whole in zip(devices, ordered, strict=True)
    ]


def _singly(plan: ClassPlan) -> bool:
    """Return whether no bucket of a class holds several gradients, if none are asked for."""
    exchanges = ("allreduce", "rows", *BY_FACTORS)
    single = plan.exchange in exchanges and plan.codec in ("none", "powersgd")
    return single and not plan.lossless


def share_memory(parameters: Sequence[torch.nn.Parameter]) -> list[bool]:
    """Return for each parameter whether another one of them shares any of its memory."""
    shared: set[int] = set()
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + _span(p), place)
        for place, p in enumerate(parameters)
        if p.numel()
    )
    last = ("", 0, 0, -1)  # of those before, the one that ends last
    for span in spans:
        same_device = span[0] == last[0]
        if same_device and span[1] < last[2]:
            shared |= {span[3], last[3]}
        if not same_device or span[2] > last[2]:
            last = span
    return [place in shared for place in range(len(parameters))]


def _span(parameter: torch.nn.Parameter) -> int:
    """Return the bytes from the first element to the end of the last one."""
    steps = zip(parameter.shape, parameter.stride(), strict=True)
    return (1 + sum((count - 1) * stride for count, stride in steps)) * parameter.element_size()


def _multiply_alike(device: torch.device, name: str) -> bool:
    """Return whether ranks get the same bits from the same factors; a collective."""
    alike = same_on_all(arithmetic(device), f"arithmetic.{name}")
    if not alike:
        warn_on_rank_0(
            "processors, libraries or numbers of threads differ between the ranks, so low-rank "
            "gradients would: the codec powersgd is not used"
        )
    return alike


def _codes_bits(plan: ClassPlan, parameter: torch.nn.Parameter) -> bool:
    """Return whether lossless codes apply: to sums of float32 numbers that no codec changes."""
    summed = plan.exchange in ("allreduce", "hierarchical") and plan.codec == "none"
    return summed and wire_dtype(parameter.dtype) == torch.float32


def _load(plan: ClassPlan, parameter: torch.nn.Parameter) -> float:
    """Return which share of the largest bucket a parameter takes; above 1, it has to be cut."""
    gathered = _gathered_bytes(plan, parameter) / MOST_GATHERED_BYTES
    return max(gathered, parameter.numel() / _MOST_NUMBERED) if plan.codec == "topk" else gathered


def _gathered_bytes(plan: ClassPlan, parameter: torch.nn.Parameter) -> int:
    """Return the most bytes that a parameter adds to the result of an allgather of its exchange."""
    exchanges, codecs = ("sharded", "hierarchical"), ("bf16", "int8")
    gathers = plan.exchange in exchanges or plan.codec in codecs or plan.lossless
    whole = parameter.numel() * wire_dtype(parameter.dtype).itemsize if gathers else 0
    if plan.codec != "topk":
        return whole
    return max(whole, 8 * size() * round(plan.ratio * parameter.numel()))


def _runs_to_gather(
    plan: ClassPlan, group: Sequence[torch.nn.Parameter]
) -> list[list[torch.nn.Parameter]]:
    """Split a group, in order, into runs whose exchange can be gathered and numbered."""
    runs: list[list[torch.nn.Parameter]] = [[]]
    reached = 0.0
    for parameter in group:
        own = _load(plan, parameter)
        reached += own
        if runs[-1] and reached > 1:
            runs.append([])
            reached = own
        runs[-1].append(parameter)
    return runs


def _bytes(parameter: torch.nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size()
