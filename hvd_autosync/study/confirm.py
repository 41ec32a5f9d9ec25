"""Confirmation: the best candidates are measured again, in turn with the default.

The fastest of many noisy trials looks faster than it is (winner's curse). So the candidates and the
default are measured again, round by round, and only these measurements count. Drifts of the machine
affect a round much alike, so the interval is that of paired log ratios. Every second round has the
reverse order (A B C, C B A, ...), so a steady drift does not always favour the same strategy.

Testing after each round, and each candidate, is multiple testing. So the allowed error is divided
among all looks at all candidates, and the intervals hold at all looks together (repeated confidence
intervals: Jennison and Turnbull, J. R. Stat. Soc. B 51, 1989). It is spent in proportion to the
rounds (Lan and DeMets, Biometrika 70, 1983). A candidate that even the last look would hardly prove
faster is pruned, which spends no error.

A launch that something else disturbed can be half as fast as the others. So once there are rounds
enough to tell, one that stands apart is left out (the identifier of Hampel, J. Am. Stat. Assoc. 69,
1974). Of two equal strategies either may be disturbed, so this favours neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

import numpy as np
from numpy.typing import NDArray

from hvd_autosync.search_space import StepTime, Strategy
from hvd_autosync.search_space.records import OrInf, Real, Record

#: Level of the two-sided interval; its lower end is a one-sided bound with 95 % confidence.
CONFIDENCE = 0.9
#: Rounds at the first look, and at the last. There is one after each round between them.
MIN_ROUNDS, MAX_ROUNDS = 3, 16
#: After so many rounds only candidates go on that more rounds may prove faster: their advantage is
#: at least this share of what would do so at the last look.
_SIFTED_ROUNDS, _PROMISING = 6, 0.6
#: From so many rounds on, one of as many is left out whose log ratio is further from the median
#: than so many standard deviations, estimated from the median absolute deviation.
_TELLING_ROUNDS, _APART = 6, 4.0
_DEVIATIONS = 1.4826  # a standard deviation in median absolute deviations, for normal noise
#: Launches of one strategy hardly ever differ by more than this factor.
LAUNCHES_DIFFER = 1.1
#: A candidate that was slower in each of so many rounds is pruned.
_SLOWER_ROUNDS = 2
#: Number of failures of the default that are tolerated.
_FORGIVEN = 1


@dataclass(frozen=True)
class Comparison(Record):
    """One candidate against the default.

    Attributes:
        strategy: The candidate.
        speedup: Default's step time over the candidate's; above 1 the candidate is faster.
        low: Lower end of its interval.
        high: Upper end of its interval.
        rounds: Rounds in which both were measured, those that were left out among them.
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


def compare(
    strategy: Strategy,
    default: Sequence[StepTime],
    candidate: Sequence[StepTime],
    error_share: float = 1.0,
) -> Comparison:
    """Compare paired measurements, one pair per round.

    Rounds that stand apart are left out. The standard error of the mean log ratio is the larger of
    two: that from the spread between rounds, and that from the steps within the trials. With few
    rounds the first alone can be far too small by chance.

    Args:
        strategy: The candidate.
        default: Step times of the default, by round.
        candidate: Step times of the candidate, by round.
        error_share: Share of the error of ``1 - CONFIDENCE`` that this look may spend.

    Raises:
        ValueError: There is no round, or the numbers of rounds differ.
    """
    if not default:
        raise ValueError("nothing to compare: no round was measured")
    usual = usual_rounds(default, candidate)
    pairs = [(default[number], candidate[number]) for number in usual]
    ratios = _log_ratios(*zip(*pairs, strict=True))
    rounds = len(ratios)
    within = sum(
        (d.standard_error_s / d.mean_s) ** 2 + (c.standard_error_s / c.mean_s) ** 2
        for d, c in pairs
    )
    error = math.sqrt(within) / rounds
    if rounds > 1:
        error = max(error, float(ratios.std(ddof=1)) / math.sqrt(rounds))
        half = _quantile(error_share, rounds) * error
    else:
        half = math.inf
    center = float(ratios.mean())
    return Comparison(
        strategy, math.exp(center), math.exp(center - half), math.exp(center + half), len(default)
    )


def _log_ratios(default: Sequence[StepTime], candidate: Sequence[StepTime]) -> NDArray[np.float64]:
    pairs = zip(default, candidate, strict=True)
    return np.array([math.log(d.mean_s) - math.log(c.mean_s) for d, c in pairs])


def usual_rounds(default: Sequence[StepTime], candidate: Sequence[StepTime]) -> list[int]:
    """Return the rounds that do not stand apart; all if too few are known, or too many would.

    Args:
        default: Step times of the default, by round.
        candidate: Step times of a candidate, by round.
    """
    ratios = _log_ratios(default, candidate)
    rounds = range(len(ratios))
    apart = np.abs(ratios - np.median(ratios))
    limit = _APART * _DEVIATIONS * np.median(apart)
    usual = [number for number in rounds if apart[number] <= limit]
    few = len(rounds) - len(usual) <= len(rounds) // _TELLING_ROUNDS
    return usual if few else list(rounds)


def _quantile(error_share: float, rounds: int) -> float:
    """Return half the width of the interval of a look, in standard errors."""
    from scipy.stats import t

    return float(t.ppf(1 - error_share * (1 - CONFIDENCE) / 2, rounds - 1))


