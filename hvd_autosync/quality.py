"""Is a lossy strategy as good for the model? Longer trials, judged by the losses of their steps.

The default is trained with three seeds, then candidates with the first one, as somebody chooses
who knows how fast they are. A candidate may be used if, at equal samples, its loss is above
the default's by no more than seeds make of it, and a tolerance; or if within the time of the
default's trial it comes to the loss that the default ended with. Losses are means over all ranks,
and over the last quarter of a trial.

Under local steps these are the losses of replicas that train apart, which may be fine while their
average is not. So by how much the highest loss of a round is above the others of it is compared,
too, with the same of as many steps of the default.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hvd_autosync.search_space import Strategy, TrialResult
from hvd_autosync.search_space.trial import LOSS_WINDOW

#: Seeds of the default's trials; candidates have the first.
SEEDS = (0, 1, 2)
#: So many candidates are judged.
MOST_JUDGED = 6
#: A loss may be above the default's by so many standard deviations of the default's seeds and by
#: this share of it.
_DEVIATIONS, _TOLERANCE = 2.0, 0.01
#: Steps of a trial that are looked at, as a share, and fewest steps that can be judged.
_LAST, _FEWEST = 0.25, 20
#: A window of a guarded training may be above the default's by so many standard deviations of the
#: default's seeds, and by this share of it.
_GUARD_DEVIATIONS, _GUARD_TOLERANCE = 6.0, 0.05
#: Excess of what was refused for something else than its own loss, at least.
_REFUSED = 2.0
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
        round_steps: Steps of a round of local steps.
    """

    strategy: Strategy
    seed: int
    losses: tuple[float, ...] = ()
    running: bool = False
    round_steps: int = 1


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

    @property
    def excess(self) -> float:
        """Its loss above the default's over what is allowed; infinite where there is none."""
        if not math.isfinite(self.loss):
            return math.inf
        excess = (self.loss - self.default_loss) / max(self.allowed, 1e-12)
        return min(excess, 1.0) if self.admissible else max(excess, _REFUSED)


#: Which of the candidates that were not tried is judged next, after these verdicts, if any.
Choose = Callable[[Sequence[Strategy], Sequence[Verdict]], Strategy | None]


def losses_of(result: TrialResult) -> tuple[float, ...]:
    """Mean over ranks of the loss of each step; none where some rank has none."""
    rows = [rank.losses for rank in result.ranks]
    if not result.status.measured or not rows:
        return ()
    return tuple(statistics.fmean(step) for step in zip(*rows, strict=False))


def loss_ceilings(
    trials: Sequence[Sequence[float]], own: Sequence[float] = ()
) -> tuple[float, ...]:
    """The highest healthy mean loss of each window of a training under a lossy strategy.

    A strategy that was judged and may be used is expected to be as it was then: its losses may lag
    behind the default's, where its steps are so much faster. Any other has to keep up.

    Args:
        trials: Losses of the steps of the default's trials, one sequence for each seed.
        own: Losses of the steps of the strategy's own trial, where it may be used.

    Returns:
        One for each window of ``LOSS_WINDOW`` steps; none where there is too little to judge by.
    """
    count = min((len(losses) for losses in trials), default=0) // LOSS_WINDOW
    if len(trials) < 2 or not all(math.isfinite(loss) for losses in trials for loss in losses):
        return ()
    starts = range(0, count * LOSS_WINDOW, LOSS_WINDOW)
    windows = [[statistics.fmean(own[i : i + LOSS_WINDOW]) for own in trials] for i in starts]
    if not windows:
        return ()
    noise = math.sqrt(statistics.fmean(statistics.variance(window) for window in windows))
    allowed = _GUARD_DEVIATIONS * noise
    levels = [statistics.fmean(window) for window in windows]
    if all(math.isfinite(loss) for loss in own):
        own_levels = [
            statistics.fmean(own[i : i + LOSS_WINDOW])
            for i in range(0, len(own) - LOSS_WINDOW + 1, LOSS_WINDOW)
        ]
        levels = [max(pair) for pair in zip_longest(levels, own_levels, fillvalue=-math.inf)]
    return tuple(level + max(allowed, _GUARD_TOLERANCE * abs(level)) for level in levels)


