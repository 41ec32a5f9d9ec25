"""Many strategies as columns of the knobs that have a term of the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hvd_autosync.cost.timeline import FloatArray
from hvd_autosync.search_space import SearchSpace, Value
from hvd_autosync.search_space.catalogue import REGISTRY
from hvd_autosync.search_space.conditions import active
from hvd_autosync.search_space.exchange_plan import BY_FACTORS, NOT_FOR_REPLICAS, class_knob

#: The default of each knob whose declaration names a term. The cost model has no other inputs.
_DEFAULTS = {spec.name: spec.knob.default for spec in REGISTRY if spec.cost}
#: Those of them that are no settings of Horovod's: at their defaults its own optimizer is used.
_PLANNED = {spec.name for spec in REGISTRY if spec.cost and spec.knob.group != "horovod"}
BoolArray = npt.NDArray[np.bool_]


class Columns:
    """The values of knobs over some strategies; an absent knob has its default.

    Args:
        count: Number of strategies, ``c``.
        values: Knob name -> one value per strategy, shape ``(c,)``.
    """

    def __init__(self, count: int, values: Mapping[str, npt.NDArray[Any]]) -> None:
        self._count = count
        self._values = values

    @classmethod
    def of(cls, strategies: Sequence[Mapping[str, Value]]) -> Columns:
        """Return the columns of ``c`` strategies."""
        values = {}
        for name in _DEFAULTS.keys() & {name for strategy in strategies for name in strategy}:
            column = [strategy.get(name, _DEFAULTS[name]) for strategy in strategies]
            values[name] = np.array(column, dtype=object)
        return cls(len(strategies), values)

    @classmethod
    def at(cls, space: SearchSpace, points: FloatArray) -> Columns:
        """Return the columns of the strategies at discretized points, shape ``c x d``.

        A knob that is switched off has the default of the catalogue, as in :meth:`of`; that of the
        space is another one if a space file restricts the knob.
        """
        count, on = len(points), active(space, points)
        values = {name: np.full(count, value, dtype=object) for name, value in space.fixed}
        for index, knob in enumerate(space.knobs):
            if knob.name not in _DEFAULTS:
                continue
            unique, inverse = np.unique(points[:, index], return_inverse=True)
            decoded = [knob.from_unit(float(position)) for position in unique]
            column = np.array(decoded, dtype=object)[inverse]
            column[~on[:, index]] = _DEFAULTS[knob.name]
            values[knob.name] = column
        return cls(count, values)

    def __len__(self) -> int:
        return self._count

    def parts(self, count: int) -> Iterator[Columns]:
        """Yield the columns of ``count`` strategies at a time."""
        for begin in range(0, self._count, count):
            own = slice(begin, begin + count)
            values = {name: column[own] for name, column in self._values.items()}
            yield Columns(len(range(self._count)[own]), values)

    def numbers(self, knob: str) -> FloatArray:
        """Return the values of a numeric knob, shape ``(c,)``.

        Raises:
            KeyError: No knob of that name has a term of the cost model.
        """
        return self._column(knob).astype(np.float64)

    def words(self, knob: str) -> npt.NDArray[np.str_]:
        """Return the values of a categorical knob, shape ``(c,)``.

        Raises:
            KeyError: No knob of that name has a term of the cost model.
        """
        return self._column(knob).astype(np.str_)

    def rounds(self) -> FloatArray:
        """Return the steps of a round of local steps, ``(c,)``; 1: ranks sync after every step."""
        return np.minimum(self.numbers("local_steps"), self.numbers("local_cap"))

    def bsp_share(self) -> FloatArray:
        """Return the share of the work under BSP, shape ``(c,)``.

        It is 1 if there is a share but the total work is unknown
        (:class:`hvd_autosync.search_space.protocol.Protocol`).
        """
        share, known = self.numbers("sync_share"), self.numbers("total_samples") > 0
        always = (self.words("protocol") == "bsp") | ((share > 0) & ~known)
        return np.where(always, 1.0, share)

    @cached_property
    def replicated(self) -> BoolArray:
        """Whether replicas may differ, so that every rank has all parameters, shape ``(c,)``.

        The rule is that of :attr:`SyncPlan.replicas_may_differ
        <hvd_autosync.search_space.sync_plan.SyncPlan.replicas_may_differ>`.
        """
        asked = (self.words("protocol") != "bsp") & (self.numbers("sync_share") < 1)
        grows = (self.numbers("local_power") > 0) & (self.numbers("local_cap") > 1)
        rounds = grows | (self.rounds() > 1)
        apart: BoolArray = rounds | asked | (self.words("stragglers") != "none")
        return apart

    @cached_property
    def unplanned(self) -> BoolArray:
        """Whether Horovod's own optimizer exchanges the gradients, shape ``(c,)``."""
        found = np.ones(self._count, dtype=np.bool_)
        for name in _PLANNED & self._values.keys():
            found &= np.array([value == _DEFAULTS[name] for value in self._values[name]])
        return found

    def exchanges(self, parameter_class: str) -> npt.NDArray[np.str_]:
        """Return the exchange of one class's gradients, shape ``(c,)``.

        Replicated parameters have fewer (``replicated`` in ``search_space/exchange_plan.py``).
        """
        asked = self.words(class_knob(parameter_class, "exchange"))
        return np.where(self.replicated & np.isin(asked, NOT_FOR_REPLICAS), "allreduce", asked)

    def exchanges_beside_factors(self, parameter_class: str) -> npt.NDArray[np.str_]:
        """Return that of gradients that are no products of factors, shape ``(c,)``."""
        asked = self.exchanges(parameter_class)
        return np.where(np.isin(asked, BY_FACTORS), "allreduce", asked)

    def codecs(self, parameter_class: str) -> npt.NDArray[np.str_]:
        """Return the codec of one class's gradients or changes, shape ``(c,)``.

        Averages have fewer (``for_changes`` in ``search_space/exchange_plan.py``).
        """
        asked = self.words(class_knob(parameter_class, "codec"))
        return np.where((self.rounds() > 1) & (asked == "fp16"), "bf16", asked)

    def lossless(self, parameter_class: str) -> BoolArray:
        """Return whether one class's gradients travel as lossless codes, shape ``(c,)``."""
        asked = self.words(class_knob(parameter_class, "lossless")) == "True"
        uncoded = self.codecs(parameter_class) == "none"
        known = ("allreduce", "hierarchical", *BY_FACTORS)
        found: BoolArray = asked & uncoded & np.isin(self.exchanges(parameter_class), known)
        return found

    def _column(self, knob: str) -> npt.NDArray[Any]:
        default, values = _DEFAULTS[knob], self._values.get(knob)
        return np.full(self._count, default, dtype=object) if values is None else values
