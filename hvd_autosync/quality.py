"""Is a lossy strategy as good for the model? Longer trials, judged by the losses of their steps.

The default is trained with three seeds, then candidates with the first one, fastest first, until
one of them may be used: it is the fastest that may. It may if, at equal samples, its loss is above
the default's by no more than seeds make of it, and a tolerance; or if within the time of the
default's trial it comes to the loss that the default ended with. Losses are means over all ranks,
and over the last quarter of a trial.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_autosync.search_space import Strategy, TrialResult

#: Seeds of the default's trials; candidates have the first.
SEEDS = (0, 1, 2)
#: A loss may be above the default's by so many standard deviations of the default's seeds and by
#: this share of it.
_DEVIATIONS, _TOLERANCE = 2.0, 0.01
#: Steps of a trial that are looked at, as a share, and fewest steps that can be judged.
_LAST, _FEWEST = 0.25, 20
#: A candidate is trained for the time of the default, but no more than so many times its steps.
MOST_STEPS_FACTOR = 3.0


@dataclass(frozen=True)
class QualityTrial:
    """One trial that judges.

    Attributes:
        strategy: The default or a candidate.
        seed: Added to the script's own seeds.
        losses: Mean over ranks of the loss of each step; none where it failed or has no losses.
        running: Whether it still runs.
    """

    strategy: Strategy
    seed: int
    losses: tuple[float, ...] = ()
    running: bool = False


@dataclass(frozen=True)
class Verdict:
    """What is said of one candidate.

    Attributes:
        strategy: The candidate.
        admissible: Whether it may be used.
        loss: Its loss at as many samples as the default's; NaN where there is none.
        default_loss: The default's, with the same seed.
        allowed: By how much the first may be above the second.
        reason: One sentence for people.
    """

    strategy: Strategy
    admissible: bool
    loss: float
    default_loss: float
    allowed: float
    reason: str


def losses_of(result: TrialResult) -> tuple[float, ...]:
    """Mean over ranks of the loss of each step; none where some rank has none."""
    rows = [rank.losses for rank in result.ranks]
    if not result.status.measured or not rows:
        return ()
    return tuple(statistics.fmean(step) for step in zip(*rows, strict=False))


class QualityCheck:
    """Who is trained next, and what the trials so far say.

    Args:
        default: The default strategy.
        candidates: Lossy strategies to judge, fastest first.
        trials: The trials so far, in order.
    """

    def __init__(
        self, default: Strategy, candidates: Sequence[Strategy], trials: Sequence[QualityTrial]
    ) -> None:
        self._default = default
        self._candidates = candidates
        self._trials = trials

    def next(self) -> tuple[Strategy, int] | None:
        """Strategy and seed of the next trial; ``None`` when there is nothing left to learn."""
        if not self._candidates or any(verdict.admissible for verdict in self.verdicts()):
            return None
        begun = {(trial.strategy, trial.seed): trial for trial in self._trials}
        first = begun.get((self._default, SEEDS[0]))
        if first is not None and not first.running and len(first.losses) < _FEWEST:
            return None  # nothing can be compared with it
        wanted = [(self._default, seed) for seed in SEEDS]
        wanted += [(candidate, SEEDS[0]) for candidate in self._candidates]
        return next((each for each in wanted if each not in begun), None)

    def verdicts(self) -> list[Verdict]:
        """One for each candidate that was tried; for all where none can be judged."""
        tried = {trial.strategy for trial in self._trials if not trial.running}
        blind = self._default in tried and len(self._losses(self._default, SEEDS[0])) < _FEWEST
        return [self._verdict(each) for each in self._candidates if blind or each in tried]

    def _losses(self, strategy: Strategy, seed: int) -> tuple[float, ...]:
        found = (t.losses for t in self._trials if (t.strategy, t.seed) == (strategy, seed))
        return next(found, ())

    def _verdict(self, candidate: Strategy) -> Verdict:
        default, losses = (self._losses(s, SEEDS[0]) for s in (self._default, candidate))
        if len(default) < _FEWEST:
            reason = (
                "no loss is seen to judge it by: call hvd_autosync.report(loss) in every step"
            )
            return Verdict(candidate, False, math.nan, math.nan, math.nan, reason)
        count = len(default)
        base = _last(default, count)
        seeds = [_last(own, count) for seed in SEEDS if (own := self._losses(self._default, seed))]
        noise = statistics.stdev(seeds) if len(seeds) > 1 else 0.0
        allowed = _DEVIATIONS * noise + _TOLERANCE * abs(base)
        if len(losses) < _FEWEST or not all(map(math.isfinite, losses)):
            reason = "its training failed or its loss is no number"
            return Verdict(candidate, False, math.nan, base, allowed, reason)
        loss, width = _last(losses, count), max(int(_LAST * count), 1)
        ends = range(min(count, len(losses)), len(losses) + 1)
        in_time = min(statistics.fmean(losses[end - width : end]) for end in ends)
        if loss <= base + allowed:
            reason = "its loss is within what seeds make of the default's"
        elif in_time <= base + allowed:
            reason = "it comes to the default's loss earlier in time"
        else:
            reason = "its loss is above the default's by more than seeds make of it"
            return Verdict(candidate, False, loss, base, allowed, reason)
        return Verdict(candidate, True, loss, base, allowed, reason)


def _last(losses: Sequence[float], count: int) -> float:
    """The mean of the last quarter of the first ``count`` losses."""
    seen = losses[:count]
    return statistics.fmean(seen[-max(int(_LAST * len(seen)), 1) :])
