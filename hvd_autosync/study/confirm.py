"""Confirmation: the best candidates against the default, measured again in turn.

The fastest of many noisy trials looks faster than it is. So the candidates and the default are
measured anew, round by round (A B C, A B C, ...), and only these measurements count: drifts of
the machine reach all of a round alike, and the interval is that of paired log ratios.

Looking again after each round, at each candidate, gives luck several chances. So the error that
is allowed in all is spent in parts, one for each look at each candidate, and the intervals hold
at all looks together (repeated confidence intervals: Jennison and Turnbull, J. R. Stat. Soc. B 51,
1989).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvd_autosync.search_space import StepTime, Strategy

#: Level of the two-sided interval; its lower end alone is exceeded with 95 % confidence.
CONFIDENCE = 0.9
#: Rounds after which is looked, and the share of the allowed error that each look may spend.
_SPENT = {3: 0.15, 4: 0.1, 5: 0.15, 6: 0.15, 7: 0.15, 8: 0.3}
#: By more than this factor launches of one strategy hardly ever differ.
LAUNCHES_DIFFER = 1.1
#: Rounds after which a candidate that was slower in each is out.
_SLOWER_ROUNDS = 2
#: Failures of the default that are not held against it.
_FORGIVEN = 1
MIN_ROUNDS, MAX_ROUNDS = min(_SPENT), max(_SPENT)


@dataclass(frozen=True)
class Comparison:
    """One candidate against the default.

    Attributes:
        strategy: The candidate.
        speedup: Default's step time over the candidate's; above 1 the candidate is faster.
        low: Lower end of its interval.
        high: Upper end of its interval.
        rounds: Rounds in which both were measured.
    """

    strategy: Strategy
    speedup: float
    low: float
    high: float
    rounds: int

    @property
    def proven(self) -> bool:
        """Whether the candidate is faster with confidence."""
        return self.low > 1.0

    @property
    def undecided(self) -> bool:
        """Whether more rounds may well prove it; not when it seems no faster so far."""
        return not self.proven and self.speedup > 1.0


def compare(
    strategy: Strategy,
    default: Sequence[StepTime],
    candidate: Sequence[StepTime],
    error_share: float = 1.0,
) -> Comparison:
    """Compare paired measurements, one pair per round.

    The standard error of the mean log ratio is the larger of two: from the spread between rounds,
    and from the steps within the trials. With few rounds the first alone is sometimes far too
    small by luck.

    Args:
        strategy: The candidate.
        default: Step times of the default, by round.
        candidate: Step times of the candidate, by round.
        error_share: Share of the error of ``1 - CONFIDENCE`` that this look may spend.

    Raises:
        ValueError: No round, or numbers of rounds that differ.
    """
    from scipy.stats import t

    pairs = list(zip(default, candidate, strict=True))
    if not pairs:
        raise ValueError("nothing to compare: no round was measured")
    ratios = np.array([math.log(d.mean_s / c.mean_s) for d, c in pairs])
    rounds = len(ratios)
    within = sum(
        (d.standard_error_s / d.mean_s) ** 2 + (c.standard_error_s / c.mean_s) ** 2
        for d, c in pairs
    )
    error = math.sqrt(within) / rounds
    if rounds > 1:
        error = max(error, float(ratios.std(ddof=1)) / math.sqrt(rounds))
        half = float(t.ppf(1 - error_share * (1 - CONFIDENCE) / 2, rounds - 1)) * error
    else:
        half = math.inf
    center = float(ratios.mean())
    return Comparison(
        strategy, math.exp(center), math.exp(center - half), math.exp(center + half), rounds
    )


@dataclass(frozen=True)
class Measurement:
    """One trial of the confirmation.

    Attributes:
        strategy: Candidate or default.
        time: What it took; ``None`` when it failed or still runs.
        running: Whether it still runs.
    """

    strategy: Strategy
    time: StepTime | None
    running: bool = False


class Confirmation:
    """Who is measured next, and what the measurements so far say.

    A candidate that fails once is out, and so is one that was slower in each of two rounds, or in
    its first by more than launches differ: there is nothing to prove. The default has been
    measured before, so that it is not to blame for one failure: it is asked for again.

    Args:
        default: The default strategy.
        candidates: Strategies to confirm, most promising first.
        measurements: The confirmation's trials so far, in order.
    """

    def __init__(
        self, default: Strategy, candidates: Sequence[Strategy], measurements: Sequence[Measurement]
    ) -> None:
        self._default = default
        self._candidates = candidates
        self._measurements = measurements

    def next(self) -> Strategy | None:
        """The next strategy to measure; ``None`` when there is nothing left to decide."""
        # While measurements are under way, as with several trials at once, nothing is decided.
        running = any(m.running for m in self._measurements)
        contenders = [
            strategy
            for strategy in (self._default, *self._candidates)
            if not self._failed(strategy) and (running or not self._slower(strategy))
        ]
        if self._failed(self._default) or len(contenders) < 2:
            return None
        good = [m.strategy for m in self._measurements if m.running or m.time is not None]
        begun = {s: good.count(s) for s in contenders}
        rounds = min(begun.values())
        if not running and rounds == max(begun.values()) and rounds >= MIN_ROUNDS:
            settled = not any(c.undecided for c in self.comparisons())
            if settled or rounds >= MAX_ROUNDS:
                return None
        return next(s for s in contenders if begun[s] == rounds)

    def comparisons(self) -> list[Comparison]:
        """Every candidate that was measured against the default and never failed, best first.

        Those that are proven to be faster come first, the fastest of them before all: that its
        rounds were less alike than another's is no reason to take the slower one.
        """
        found = []
        default = self._times(self._default)
        for candidate in self._candidates:
            own = self._times(candidate)
            rounds = min(len(own), len(default), MAX_ROUNDS)
            if rounds and not self._failed(candidate):
                share = _SPENT.get(rounds, _SPENT[MIN_ROUNDS]) / len(self._candidates)
                found.append(compare(candidate, default[:rounds], own[:rounds], share))
        return sorted(found, key=lambda each: (each.proven, each.speedup), reverse=True)

    def _failed(self, strategy: Strategy) -> bool:
        failures = sum(
            m.strategy == strategy and m.time is None and not m.running for m in self._measurements
        )
        return failures > (_FORGIVEN if strategy == self._default else 0)

    def _slower(self, strategy: Strategy) -> bool:
        """Whether a candidate was slower than the default whenever both were measured."""
        pairs = list(zip(self._times(self._default), self._times(strategy), strict=False))
        factors = [own.mean_s / default.mean_s for default, own in pairs]
        if strategy == self._default or not factors or min(factors) <= 1:
            return False
        return len(factors) >= _SLOWER_ROUNDS or factors[0] > LAUNCHES_DIFFER

    def _times(self, strategy: Strategy) -> list[StepTime]:
        return [m.time for m in self._measurements if m.strategy == strategy and m.time]