class QualityCheck:
    """Who is trained next, and what the trials so far say.

    Args:
        default: The default strategy.
        candidates: Lossy strategies that may be judged.
        trials: The trials so far, in order.
        choose: Chooses among them.
    """

    def __init__(
        self, default: Strategy, candidates: Sequence[Strategy], trials: Sequence[QualityTrial],
        choose: Choose,
    ) -> None:  # fmt: skip
        self._default = default
        self._candidates = candidates
        self._trials = trials
        self._choose = choose

    def next(self) -> tuple[Strategy, int] | None:
        """Strategy and seed of the next trial; ``None`` when there is nothing left to learn."""
        if not self._candidates:
            return None
        begun = {(trial.strategy, trial.seed): trial for trial in self._trials}
        first = begun.get((self._default, SEEDS[0]))
        if first is not None and not first.running and len(first.losses) < _FEWEST:
            return None  # nothing can be compared with it
        if not begun and self._choose(self._candidates, ()) is None:
            return None  # none is worth the trials of the default
        for seed in SEEDS:
            if (self._default, seed) not in begun:
                return self._default, seed
        untried = [each for each in self._candidates if (each, SEEDS[0]) not in begun]
        chosen = self._choose(untried, self.verdicts()) if untried else None
        return None if chosen is None else (chosen, SEEDS[0])

    def verdicts(self) -> list[Verdict]:
        """One for each candidate that was tried; for all where none can be judged."""
        tried = {trial.strategy for trial in self._trials if not trial.running}
        blind = self._default in tried and len(self._losses(self._default, SEEDS[0])) < _FEWEST
        return [self._verdict(each) for each in self._candidates if blind or each in tried]

    def _average_is_bad(self, candidate: Strategy, allowed: float) -> bool:
        """Whether replicas have drifted too far apart for their average."""
        trial = next(t for t in self._trials if t.strategy == candidate)
        length = trial.round_steps
        if length == 1:
            return False
        own = [t.losses for t in self._trials if t.strategy == self._default]
        defaults = [
            peak
            for losses in own if len(losses) >= _FEWEST
            for peak in _peaks(losses, len(losses), min(length, int(_LAST * len(losses))))
        ]  # fmt: skip
        # A round that is longer than the default's trial ends after as many samples.
        count = max(min(len(trial.losses), len(own[0])), min(len(trial.losses), 2 * length))
        peaks = _peaks(trial.losses, count, length)
        excess = statistics.fmean(peaks) - statistics.fmean(defaults)
        noise = statistics.stdev(defaults) if len(defaults) > 1 else 0.0
        error = noise * math.sqrt(1 / len(peaks) + 1 / len(defaults))
        return excess > allowed + _DEVIATIONS * error

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
        whole = [loss for seed in SEEDS for loss in self._losses(self._default, seed)]
        if not all(map(math.isfinite, whole)):
            reason = "losses of the default itself are no numbers, so nothing can be judged by them"
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
        if self._average_is_bad(candidate, allowed):
            reason = "the average of its replicas is worse than they are"
            return Verdict(candidate, False, loss, base, allowed, reason)
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


def _peaks(losses: Sequence[float], count: int, length: int) -> list[float]:
    """By how much the highest loss of each stretch of ``length`` steps is above the stretch's mean.

    Over the last quarter before ``count``, at least one stretch, or what there is of it.
    """
    quarter = max(int(_LAST * count), length)
    starts = range(count - length, max(count - quarter, 0) - 1, -length)
    stretches = [losses[start : start + length] for start in starts] or [losses[:count]]
    return [max(stretch) - statistics.fmean(stretch) for stretch in stretches]
