"""The search space of one task: the knobs that can matter, as points of the unit cube."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from hvd_autosync.errors import SpaceError
from hvd_autosync.search_space.knobs import (
    CategoricalKnob,
    Knob,
    Value,
    knob_from_json,
    knob_to_json,
)
from hvd_autosync.search_space.strategy import Strategy

# numpy is imported where it is used: Horovod's launcher loads this module for its options alone.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray: TypeAlias = npt.NDArray[np.float64]

#: Codecs to which it does not matter which elements travel together.
_CODECS_OF_ELEMENTS = ("none", "fp16", "bf16", "int8")


@dataclass(frozen=True)
class SearchSpace:
    """Free knobs, one dimension each, and knobs that are held.

    A point is a vector of ``d = len(knobs)`` numbers in [0, 1]. Coordinates of knobs whose
    condition does not hold are ignored by :meth:`decode` and set to the default's by
    :meth:`encode`, so that equal strategies are equal points.

    Attributes:
        knobs: The dimensions, parents before the knobs that depend on them.
        fixed: Knob name -> value held for every strategy (set by the user, by option,
            environment or file). Held knobs are not part of strategies.
        holds_job: Whether the job as it is lies in the space. Restrictions may exclude it; then
            ``default`` is another strategy.
        shown_first: Names of knobs in the order in which :meth:`describe` shows them; no part of
            what the space is.
    """

    knobs: tuple[Knob, ...]
    fixed: tuple[tuple[str, Value], ...] = ()
    holds_job: bool = True
    shown_first: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        known = dict(self.fixed)
        for knob in self.knobs:
            if knob.name in known:
                raise SpaceError(f"knob {knob.name} appears twice", hint="Name each knob once.")
            if knob.condition is not None and knob.condition.knob not in known:
                raise SpaceError(
                    f"knob {knob.name} depends on {knob.condition.knob}, which does not precede it",
                    hint="Order knobs so that parents come first.",
                )
            known[knob.name] = knob.default

    @property
    def dimension(self) -> int:
        """Number of free knobs, ``d``."""
        return len(self.knobs)

    @property
    def default(self) -> Strategy:
        """Every free knob at its default: what the job does without us, if ``holds_job``."""
        return self._assemble({knob.name: knob.default for knob in self.knobs})

    @property
    def categorical_dimensions(self) -> list[int]:
        """Indices of the dimensions without an order."""
        return [i for i, knob in enumerate(self.knobs) if isinstance(knob, CategoricalKnob)]

    def __getitem__(self, name: str) -> Knob:
        for knob in self.knobs:
            if knob.name == name:
                return knob
        raise SpaceError(
            f"unknown knob {name!r}",
            hint=f"The knobs of this space are {', '.join(k.name for k in self.knobs) or 'none'}.",
        )

    def _assemble(self, values: Mapping[str, Value]) -> Strategy:
        """The strategy of ``values`` without the knobs whose condition does not hold."""
        active: dict[str, Value] = dict(self.fixed)
        chosen: dict[str, Value] = {}
        for knob in self.knobs:
            if knob.name in values and (knob.condition is None or knob.condition.holds(active)):
                active[knob.name] = chosen[knob.name] = values[knob.name]
        return Strategy(chosen)

    def complete(self, strategy: Mapping[str, Value]) -> Strategy:
        """``strategy`` with defaults for absent knobs and without inactive ones.

        The empty strategy is the job as it is, and stays empty where that is not in the space.

        Raises:
            SpaceError: A knob is unknown or a value is outside its domain.
        """
        for name, value in strategy.items():
            self[name].validate(value)
        if not strategy and not self.holds_job:
            return Strategy()
        return self._assemble({**{k.name: k.default for k in self.knobs}, **strategy})

    @property
    def has_lossy(self) -> bool:
        """Whether some knob can change what is trained."""
        return not all(knob.exact for knob in self.knobs)

    def is_exact(self, strategy: Mapping[str, Value]) -> bool:
        """Whether ``strategy`` leaves all knobs alone that can change what is trained.

        Raises:
            SpaceError: As of :meth:`complete`.
        """
        values = self.complete(strategy)
        return all(
            knob.exact or values.get(knob.name, knob.default) == knob.default for knob in self.knobs
        )

    def lossy_part(self, strategy: Mapping[str, Value]) -> Strategy:
        """What of ``strategy`` decides what is trained; two with equal parts train the same model.

        All lossy knobs. Codecs that choose among the elements of a whole bucket (top-k, PowerSGD,
        those that somebody has added) depend on how gradients are cut and gathered, too.

        Raises:
            SpaceError: As of :meth:`complete`.
        """
        values = {**dict(self.fixed), **self.complete(strategy)}
        by_bucket = any(
            name.rpartition("_")[2] == "codec" and value not in _CODECS_OF_ELEMENTS
            for name, value in values.items()
        )
        return Strategy(
            {
                knob.name: values.get(knob.name, knob.default)
                for knob in self.knobs
                if not knob.exact or (by_bucket and knob.group == "exchange")
            }
        )

    def encode(self, strategy: Mapping[str, Value]) -> FloatArray:
        """The point of ``strategy``, shape ``(d,)``; absent knobs stand at their default."""
        import numpy as np

        return np.array(
            [knob.to_unit(strategy.get(knob.name, knob.default)) for knob in self.knobs],
            dtype=np.float64,
        )

    def decode(self, point: npt.ArrayLike) -> Strategy:
        """The strategy nearest to ``point``, shape ``(d,)``.

        Raises:
            SpaceError: ``point`` does not have ``d`` coordinates.
        """
        import numpy as np

        coordinates = np.asarray(point, dtype=np.float64)
        if coordinates.shape != (self.dimension,):
            raise SpaceError(
                f"a point of shape {coordinates.shape} does not fit this space",
                hint=f"Give {self.dimension} coordinates.",
            )
        pairs = zip(self.knobs, coordinates, strict=True)
        return self._assemble({knob.name: knob.from_unit(float(u)) for knob, u in pairs})

    def describe(self, strategy: Mapping[str, Value]) -> str:
        """One readable line: the knobs that differ from the default, or ``default``.

        Those of :attr:`shown_first` lead, for a narrow terminal cuts off the others.
        """
        default = self.default
        parts = {
            knob.name: f"{knob.name}={knob.format(strategy[knob.name])}"
            for knob in self.knobs
            if strategy.get(knob.name, knob.default) != default.get(knob.name, knob.default)
        }
        names = dict.fromkeys((*self.shown_first, *parts))
        return ", ".join(parts[name] for name in names if name in parts) or "default"

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that identify the space."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary."""
        return {
            "knobs": [knob_to_json(k) for k in self.knobs],
            "fixed": dict(self.fixed),
            "holds_job": self.holds_job,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SearchSpace:
        """The space that :meth:`to_json` wrote.

        Raises:
            SpaceError: The dictionary does not describe a space.
        """
        knobs = tuple(knob_from_json(knob) for knob in fields["knobs"])
        return cls(knobs, tuple(sorted(fields["fixed"].items())), fields["holds_job"])
