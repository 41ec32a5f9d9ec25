"""Random numbers of a quality trial: equal for equal seeds, different for different seeds.

The script's own seeds are shifted, whatever generator they are for, by so much that no rank of one
trial has the numbers of another rank or step of the next, as a script's ``seed + rank`` would have
if the shift were 1. Generators that it does not
seed are seeded from seed and rank, because unseeded ranks have different numbers. Data order
follows: samplers draw from these generators.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hvd_autosync.search_space.horovod_settings import RANK_VARIABLES
from hvd_autosync.util import patches

#: Shift of the script's own seeds per seed of a trial: odd, far from any number of ranks or epochs
#: or steps, and 2^32 over the golden ratio.
_STRIDE = 0x9E3779B1
#: Names of the argument by which functions take a seed: Python's, and those of numpy and torch.
_SEED_NAMES = frozenset(("a", "seed"))


def seed_everything(seed: int) -> None:
    """Derive all random numbers of this process from ``seed``, its rank and the script's own seeds.

    Args:
        seed: Shifts each seed that the script passes to generators of Python, numpy or torch from
            now on. A generator created without a seed gets one derived from ``seed`` and the rank.
    """
    rank = next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)
    derived = map(functools.partial(_mixed, seed, rank), itertools.count())
    random.seed(next(derived))
    np.random.seed(next(derived) % 2**32)
    torch.manual_seed(next(derived))

    def shifted(given: Any) -> Any:
        if given is None:
            return next(derived)
        if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
            # Of numpy's at most 32 bits; those above are as they were.
            low = int(given) % 2**32
            return int(given) - low + (low + seed * _STRIDE) % 2**32
        if isinstance(given, (str, bytes, bytearray, float)):
            return f"{seed} {given!r}"  # for Python's own generators, which take any value
        if isinstance(given, (list, tuple, np.ndarray)):
            return [*np.asarray(given).ravel().tolist(), seed]
        return given  # a bit generator, or a sequence of seeds that was made from one

    patches.install("seeds", lambda own: _seeded(own, shifted))


def _mixed(seed: int, rank: int, count: int) -> int:
    return int(np.random.SeedSequence((seed, rank, count)).generate_state(1)[0])


def _seeded(original: Any, shifted: Callable[[Any], Any]) -> Any:
    """Shift the seeds of a function, or of generators that the script creates itself."""
    if isinstance(original, type):
        return _generators(shifted)[original]

    takes_texts = not original.__module__.startswith("torch")  # its seeds are what int() takes

    def shift(given: Any) -> Any:
        return shifted(given if given is None or takes_texts else int(given))

    @functools.wraps(original)
    def seeded(*args: Any, **keywords: Any) -> Any:
        if (name := next(iter(_SEED_NAMES & keywords.keys()), None)) is not None:
            return original(*args, **{**keywords, name: shift(keywords[name])})
        return original(shift(args[0] if args else None), *args[1:], **keywords)

    return seeded


def _generators(shifted: Callable[[Any], Any]) -> dict[type, type]:
    """Classes of generators -> those that take their place."""

    class Random(random.Random, metaclass=_like(random.Random)):  # type: ignore[metaclass]
        def seed(self, a: Any = None, version: int = 2) -> None:  # also called when it is made
            super().seed(shifted(a), version)

    class RandomState(np.random.RandomState, metaclass=_like(np.random.RandomState)):  # type: ignore[metaclass]
        def __init__(self, seed: Any = None) -> None:
            super().__init__(shifted(seed))

        def seed(self, seed: Any = None) -> None:
            super().seed(shifted(seed))

    class Generator(torch.Generator, metaclass=_like(torch.Generator)):  # type: ignore[metaclass]
        def manual_seed(self, seed: Any) -> torch.Generator:
            return super().manual_seed(shifted(seed))

        def seed(self) -> int:
            number = int(shifted(None))
            super().manual_seed(number)
            return number

    # pickle takes only classes that it finds by their names.
    Random.__module__, Random.__qualname__ = "random", "Random"
    RandomState.__module__, RandomState.__qualname__ = "numpy.random", "RandomState"
    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    return {random.Random: Random, np.random.RandomState: RandomState, torch.Generator: Generator}


def _like(original: type) -> type:
    """Return a metaclass whose classes accept instances of ``original`` as their own."""

    def check(cls: type, instance: Any) -> bool:
        return isinstance(instance, original)

    return type("_Like", (type(original),), {"__instancecheck__": check})
