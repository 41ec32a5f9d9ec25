"""Features: from points of the search space to the inputs of the model.

``n``: number of points; ``d``: dimension of the space; ``p``: number of numeric inputs; ``c``:
number of categorical inputs. The model's input is ``n x (p + c)``, numeric inputs first.

Knobs that cannot vary are left out. A conditional knob that is switched off gets a category of its
own, "off", which is as different from its default as from any other value. A conditional numeric
knob gets an additional categorical input, on or off, and has its default value while off. So the
model can learn the effect of switching on by itself, wherever the switch is on the parent's scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hvd_autosync.learner.points import FloatArray, can_vary
from hvd_autosync.search_space import CategoricalKnob, SearchSpace
from hvd_autosync.search_space.conditions import active

_OFF = -1.0


@dataclass(frozen=True)
class Features:
    """Which knobs are inputs of the model.

    Attributes:
        space: The search space.
        numeric: Dimensions of the free numeric knobs, ``p`` of them.
        choices: Dimensions of the free categorical knobs.
        switches: Dimensions of the free numeric knobs that are conditional. ``c`` is the number of
            choices and switches.
    """

    space: SearchSpace
    numeric: tuple[int, ...]
    choices: tuple[int, ...]
    switches: tuple[int, ...]

    @classmethod
    def of(cls, space: SearchSpace) -> Features:
        """Return the features of ``space``."""
        free = [(i, knob) for i, knob in enumerate(space.knobs) if can_vary(knob)]
        choices = tuple(i for i, knob in free if isinstance(knob, CategoricalKnob))
        numeric = tuple(i for i, _ in free if i not in choices)
        switches = tuple(i for i in numeric if space.knobs[i].condition is not None)
        return cls(space, numeric, choices, switches)

    @property
    def categorical_count(self) -> int:
        """Number of categorical inputs, ``c``."""
        return len(self.choices) + len(self.switches)

    def __call__(self, points: FloatArray) -> Tensor:
        """Return the inputs at discretized points, ``n x d``: doubles, shape ``n x (p + c)``."""
        on = active(self.space, points)
        chosen = list(self.choices)
        columns = [
            points[:, list(self.numeric)],
            np.where(on[:, chosen], points[:, chosen], _OFF),
            on[:, list(self.switches)].astype(np.float64),
        ]
        return torch.from_numpy(np.concatenate(columns, axis=1))
