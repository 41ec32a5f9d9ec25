"""Model profiles: a model's parameters and the times at which their gradients arrive."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

_ITEM_BYTES = {
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
    "bool": 1,
}

_LATER_SHARES = ("coded_share", "summed_share")


@dataclass(frozen=True)
class ParameterProfile:
    """One parameter that the job's optimizer reduces.

    Attributes:
        name: Name in the script (``model.named_parameters()``).
        shape: Shape of the parameter.
        dtype: Type of the parameter, without ``torch.``.
        sparse: Whether the gradient is a sparse tensor.
        ready_order: Position of the gradient's arrival in backward, from 0; -1 without a gradient.
        ready_s: Median seconds from the start of backward to the arrival; NaN without a gradient.
        touched_rows: Share of the rows with a nonzero gradient in a step on rank 0; 1 for a
            parameter without rows.
        factor_bytes: For the weight of a linear layer whose gradient is the product of the layer's
            inputs and output gradients: bytes of these in a step on rank 0; else 0.
        coded_share: Share of the gradient's bytes that its lossless code has on rank 0; 1 if its
            bits do not repeat.
        summed_share: The same, for the sum of several ranks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    sparse: bool = False
    ready_order: int = -1
    ready_s: float = math.nan
    touched_rows: float = 1.0
    factor_bytes: int = 0
    coded_share: float = 1.0
    summed_share: float = 1.0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes of the dense gradient."""
        return self.elements * _ITEM_BYTES.get(self.dtype, 4)


@dataclass(frozen=True)
class ModelProfile:
    """The model of a job's optimizer, measured on rank 0 in the default trial.

    Attributes:
        parameters: The parameters, in the optimizer's order.
        forward_s: Median seconds from the end of a step to the start of backward (data loading
            included).
        backward_s: Median seconds of backward.
        wrapped: Whether the job uses ``hvd.DistributedOptimizer``. Otherwise it calls collectives
            itself, and only job-wide settings can be tuned.
    """

    parameters: tuple[ParameterProfile, ...] = ()
    forward_s: float = math.nan
    backward_s: float = math.nan
    wrapped: bool = True

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

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary; NaN becomes ``None``.

        ``factor_bytes`` is there if it is not 0, shares of coded bytes if they are not 1: earlier
        versions did not measure them.
        """
        fields = asdict(self)
        for parameter in fields["parameters"]:
            if not parameter["factor_bytes"]:
                del parameter["factor_bytes"]
            for name in _LATER_SHARES:
                if parameter[name] == 1.0:
                    del parameter[name]
        for values in [fields, *fields["parameters"]]:
            for name, value in values.items():
                if isinstance(value, float) and math.isnan(value):
                    values[name] = None
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> ModelProfile:
        """Return the profile that :meth:`to_json` has written."""
        parameters = tuple(
            ParameterProfile(
                name=p["name"],
                shape=tuple(p["shape"]),
                dtype=p["dtype"],
                sparse=p["sparse"],
                ready_order=p["ready_order"],
                ready_s=_number(p["ready_s"]),
                touched_rows=p["touched_rows"],
                factor_bytes=p.get("factor_bytes", 0),
                **{name: p.get(name, 1.0) for name in _LATER_SHARES},
            )
            for p in fields["parameters"]
        )
        return cls(
            parameters,
            _number(fields["forward_s"]),
            _number(fields["backward_s"]),
            fields["wrapped"],
        )


def _number(value: float | None) -> float:
    return math.nan if value is None else value
