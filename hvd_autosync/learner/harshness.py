"""How much each lossy knob is expected to add to a loss, before any training was judged.

In tolerances, of the middling training that ``benchmarks/guarding.py`` measured: a small language
model, 1 % of what its loss falls. How much another training bears is learned from its verdicts
(:mod:`hvd_autosync.learner.quality_constraint`); here only the order of what is mild and what is
harsh matters, and about how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hvd_autosync.learner.points import FloatArray, active
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Value

#: More says no more.
MOST = 4.0
#: What a choice adds by itself. Top-k and PowerSGD are as harsh as their ratio and rank.
_CHOICES = {
    "none": 0.0,
    "fp16": 0.03,
    "bf16": 0.03,
    "int8": 0.1,
    "topk": 0.0,
    "powersgd": 0.0,
    "bsp": 0.0,
    "ssp": 0.7,
    "asp": 1.0,
}
#: Any other choice of a lossy knob than its default, as of a codec that somebody has added.
_OTHER = 0.5


def _ratio(share: Value) -> float:
    return 2.0 * math.exp(0.3 * math.log(0.25 / float(share)))


def _rank(rank: Value) -> float:
    return 14.0 / float(rank)


def _local_steps(length: Value) -> float:
    return 0.5 * math.pow(math.log2(float(length)), 1.1)


#: By the last word of a knob's name, or all of it.
_NUMBERS: dict[str, Callable[[Value], float]] = {
    "ratio": _ratio,
    "rank": _rank,
    "local_steps": _local_steps,
}


def harshness(space: SearchSpace, points: FloatArray) -> FloatArray:
    """What all lossy knobs together are expected to add, at snapped points ``n x d``.

    Returns:
        Shape ``(n,)``, at most :data:`MOST`.
    """
    total = np.zeros(len(points))
    on = active(space, points)
    for index, knob in enumerate(space.knobs):
        if knob.exact:
            continue
        unique, inverse = np.unique(points[:, index], return_inverse=True)
        values = [knob.from_unit(float(position)) for position in unique]
        if isinstance(knob, CategoricalKnob):
            adds = [
                0.0 if value == knob.default else _CHOICES.get(str(value), _OTHER)
                for value in values
            ]
        else:
            number = _NUMBERS.get(knob.name) or _NUMBERS.get(knob.name.rpartition("_")[2])
            adds = [0.0 if number is None else number(value) for value in values]
        total += np.where(on[:, index], np.array(adds)[inverse], 0.0)
    return np.minimum(total, MOST)