def _spent(rounds: int) -> float:
    """Return the share of the allowed error that the look after so many rounds spends."""
    return (MIN_ROUNDS if rounds <= MIN_ROUNDS else 1) / MAX_ROUNDS


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

    A candidate is pruned if it fails once, if it was slower in each of two rounds, or in its first
    by more than launches differ, and after some rounds if more would hardly prove it faster or if
    another is proven that is faster. The default was measured before, so one failure is not its
    fault: it is measured again.

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
        running = any(m.running for m in self._measurements)
        comparisons = self.comparisons()
        begun = self._begun(comparisons)
        if self._failed(self._default) or len(begun) < 2:
            return None
        rounds = min(begun.values())
        # Nothing is settled while measurements run (several trials at once).
        undecided = any(
            not c.proven and self._promise(c) > 1.0 for c in comparisons if c.strategy in begun
        )
        settled = MIN_ROUNDS <= rounds == max(begun.values()) and not (running or undecided)
        if settled or rounds >= MAX_ROUNDS:
            return None
        order = reversed(begun) if rounds % 2 else begun
        return next(s for s in order if begun[s] == rounds)

    def next_round(self) -> tuple[int, float]:
        """Return the measurements of a round that begins now, and what it may save.

        The latter is a share of the step time that would be used without it. Both are 0 within a
        round, and in the first ones, before which nothing can be proven.
        """
        comparisons = self.comparisons()
        begun = self._begun(comparisons)
        rounds = min(begun.values(), default=0)
        if rounds < MIN_ROUNDS or rounds != max(begun.values()):
            return 0, 0.0
        proven = max((c.speedup for c in comparisons if c.proven), default=1.0)
        undecided = (c for c in comparisons if c.strategy in begun and not c.proven)
        best = max(map(self._promise, undecided), default=1.0)
        return len(begun), 1 - proven / max(best, proven)

    def _promise(self, comparison: Comparison) -> float:
        """Return the speedup that one may have: one disturbed launch of a few does not hide it."""
        return max(comparison.speedup, median(self._speedups(comparison.strategy)))

    def _begun(self, comparisons: Sequence[Comparison]) -> dict[Strategy, int]:
        """Return how often each was measured, or is now, that is not pruned."""
        good = [m.strategy for m in self._measurements if m.running or m.time is not None]
        running = [m.strategy for m in self._measurements if m.running]
        futile = [c.strategy for c in comparisons if self._futile(c, comparisons)]
        return {
            strategy: good.count(strategy)
            for strategy in (self._default, *self._candidates)
            if not self._failed(strategy)
            and (strategy in running or not (strategy in futile or self._slower(strategy)))
        }

    def comparisons(self) -> list[Comparison]:
        """Return the comparison of each candidate that was measured and never failed, best first.

        Proven candidates come first, ordered by their speedup, not by their lower bound: a larger
        spread between rounds is no reason to prefer a slower candidate.
        """
        found = []
        for candidate in self._candidates:
            default, own = self._rounds(candidate)
            if own and not self._failed(candidate):
                found.append(compare(candidate, default, own, self._error_share(len(own))))
        return sorted(found, key=lambda each: (each.proven, each.speedup), reverse=True)

    def default_s(self) -> float:
        """Return the default's step time in the rounds of the best comparison, seconds.

        It is the geometric mean: over the speedup it is that of the candidate. NaN without a round.
        """
        for best in self.comparisons()[:1]:
            default, own = self._rounds(best.strategy)
            return geometric_mean(default[number].mean_s for number in usual_rounds(default, own))
        return math.nan

    def _error_share(self, rounds: int) -> float:
        """Return the share of the allowed error of a look at one candidate."""
        return _spent(rounds) / len(self._candidates)

    def _futile(self, one: Comparison, comparisons: Sequence[Comparison]) -> bool:
        """Return whether one of all comparisons will hardly come to be that of the winner."""
        if one.rounds < _SIFTED_ROUNDS:
            return False
        fastest = max((each.speedup for each in comparisons if each.proven), default=1.0)
        if one.speedup < fastest or not one.low:  # of times that no job has
            return True
        left = len(usual_rounds(*self._rounds(one.strategy)))
        last, now = (
            _quantile(self._error_share(rounds), used) / math.sqrt(used)
            for rounds, used in ((MAX_ROUNDS, MAX_ROUNDS), (one.rounds, left))
        )
        center = math.log(one.speedup)
        needed = (center - math.log(one.low)) * last / now
        return center < _PROMISING * needed

    def _failed(self, strategy: Strategy) -> bool:
        failures = sum(
            m.strategy == strategy and m.time is None and not m.running for m in self._measurements
        )
        return failures > (_FORGIVEN if strategy == self._default else 0)

    def _slower(self, strategy: Strategy) -> bool:
        """Return whether one was slower than the default in each round, and may be pruned."""
        speedups = self._speedups(strategy)
        if strategy == self._default or not speedups or max(speedups) >= 1:
            return False
        return len(speedups) >= _SLOWER_ROUNDS or speedups[0] < 1 / LAUNCHES_DIFFER

    def _speedups(self, strategy: Strategy) -> list[float]:
        """Return the speedups of one over the default, by round."""
        default, own = self._rounds(strategy)
        return [d.mean_s / c.mean_s for d, c in zip(default, own, strict=True)]

    def _rounds(self, strategy: Strategy) -> tuple[list[StepTime], list[StepTime]]:
        """Return the step times of the default and of one, in the rounds that have both."""
        default, own = self._times(self._default), self._times(strategy)
        rounds = min(len(default), len(own), MAX_ROUNDS)
        return default[:rounds], own[:rounds]

    def _times(self, strategy: Strategy) -> list[StepTime]:
        return [m.time for m in self._measurements if m.strategy == strategy and m.time]
