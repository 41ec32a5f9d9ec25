"""The exchange plan of a strategy: one plan for each class of parameters, and the buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final, TypeAlias

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.model_profile import ModelProfile, ParameterProfile

#: Classes of parameters with separate knobs; parameters in no other class are in "rest".
EMBEDDING, LARGE, REST = PARAMETER_CLASSES = ("embedding", "large", "rest")

#: Class -> names of its parameters, ``*`` and ``?`` allowed; the first matching class counts.
Classes: TypeAlias = Mapping[str, tuple[str, ...]]

#: Exchanges of what gradients of linear layers are products of: among all ranks at once, and across
#: hosts before it is within them.
FACTORS, HIERARCHICAL_FACTORS = BY_FACTORS = ("factors", "hierarchical_factors")
#: Exchanges that need several hosts with several ranks each, equally many.
OF_TWO_LEVELS = ("hierarchical", HIERARCHICAL_FACTORS)
#: Exchanges of shards of parameters, and of gradients that are not averages of replicas.
NOT_FOR_REPLICAS = ("sharded", *BY_FACTORS)
#: Most bytes of an allgather's result, and of a broadcast of bytes. Under Gloo Horovod counts in 32
#: bits (``GlooAllgather::Execute``, ``GlooBroadcast::Execute``); headers of messages have room up
#: to there.
MOST_GATHERED_BYTES: Final = 2**31 - 2**20
#: A matrix counts as an embedding if a batch touches at most this share of its rows.
_FEW_ROWS = 0.5
#: Least bytes of an embedding or a large matrix; smaller ones gain nothing from a separate class.
_LARGE_BYTES = 256 * 1024


@dataclass(frozen=True)
class ClassPlan:
    """The exchange of one class's gradients.

    Attributes:
        exchange: ``allreduce``, ``hierarchical``, ``sharded``, ``rows``, ``factors`` or
            ``hierarchical_factors``.
        slices: Number of slices into which each tensor is cut.
        codec: ``none`` or the name of a codec.
        ratio: Share of the elements that the codec ``topk`` sends.
        rank: Rank of the codec ``powersgd``.
        lossless: Whether ``allreduce`` and ``hierarchical``, without a codec, and exchanges by
            factors send lossless codes.
    """

    exchange: str = "allreduce"
    slices: int = 1
    codec: str = "none"
    ratio: float = 0.01
    rank: int = 2
    lossless: bool = False

    @property
    def plain(self) -> bool:
        """Whether gradients travel by plain allreduces, which Horovod can fuse."""
        return (self.exchange, self.codec, self.lossless) == ("allreduce", "none", False)


@dataclass(frozen=True)
class ExchangePlan:
    """The exchange of all gradients of a model.

    Attributes:
        buckets: Number of buckets; 0: each gradient separately, as in Horovod, which fuses them.
        rule: ``ordered``: gradients in the order of their arrival, where each bucket gets an equal
            share of the bytes ("ordered-balanced" in AutoSync's code); ``size``: gradients of
            similar sizes together.
        order: ``arrival``: buckets are sent when they are complete; ``priority``: those of the
            first layers first, with deferred updates.
        embedding: Plan of tables of which a batch touches few rows.
        large: Plan of large matrices.
        rest: Plan of all other parameters.
    """

    buckets: int = 0
    rule: str = "ordered"
    order: str = "arrival"
    embedding: ClassPlan = ClassPlan()
    large: ClassPlan = ClassPlan()
    rest: ClassPlan = ClassPlan()

    def of(self, parameter_class: str) -> ClassPlan:
        """Return the plan of one class."""
        plan: ClassPlan = getattr(self, parameter_class)
        return plan

    @property
    def two_levels(self) -> bool:
        """Whether the plan needs process sets within hosts and across them."""
        return self._has("hierarchical")

    @property
    def even_levels(self) -> bool:
        """Whether the plan fits only several hosts with several ranks each, equally many."""
        return self._has(*OF_TWO_LEVELS)

    @property
    def sharded(self) -> bool:
        """Whether ranks own shards of parameters."""
        return self._has("sharded")

    @property
    def by_factors(self) -> bool:
        """Whether gradients of linear layers are sent by factors."""
        return self._has(*BY_FACTORS)

    @property
    def lossy(self) -> bool:
        """Whether a class has a lossy codec."""
        return any(self.of(name).codec != "none" for name in PARAMETER_CLASSES)

    def _has(self, *exchanges: str) -> bool:
        return any(self.of(name).exchange in exchanges for name in PARAMETER_CLASSES)


def replicated(plan: ExchangePlan) -> ExchangePlan:
    """Return ``plan`` for replicas that may train apart, with all parameters on every rank.

    The exchange ``sharded`` and those by factors become ``allreduce``, and no update is deferred.
    """
    embedding, large, rest = (
        replace(own, exchange="allreduce") if own.exchange in NOT_FOR_REPLICAS else own
        for own in map(plan.of, PARAMETER_CLASSES)
    )
    return replace(plan, order="arrival", embedding=embedding, large=large, rest=rest)


def for_changes(plan: ExchangePlan) -> ExchangePlan:
    """Return ``plan`` for changes of parameters, where the codec ``fp16`` becomes ``bf16``.

    Changes are gradients times the learning rate. Half precision rounds them off below 6e-5, and
    what an average lacks is lost; ``bf16`` has the range of float32.
    """
    embedding, large, rest = (
        replace(own, codec="bf16") if own.codec == "fp16" else own
        for own in map(plan.of, PARAMETER_CLASSES)
    )
    return replace(plan, embedding=embedding, large=large, rest=rest)


def class_knob(parameter_class: str, attribute: str) -> str:
    """Return the name of the knob for one attribute of a class's plan."""
    return f"{parameter_class}_{attribute}"


def parameter_classes(model: ModelProfile) -> Classes:
    """Classify a model's parameters by its profile; parameters of "rest" are left out."""
    members: dict[str, list[str]] = {}
    for parameter in model.parameters:
        name = _class_of(parameter)
        if name != REST:
            members.setdefault(name, []).append(parameter.name)
    return {name: tuple(names) for name, names in members.items()}


def _class_of(parameter: ParameterProfile) -> str:
    if parameter.sparse:
        return EMBEDDING
    if len(parameter.shape) < 2 or parameter.size_bytes < _LARGE_BYTES:
        return REST
    few = len(parameter.shape) == 2 and parameter.touched_rows <= _FEW_ROWS
    return EMBEDDING if few else LARGE


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a tensor as a matrix: its first dimension, and all others."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (math.prod(shape), 1)


def most_factor_bytes(size_bytes: int) -> int:
    """Return the bytes below which the factors of all ranks are sent in place of a gradient.

    They are fewer than a ring's, and can be gathered: each of r ranks receives (r - 1) / r of all
    factors, and in a ring sends 2 (r - 1) / r of the gradient.

    Args:
        size_bytes: Bytes of the gradient.
    """
    return min(2 * size_bytes, MOST_GATHERED_BYTES)


def can_send_factors(parameter: ParameterProfile, ranks: int) -> bool:
    """Return whether so many ranks send a gradient by factors, if its exchange asks for them."""
    return 0 < ranks * parameter.factor_bytes < most_factor_bytes(parameter.size_bytes)


def check_parameters(plan: ExchangePlan, shapes: Mapping[str, tuple[str, Sequence[int]]]) -> None:
    """Check that a plan fits the parameters of a model.

    Args:
        plan: The plan.
        shapes: Name of each parameter -> its class and shape.

    Raises:
        SpaceError: A codec's rank exceeds that of a matrix.
    """
    for name, (parameter_class, shape) in shapes.items():
        own = plan.of(parameter_class)
        most = min(matrix_shape(shape))
        if own.codec == "powersgd" and len(shape) > 1 and own.rank > most:
            raise SpaceError(
                f"{class_knob(parameter_class, 'rank')} = {own.rank} is above the rank of {name}, "
                f"which has the shape {' x '.join(map(str, shape))}",
                hint=f"Choose {most} or less, or put {name} into another class.",
            )


def class_of(name: str, classes: Classes) -> str:
    """Return the class of the parameter ``name``."""
    for parameter_class in PARAMETER_CLASSES:
        for pattern in classes.get(parameter_class, ()):
            if name == pattern or fnmatchcase(name, pattern):
                return parameter_class
    return REST
