"""What a contestant is: created once per game, it is asked for a strategy and told its outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from contest.emulator import Emulator
from hvd_autosync.learner import Observation
from hvd_autosync.learner.problem import Source
from hvd_autosync.search_space import Strategy


class Contestant(Protocol):
    """One learner in one game."""

    def ask(self) -> Strategy:
        """The strategy to measure next."""
        ...

    def tell(self, seen: Observation) -> None:
        """What was measured, the default's trial first."""
        ...


#: Creates a contestant for a table, from the related tables as sources and a seed.
Start = Callable[[Emulator, tuple[Source, ...], int], Contestant]
