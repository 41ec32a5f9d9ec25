"""Harshness: the prior of how much each lossy knob adds to the loss.

The unit is the tolerance: 1 % of the decrease of the loss in a typical training, the small language
model that ``benchmarks/guarding.py`` measured. The sensitivity of another training is learned from
its verdicts (:mod:`hvd_autosync.learner.quality_constraint`), so only the order of the knobs and
the rough size of their effects matter here.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from hvd_autosync.learner.points import FloatArray
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Value
from hvd_autosync.search_space.conditions import active

#: Upper bound: a larger value carries no further information.
MOST = 4.0
#: What each choice adds. Top-k and PowerSGD are 0 here: their ratio and rank add to the loss.
#: Priority order makes the same steps, but later.
_CHOICES = {
    "arrival": 0.0,
    "priority": 0.0,
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
#: What any other choice than the default adds, such as a codec from an extension.
_OTHER = 0.5


def _ratio(share: Value) -> float:
    return 2.0 * math.exp(0.3 * math.log(0.25 / float(share)))


def _rank(rank: Value) -> float:
    return 14.0 / float(rank)


def _local_steps(length: Value) -> float:
    return 0.5 * math.pow(math.log2(float(length)), 1.1)


#: What a numeric knob adds, by its name or the last word of its name.
_NUMBERS: dict[str, Callable[[Value], float]] = {
    "ratio": _ratio,
    "rank": _rank,
    "local_steps": _local_steps,
}


def harshness(space: SearchSpace, points: FloatArray) -> FloatArray:
    """Return what all lossy knobs together add to the loss, at discretized points ``n x d``.

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
