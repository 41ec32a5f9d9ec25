"""Confirmation: the best candidates are measured again, in turn with the default.

The fastest of many noisy trials looks faster than it is (winner's curse). So the candidates and the
default are measured again, round by round, and only these measurements count. Drifts of the machine
affect a round much alike, so the interval is that of paired log ratios. Every second round has the
reverse order (A B C, C B A, ...), so a steady drift does not always favour the same strategy.

Testing after each round, and each candidate, is multiple testing. So the allowed error is divided
among all looks at all candidates, and the intervals hold at all looks together (repeated confidence
intervals: Jennison and Turnbull, J. R. Stat. Soc. B 51, 1989).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

import numpy as np

from hvd_autosync.search_space import StepTime, Strategy
from hvd_autosync.search_space.records import OrInf, Real, Record

#: Level of the two-sided interval; its lower end is a one-sided bound with 95 % confidence.
CONFIDENCE = 0.9
#: Number of rounds at each look -> share of the allowed error that this look may spend.
_SPENT = {3: 0.15, 4: 0.1, 5: 0.15, 6: 0.15, 7: 0.15, 8: 0.3}
#: Launches of one strategy hardly ever differ by more than this factor.
LAUNCHES_DIFFER = 1.1
#: A candidate that was slower in each of so many rounds is dropped.
_SLOWER_ROUNDS = 2
#: Number of failures of the default that are tolerated.
_FORGIVEN = 1
MIN_ROUNDS, MAX_ROUNDS = min(_SPENT), max(_SPENT)


@dataclass(frozen=True)
class Comparison(Record):
    """One candidate against the default.

    Attributes:
        strategy: The candidate.
        speedup: Default's step time over the candidate's; above 1 the candidate is faster.
        low: Lower end of its interval.
        high: Upper end of its interval.
        rounds: Rounds in which both were measured.
    """

    strategy: Strategy
    speedup: Real
    low: Real
    high: OrInf
    rounds: int

    @property
    def proven(self) -> bool:
        """Whether the candidate is faster with confidence, at a look that may tell."""
        return self.rounds >= MIN_ROUNDS and self.low > 1.0

    @property
    def undecided(self) -> bool:
        """Whether more rounds may prove it: it is faster so far, but not with confidence."""
        return not self.proven and self.speedup > 1.0


def compare(
    strategy: Strategy,
    default: Sequence[StepTime],
    candidate: Sequence[StepTime],
    error_share: float = 1.0,
) -> Comparison:
    """Compare paired measurements, one pair per round.

    The standard error of the mean log ratio is the larger of two: that from the spread between
    rounds, and that from the steps within the trials. With few rounds the first alone can be far
    too small by chance.

    Args:
        strategy: The candidate.
        default: Step times of the default, by round.
        candidate: Step times of the candidate, by round.
        error_share: Share of the error of ``1 - CONFIDENCE`` that this look may spend.

    Raises:
        ValueError: There is no round, or the numbers of rounds differ.
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
        time: Its step time; ``None`` if it failed or still runs.
        running: Whether it still runs.
    """

    strategy: Strategy
    time: StepTime | None
    running: bool = False

    def __post_init__(self) -> None:
        """A time that cannot be a duration, as in an imported trace, counts as a failure."""
        if self.time is not None and not 0 < self.time.mean_s < math.inf:
            object.__setattr__(self, "time", None)


class Confirmation:
    """Chooses the next measurement, and compares the candidates with the default.

    A candidate is dropped if it fails once, if it was slower in each of two rounds, or if it was
    slower in its first round by more than launches differ. The default was measured before, so one
    failure is not its fault: it is measured again.

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
        """Return the next strategy to measure; ``None`` if the confirmation is finished."""
        # Nothing is decided while measurements run (several trials at once).
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
        order = reversed(contenders) if rounds % 2 else contenders
        return next(s for s in order if begun[s] == rounds)

    def comparisons(self) -> list[Comparison]:
        """Return the comparison of each candidate that was measured and never failed, best first.

        Proven candidates come first, ordered by their speedup, not by their lower bound: a larger
        spread between rounds is no reason to prefer a slower candidate.
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

    def default_s(self) -> float:
        """Return the default's step time in the rounds of the best comparison, seconds.

        It is the geometric mean: over the speedup it is that of the candidate. NaN without a round.
        """
        rounds = max((c.rounds for c in self.comparisons()[:1]), default=0)
        times = self._times(self._default)[:rounds]
        return geometric_mean(t.mean_s for t in times) if times else math.nan

    def _failed(self, strategy: Strategy) -> bool:
        failures = sum(
            m.strategy == strategy and m.time is None and not m.running for m in self._measurements
        )
        return failures > (_FORGIVEN if strategy == self._default else 0)

    def _slower(self, strategy: Strategy) -> bool:
        """Return whether one was slower than the default in each round, and may be dropped."""
        pairs = list(zip(self._times(self._default), self._times(strategy), strict=False))
        factors = [own.mean_s / default.mean_s for default, own in pairs]
        if strategy == self._default or not factors or min(factors) <= 1:
            return False
        return len(factors) >= _SLOWER_ROUNDS or factors[0] > LAUNCHES_DIFFER

    def _times(self, strategy: Strategy) -> list[StepTime]:
        return [m.time for m in self._measurements if m.strategy == strategy and m.time]
