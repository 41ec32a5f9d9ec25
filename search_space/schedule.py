"""Schedules of local steps: the lengths of the rounds after which parameters are averaged.

A round is ``H`` steps that each rank takes on its own, and the average after them. With learning
rate eta at the round's first step::

    H = max(H_base, floor((alpha / eta)^p))

``p = 0`` is a constant H; ``p = 2`` is the Quadratic Synchronization Rule (QSR, Gu et al., ICLR
2024); ``p = 1`` and ``p = 3`` are the rules with which that paper compares it. Post-local SGD (Lin
et al., ICLR 2020) begins with rounds of one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hvd_autosync.errors import SpaceError

#: What a script does so that ranks know where parameters must be equal.
SEE_EPOCHS = (
    "use a torch.utils.data.DataLoader with a length, or call hvd_autosync.average(optimizer) at "
    "the end of each epoch"
)


@dataclass(frozen=True)
class Schedule:
    """A rule for the lengths of rounds, in steps.

    Attributes:
        base: Least length of a round, ``H_base``, at least 1.
        power: ``p``; 0, 1, 2 or 3.
        alpha: Growth coefficient, in units of the learning rate; unused for ``p = 0``.
        start: Number of steps at the beginning that are rounds of one step.
        warmup: Number of steps with ``H = H_base`` (except those before ``start``), because a
            rising learning rate would cause the longest rounds at the beginning. ``None``: until
            the learning rate first falls.
        cap: Most steps of a round; ``None``: unlimited.

    Raises:
        SpaceError: A number is invalid.
    """

    base: int = 1
    power: int = 0
    alpha: float = 0.0
    start: int = 0
    warmup: int | None = None
    cap: int | None = None

    def __post_init__(self) -> None:
        for name, wrong, wanted in (
            ("base", self.base < 1, "at least 1"),
            ("power", self.power not in (0, 1, 2, 3), "0, 1, 2 or 3"),
            ("alpha", not (0 <= self.alpha < math.inf), "a finite number, at least 0"),
            ("start", self.start < 0, "at least 0"),
            ("warmup", self.warmup is not None and self.warmup < 0, "at least 0"),
            ("cap", self.cap is not None and self.cap < 1, "at least 1"),
        ):
            if wrong:
                raise SpaceError(
                    f"invalid {name}={getattr(self, name)!r} of a schedule",
                    hint=f"It must be {wanted}.",
                )

    @property
    def parallel(self) -> bool:
        """Whether every round has one step."""
        return self.cap == 1 or (self.base == 1 and (self.power == 0 or self.alpha == 0))

    def length(self, step: int, rate: float, highest: float, remaining: int | None = None) -> int:
        """Return the number of steps of the round that begins.

        Args:
            step: Number of steps before the round.
            rate: Learning rate of the round's first step.
            highest: Highest learning rate of all steps so far, this one included.
            remaining: Most steps of the round until a synchronization point, this one included;
                ``None`` if there is none.
        """
        length = self.base
        if step < self.start:
            length = 1
        elif self.power and not self._warms_up(step, rate, highest):
            length = max(length, self._grown(rate))
        return max(min(length, self.cap or length, length if remaining is None else remaining), 1)

    def _warms_up(self, step: int, rate: float, highest: float) -> bool:
        return step < self.warmup if self.warmup is not None else rate >= highest

    def _grown(self, rate: float) -> int:
        if rate <= 0:
            return self.cap or self.base  # the rule is undefined, and parameters do not change
        # Bounded before it is raised to a power, which would overflow.
        return math.floor(min(min(self.alpha / rate, 2.0**53) ** self.power, 2.0**53))


def rounds(schedule: Schedule, rates: Sequence[float]) -> Iterator[int]:
    """Yield the lengths of the rounds of a whole training.

    Args:
        schedule: The schedule.
        rates: The learning rate of each step.
    """
    step, highest = 0, -math.inf
    while step < len(rates):
        highest = max(highest, rates[step])
        length = schedule.length(step, rates[step], highest, len(rates) - step)
        yield length
        highest = max([highest, *rates[step : step + length]])
        step += length


#: Most steps of a round unless a strategy sets another cap. The rules have no limit, and too long
#: rounds cost accuracy.
DEFAULT_CAP = 256
