"""Many strategies as columns of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hvd_autosync.cost.timeline import FloatArray
from hvd_autosync.search_space import Value, catalogue_knob


class Columns:
    """The values of knobs over some strategies; an absent knob stands at its default.

    Args:
        strategies: The strategies, ``c`` of them.
    """

    def __init__(self, strategies: Sequence[Mapping[str, Value]]) -> None:
        self._strategies = strategies

    def __len__(self) -> int:
        return len(self._strategies)

    def numbers(self, knob: str) -> FloatArray:
        """Values of a numeric knob, shape ``(c,)``.

        Raises:
            SpaceError: No knob has that name.
        """
        return np.array(self._values(knob), dtype=np.float64)

    def words(self, knob: str) -> npt.NDArray[np.str_]:
        """Values of a categorical knob, shape ``(c,)``.

        Raises:
            SpaceError: No knob has that name.
        """
        return np.array(self._values(knob), dtype=np.str_)

    def _values(self, knob: str) -> list[Value]:
        default = catalogue_knob(knob).default
        return [strategy.get(knob, default) for strategy in self._strategies]
