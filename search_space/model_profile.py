"""Model profiles: a model's parameters and the times at which their gradients arrive."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hvd_autosync.search_space.records import LEFT_OUT, OrNan, Real, Record

_ITEM_BYTES = {
    "complex128": 16,
    "float64": 8,
    "int64": 8,
    "complex64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class ParameterProfile(Record):
    """One parameter that the job's optimizer reduces.

    Attributes:
        name: Name in the script (``model.named_parameters()``).
        shape: Shape of the parameter.
        dtype: Type of the parameter, without ``torch.``.
        sparse: Whether the gradient is a sparse tensor.
        ready_order: Position of the gradient's arrival in backward, from 0; last for a trainable
            parameter that got none, for which zeros are exchanged; -1 for a frozen one.
        ready_s: Median seconds from the start of backward to the arrival; NaN if none arrived.
        touched_rows: Share of the rows with a nonzero gradient in a step on rank 0; 1 for a
            parameter without rows.
        stored_rows: Of a sparse gradient, rows that backward stores over all rows, in which a row
            that is used twice is there twice; 0 where that was not measured.
        factor_bytes: For the weight of a linear layer whose gradient is the product of the layer's
            inputs and output gradients: bytes of these in a step on rank 0; else 0.
        coded_factors_share: Share of these bytes that their lossless code has; 1 if they do not
            repeat.
        coded_share: Share of the gradient's bytes that its lossless code has on rank 0; 1 if its
            bits do not repeat.
        summed_share: The same, for the sum of several ranks.
        coding_s: Seconds of processor time in which rank 0 makes such a code and puts the gradient
            together again; 0 where that was not measured.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sparse: bool = False
    ready_order: int = -1
    ready_s: OrNan = math.nan
    touched_rows: Real = 1.0
    stored_rows: Real = field(default=0.0, metadata=LEFT_OUT)
    factor_bytes: int = field(default=0, metadata=LEFT_OUT)
    coded_factors_share: Real = field(default=1.0, metadata=LEFT_OUT)
    coded_share: Real = field(default=1.0, metadata=LEFT_OUT)
    summed_share: Real = field(default=1.0, metadata=LEFT_OUT)
    coding_s: Real = field(default=0.0, metadata=LEFT_OUT)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of an element."""
        return _ITEM_BYTES.get(self.dtype, 4)

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense gradient."""
        return self.elements * self.item_bytes


@dataclass(frozen=True)
class ModelProfile(Record):
    """The model of a job's optimizer, measured on rank 0 in the default trial.

    Attributes:
        parameters: The parameters, in the optimizer's order.
        forward_s: Median seconds from the end of a step to the start of backward (data loading
            included).
        backward_s: Median seconds of backward.
        wrapped: Whether the job uses ``hvd.DistributedOptimizer``. Otherwise it calls collectives
            itself, and only job-wide settings can be tuned.
        has_epochs: Whether epochs were seen, by a ``DataLoader`` with a length or a call of
            ``hvd_autosync.average()``; no local step is made before.
        needs_launcher: Whether the script depends on the launcher of its ranks, as by mpi4py, whose
            world has one rank under Gloo.
    """

    parameters: tuple[ParameterProfile, ...] = ()
    forward_s: OrNan = math.nan
    backward_s: OrNan = math.nan
    wrapped: bool = True
    has_epochs: bool = field(default=True, metadata=LEFT_OUT)
    needs_launcher: bool = field(default=False, metadata=LEFT_OUT)

    @property
    def size_bytes(self) -> int:
        """Bytes of all dense gradients."""
        return sum(parameter.size_bytes for parameter in self.parameters)

    @property
    def has_sparse(self) -> bool:
        """Whether any gradient is sparse."""
        return any(parameter.sparse for parameter in self.parameters)

    def identity(self) -> list[Any]:
        """Return the fields by which tuning compares models: names, shapes and types, no times."""
        return [[p.name, list(p.shape), p.dtype, p.sparse] for p in self.parameters]
