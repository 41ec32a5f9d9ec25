"""Non-inferiority: is the loss of a candidate at most a tolerance above the default's?

Default and candidate are trained in pairs, with the same seed and the same data. The unit of
observation is the pair: steps of one training are correlated, so they are no independent
observations. The tolerance is a share tau of the decrease of the default's loss, which is known
from the same few trainings only; so each pair has its own, and the excess over it is tested, as a
linear contrast of means takes the place of their ratio (Fieller, J. R. Stat. Soc. B 16, 1954). With
D_s the mean difference of pair s over the judged steps, F_s the decrease of the default's loss in
it, W_s the standard error of the excess from within the pair, and n pairs::

    X_s = D_s - tau F_s,     e = max( sd(X_s) / sqrt(n),  sqrt(sum of W_s^2) / n )
    upper bound of the excess = mean of X_s + t(1 - a_n 0.05 / m; n - 1) e

The null hypothesis is that the candidate is worse by the tolerance or more. The candidate is
admitted if the upper bound is below zero, so noise counts against it. A study may judge
``m`` candidates and the fastest admitted one wins, so each gets a share of the 5 % of false
admissions (Bonferroni); ``a_n`` spends that share over the looks (Jennison and Turnbull, J. R.
Stat. Soc. B 51, 1989). ``benchmarks/noninferiority.py`` simulates the error rates and the power.

Wrong refusals may be more frequent: they cost speed, not the quality of the model.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

#: Largest share of false admissions: studies that admit a candidate although none is as good.
FALSE_ADMISSIONS = 0.05
#: Largest number of candidates that are judged in a study.
MOST_JUDGED = 6
#: Number of pairs at each look -> share of the allowed error that this look may spend.
LOOKS = {4: 0.05, 6: 0.1, 8: 0.15, 12: 0.2, 16: 0.5}
MOST_PAIRS = max(LOOKS)
#: Trials are made longer by these factors, in turn, until the default's loss falls.
LENGTHS = (1, 2, 4, 8)
#: A candidate is worse if its difference exceeds the tolerance with this confidence, of each number
#: of pairs by itself; with fewer pairs than at the first look, by so many standard deviations
#: between two trainings.
_WORSE_CONFIDENCE, _WORSE_DEVIATIONS = 0.99, 4.0
#: One-sided confidence with which the spread of pairs is at least what futility assumes.
_SPREAD_CONFIDENCE = 0.9


class Outcome(str, enum.Enum):
    """The result for a candidate: as good, worse, or inconclusive."""

    ADMITTED = "admitted"
    WORSE = "worse"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True)
class Estimate:
    """What one training, or one pair of trainings, says of a mean.

    Attributes:
        mean: The mean over some steps.
        error: Its standard error from within the training.
    """

    mean: float
    error: float


@dataclass(frozen=True)
class Pair:
    """One training of the candidate against one of the default, with the same seed and data.

    Attributes:
        difference: Loss of the candidate minus the default's, over the judged steps.
        allowed: The tolerance: a share of the decrease of the default's loss in this pair.
    """

    difference: Estimate
    allowed: Estimate

    @property
    def excess(self) -> Estimate:
        """The difference beyond the tolerance."""
        error = math.hypot(self.difference.error, self.allowed.error)
        return Estimate(self.difference.mean - self.allowed.mean, error)


@dataclass(frozen=True)
class PairedResult:
    """The result of the test on some pairs.

    Attributes:
        outcome: The outcome; ``None`` if more pairs are needed.
        difference: Mean difference of the pairs.
        allowed: Their mean tolerance.
        bound: Upper bound of the difference for this tolerance, at the last look; infinite before
            the first one.
        pairs: Number of pairs that were used.
    """

    outcome: Outcome | None
    difference: float
    allowed: float
    bound: float
    pairs: int


def judge_pairs(pairs: Sequence[Pair], seeds_deviation: float) -> PairedResult:
    """Test a candidate on its pairs, in their order; later pairs do not change an outcome.

    Args:
        pairs: The pairs, at least one.
        seeds_deviation: Standard deviation of the default's loss over seeds.
    """
    bound = math.inf
    outcome = None
    for count in range(1, len(pairs) + 1):
        excesses = [pair.excess for pair in pairs[:count]]
        mean, error = _mean(excesses), _error(excesses)
        if count in LOOKS:
            bound = mean + _quantile(_admitting(count), count - 1) * error
        if bound < 0:
            outcome = Outcome.ADMITTED
        elif mean > _margin(count, error, seeds_deviation):
            outcome = Outcome.WORSE
        elif count in LOOKS and (count == MOST_PAIRS or _futile(mean, error, count)):
            outcome = Outcome.NOT_SHOWN
        if outcome is not None:
            break
    used = pairs[:count]
    allowed = _mean([pair.allowed for pair in used])
    difference = _mean([pair.difference for pair in used])
    return PairedResult(outcome, difference, allowed, allowed + bound, count)


def has_fallen(falls: Sequence[Estimate]) -> bool:
    """Return whether the default's loss has decreased since the beginning, beyond its noise.

    Args:
        falls: The decrease for each seed; at least two.
    """
    confidence = 1 - FALSE_ADMISSIONS / len(LENGTHS)  # it is asked for each length
    return _mean(falls) > _quantile(confidence, len(falls) - 1) * _error(falls)


def _mean(estimates: Sequence[Estimate]) -> float:
    return statistics.fmean(each.mean for each in estimates)


def _error(estimates: Sequence[Estimate]) -> float:
    """Standard error of the mean: from the spread or from within, the larger one."""
    count = len(estimates)
    within = math.sqrt(sum(each.error**2 for each in estimates)) / count
    if count == 1:
        return within
    spread = deviation([each.mean for each in estimates]) / math.sqrt(count)
    return max(spread, within)


def deviation(values: Sequence[float]) -> float:
    """Standard deviation of two or more values; ``statistics.stdev`` takes 20 times as long."""
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _margin(count: int, error: float, seeds_deviation: float) -> float:
    """Return the margin above the tolerance from which a candidate is worse."""
    if count >= min(LOOKS):
        return _quantile(_WORSE_CONFIDENCE, count - 1) * error
    # So few pairs do not give their spread, so that of two trainings of the default is used.
    alone = math.sqrt(2.0 / count) * seeds_deviation
    return _WORSE_DEVIATIONS * max(alone, error)


def _futile(mean: float, error: float, count: int) -> bool:
    """Return whether even the last look is not expected to admit, under favourable assumptions.

    These are: the mean one standard error lower, and the spread at its lower confidence bound.
    """
    least = error * math.sqrt(count) * _least_spread(count - 1)
    at_last = _quantile(_admitting(MOST_PAIRS), MOST_PAIRS - 1) * least / math.sqrt(MOST_PAIRS)
    return mean - error + at_last > 0


def _admitting(count: int) -> float:
    """One-sided confidence of the upper bound at a look."""
    return 1 - LOOKS[count] * FALSE_ADMISSIONS / MOST_JUDGED


@cache
def _least_spread(degrees: int) -> float:
    """Lower confidence bound of a standard deviation, as a share of its estimate."""
    from scipy.stats import chi2

    return math.sqrt(degrees / float(chi2.ppf(_SPREAD_CONFIDENCE, degrees)))


@cache
def _quantile(confidence: float, degrees: int) -> float:
    from scipy.stats import t

    return float(t.ppf(confidence, degrees))
