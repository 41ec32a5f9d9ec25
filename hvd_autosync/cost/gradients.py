"""The gradients of a model as arrays, in the order of their arrival."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvd_autosync.cost.timeline import FloatArray
from hvd_autosync.search_space import ModelProfile
from hvd_autosync.search_space.exchange_plan import (
    REST,
    matrix_shape,
    most_factor_bytes,
    parameter_classes,
)


@dataclass(frozen=True)
class Gradients:
    """One entry per parameter whose gradient is exchanged, all of shape ``(k,)``.

    Attributes:
        names: Names of the parameters.
        classes: Parameter class.
        size_bytes: Bytes of the dense gradient.
        ready_s: Arrival, seconds from the start of backward; nondecreasing.
        rows: Length of the first dimension.
        sparse: Whether it is a sparse tensor, which is sent by rows in any case.
        touched: Share of the rows that one rank touches in a step.
        stored: Share of the rows that a sparse gradient stores, with repetitions; 0 if unknown.
        rows_of_matrix: Rows of the matrix that PowerSGD factorizes.
        columns_of_matrix: Columns of that matrix.
        item_bytes: Bytes of an element.
        factor_bytes: Bytes of one rank's factors in a step; 0 if it is no product of factors.
        most_factor_bytes: Bytes below which all ranks' factors are sent in its place.
        coded_factors: Share of the factors' bytes that a lossless code has.
        coded: Share of the gradient's bytes that a lossless code has.
        summed: The same, for a sum of several ranks.
        coding_s: Seconds to make such a code and to decode it; 0 if unknown.
    """

    names: tuple[str, ...]
    classes: npt.NDArray[np.str_]
    size_bytes: FloatArray
    ready_s: FloatArray
    rows: FloatArray
    sparse: npt.NDArray[np.bool_]
    touched: FloatArray
    stored: FloatArray
    rows_of_matrix: FloatArray
    columns_of_matrix: FloatArray
    item_bytes: FloatArray
    factor_bytes: FloatArray
    most_factor_bytes: FloatArray
    coded_factors: FloatArray
    coded: FloatArray
    summed: FloatArray
    coding_s: FloatArray

    @classmethod
    def of(cls, model: ModelProfile) -> Gradients:
        """Return the gradients of a profile; unknown arrivals are spread over backward."""
        members = parameter_classes(model)
        classes = {name: each for each, names in members.items() for name in names}
        arrived = sorted(
            (p for p in model.parameters if p.ready_order >= 0), key=lambda p: p.ready_order
        )

        def column(values: list[float]) -> FloatArray:
            return np.array(values, dtype=np.float64)

        spread = np.linspace(0.0, np.nan_to_num(model.backward_s), len(arrived) + 1)[1:]
        timed = column([p.ready_s for p in arrived])
        ready = np.where(np.isfinite(timed), timed, spread)
        return cls(
            names=tuple(p.name for p in arrived),
            classes=np.array([classes.get(p.name, REST) for p in arrived], dtype=np.str_),
            size_bytes=column([p.size_bytes for p in arrived]),
            ready_s=np.maximum.accumulate(ready),
            rows=column([p.shape[0] if p.shape else 1 for p in arrived]),
            sparse=np.array([p.sparse for p in arrived], dtype=np.bool_),
            touched=column([p.touched_rows for p in arrived]),
            stored=column([p.stored_rows for p in arrived]),
            rows_of_matrix=column([matrix_shape(p.shape)[0] for p in arrived]),
            columns_of_matrix=column([matrix_shape(p.shape)[1] for p in arrived]),
            item_bytes=column([p.item_bytes for p in arrived]),
            factor_bytes=column([p.factor_bytes for p in arrived]),
            most_factor_bytes=column([most_factor_bytes(p.size_bytes) for p in arrived]),
            coded_factors=column([p.coded_factors_share for p in arrived]),
            coded=column([p.coded_share for p in arrived]),
            summed=column([p.summed_share for p in arrived]),
            coding_s=column([p.coding_s for p in arrived]),
        )
