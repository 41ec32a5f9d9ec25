"""The search space of one task: the knobs that can matter, mapped to the unit cube."""

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
from hvd_autosync.search_space.records import read
from hvd_autosync.search_space.strategy import Strategy

# numpy is imported in functions, because Horovod's launcher loads this module only for options.
if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray: TypeAlias = npt.NDArray[np.float64]

#: Codecs that code each element by itself: the bucketing changes at most the order of additions.
_CODECS_OF_ELEMENTS = ("none", "fp16", "bf16")


def codec_beside(name: str) -> str:
    """Return the knob whose codecs leave nothing to the lossless codes of ``name``.

    It is "" for a knob of anything else. A condition cannot say so: where the space has no such
    knob, or it is switched off, there are lossless codes.
    """
    parameter_class, _, attribute = name.rpartition("_")
    return f"{parameter_class}_codec" if attribute == "lossless" else ""


@dataclass(frozen=True)
class SearchSpace:
    """Free knobs, one dimension each, and fixed knobs.

    A point is a vector of ``d = len(knobs)`` numbers in [0, 1]. :meth:`decode` ignores coordinates
    of knobs whose condition does not hold, and :meth:`encode` sets them to the default's, so that
    equal strategies are equal points.

    Attributes:
        knobs: The dimensions; a knob comes after the knob on which its condition depends.
        fixed: Knob name -> value that the user has fixed by option, environment or file. Fixed
            knobs are not part of strategies.
        holds_job: Whether the space contains the unchanged job. Restrictions may exclude it; then
            ``default`` is another strategy.
        shown_first: Names of knobs in the order in which :meth:`describe` shows them; ignored in
            comparisons.
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
                    hint="Put a knob after the knob on which it depends.",
                )
            known[knob.name] = knob.default

    @property
    def dimension(self) -> int:
        """Number of free knobs, ``d``."""
        return len(self.knobs)

    @property
    def default(self) -> Strategy:
        """All free knobs at their defaults: the unchanged job, if ``holds_job``."""
        return self._assemble({knob.name: knob.default for knob in self.knobs})

    @property
    def categorical_dimensions(self) -> list[int]:
        """Indices of the dimensions with unordered choices."""
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
        """Return the strategy of ``values`` without the knobs that are switched off."""
        active: dict[str, Value] = dict(self.fixed)
        chosen: dict[str, Value] = {}
        for knob in self.knobs:
            if knob.name in values and (knob.condition is None or knob.condition.holds(active)):
                active[knob.name] = chosen[knob.name] = values[knob.name]
        return Strategy(
            {
                name: value
                for name, value in chosen.items()
                if active.get(codec_beside(name), "none") == "none"
            }
        )

    def complete(self, strategy: Mapping[str, Value]) -> Strategy:
        """Return ``strategy`` with defaults for absent knobs and without inactive ones.

        The empty strategy is the unchanged job, and stays empty if the space does not contain it.

        Raises:
            SpaceError: A knob is unknown or a value is outside its domain.
        """
        for name, value in strategy.items():
            self[name].validate(value)
        if self.excludes(strategy):
            return Strategy()
        return self._assemble({**{k.name: k.default for k in self.knobs}, **strategy})

    def holds(self, strategy: Mapping[str, Value]) -> bool:
        """Return whether ``strategy`` lies in the space."""
        try:
            self.complete(strategy)
        except SpaceError:
            return False
        return True

    def excludes(self, strategy: Mapping[str, Value]) -> bool:
        """Return whether ``strategy`` is the unchanged job, which restrictions exclude."""
        return not strategy and not self.holds_job

    @property
    def has_lossy(self) -> bool:
        """Whether strategies differ in a lossy knob."""
        return not all(k.exact or k.from_unit(0.0) == k.from_unit(1.0) for k in self.knobs)

    def is_exact(self, strategy: Mapping[str, Value]) -> bool:
        """Return whether ``strategy`` leaves all lossy knobs at their defaults.

        Raises:
            SpaceError: As of :meth:`complete`.
        """
        values = self.complete(strategy)
        return all(
            knob.exact or values.get(knob.name, knob.default) == knob.default for knob in self.knobs
        )

    def lossy_part(self, strategy: Mapping[str, Value]) -> Strategy:
        """Return the part of ``strategy`` that determines the trained model.

        These are all lossy knobs. With codecs that code elements together (int8, top-k,
        PowerSGD, those of extensions) the exchange knobs count, too: they determine the buckets.

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
        """Return the point of ``strategy``, shape ``(d,)``; absent knobs have their default."""
        import numpy as np

        return np.array(
            [knob.to_unit(strategy.get(knob.name, knob.default)) for knob in self.knobs],
            dtype=np.float64,
        )

    def decode(self, point: npt.ArrayLike) -> Strategy:
        """Return the strategy nearest to ``point``, shape ``(d,)``.

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
        """Return the knobs that differ from the default as one line, or ``default``.

        Those of :attr:`shown_first` come first, because a narrow terminal truncates the line. If
        the space does not hold the job, ``default`` would be ambiguous: then there are ``the
        unchanged job`` and ``the restricted default``.
        """
        default = self.default
        parts = {
            knob.name: f"{knob.name}={knob.format(strategy[knob.name])}"
            for knob in self.knobs
            if strategy.get(knob.name, knob.default) != default.get(knob.name, knob.default)
        }
        names = dict.fromkeys((*self.shown_first, *parts))
        text = ", ".join(parts[name] for name in names if name in parts)
        if text or self.holds_job:
            return text or "default"
        return "the restricted default" if strategy else "the unchanged job"

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that identify the space, whatever its knobs say to users."""
        knobs = [{**knob_to_json(k), "help": "", "unit": ""} for k in self.knobs]
        plain = {**self.to_json(), "knobs": knobs}
        text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary."""
        return {
            "knobs": [knob_to_json(k) for k in self.knobs],
            "fixed": dict(self.fixed),
            "holds_job": self.holds_job,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SearchSpace:
        """Return the space that :meth:`to_json` has written.

        Raises:
            SpaceError: The dictionary does not describe a space.
        """
        knobs = tuple(knob_from_json(knob) for knob in fields["knobs"])
        fixed = Strategy.from_plain(fields["fixed"])
        return cls(knobs, tuple(fixed.items()), read(bool, fields["holds_job"]))
