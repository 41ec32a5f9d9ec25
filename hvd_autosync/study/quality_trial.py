"""Quality trials, and what their losses say of one training.

Only losses are judged that are those of the model that would be used: under local steps those of
the replicas' average.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hvd_autosync.search_space import RankReport, Strategy, TrialResult, TrialStatus
from hvd_autosync.search_space.sync_plan import schedule_of
from hvd_autosync.study.noninferiority import LENGTHS, LOOKS, Estimate, deviation, has_fallen

#: Why no strategy is judged where :func:`has_several_losses`.
SEVERAL_LOSSES = "the script has several losses: call hvd_autosync.report(loss) in every step"
#: Number of seeds of the default that run first; they give the decrease and the noise of its loss.
FIRST_SEEDS = min(LOOKS)
#: Share of a trial's steps that is judged, share that is its beginning, and fewest steps to judge.
_LAST, _BEGINNING, FEWEST_STEPS = 0.25, 0.05, 20
#: Least number of rounds of local steps whose averages are judged, if there are so many.
_FEWEST_ROUNDS = 4
#: A training with less than this share of the default's steps ended early: a loss may be lost.
_COMPLETE = 0.98
#: Two seeds are alike below this share of the mean square between successive steps.
_ALIKE = 0.01
#: Block length for standard errors: neighbouring steps are correlated, means of blocks are less so.
_BLOCK = 5


@dataclass(frozen=True)
class QualityTrial:
    """One quality trial.

    Attributes:
        strategy: The default or a candidate.
        seed: Seed of all its random numbers.
        steps: Steps that it was asked for.
        losses: Mean over ranks of the loss of each step; empty if it failed or has no loss.
        running: Whether it still runs.
        crashed: Whether its job failed.
        local_steps: Whether the strategy has rounds of local steps.
        in_round: Positions of the losses at which replicas differed within a round.
        ends_s: Seconds from its beginning to the end of each step, means over ranks; empty if they
            are unknown.
        whole: Steps that it made, with the warm-up, if they are all that it was asked for; else 0.
        several_losses: Whether it has no loss because optimizers have losses of their own.
        one_late: Whether the losses of the first rank are one step behind those of another, as
            where it alone reports them, after the step.
    """

    strategy: Strategy
    seed: int
    steps: int
    losses: tuple[float, ...] = ()
    running: bool = False
    crashed: bool = False
    local_steps: bool = False
    in_round: frozenset[int] = frozenset()
    ends_s: tuple[float, ...] = ()
    whole: int = 0
    several_losses: bool = False
    one_late: bool = False

    @classmethod
    def of(
        cls, strategy: Strategy, seed: int, steps: int, result: TrialResult | None
    ) -> QualityTrial:
        """Return the trial with this result; ``None``: it still runs."""
        if result is None:
            return cls(strategy, seed, steps, running=True)
        diverged = result.status is TrialStatus.DIVERGED
        completed = result.status is TrialStatus.COMPLETED
        return cls(
            strategy,
            seed,
            steps,
            (math.nan,) * FEWEST_STEPS if diverged else losses_of(result),
            crashed=result.status in (TrialStatus.CRASHED, TrialStatus.HUNG),
            local_steps=schedule_of(strategy) is not None,
            in_round=frozenset(step for rank in result.ranks for step in rank.in_round),
            ends_s=ends_of(result),
            whole=min((len(rank.step_s) for rank in result.ranks), default=0) * completed,
            several_losses=has_several_losses(result),
            one_late=any(_is_behind(result.ranks[0], other) for other in result.ranks[1:]),
        )

    @property
    def unseen(self) -> bool:
        """Whether it has ended without a loss of an average of its replicas."""
        return not self.running and not self.judged(len(self.losses))

    @property
    def made(self) -> int:
        """Number of steps that it made, as far as is known."""
        return len(self.ends_s) or len(self.losses)

    @property
    def averages(self) -> Sequence[float]:
        """Its losses at which replicas did not differ, or all if they always did."""
        return [x for i, x in enumerate(self.losses) if i not in self.in_round] or self.losses

    def count_within(self, other: QualityTrial) -> int:
        """Return how many of its losses it had in the time of ``other``, at least one.

        Times begin with the end of the first step: what comes before it, such as the start of the
        workers that load the data, is little of a training, but much of a trial. If a step time is
        unknown, they are as many as those of ``other`` at most.
        """
        if not self.ends_s or not other.ends_s:
            return max(min(len(self.losses), len(other.losses)), 1)
        after_s = [end_s - self.ends_s[0] for end_s in self.ends_s]
        steps = bisect_right(after_s, other.ends_s[-1] - other.ends_s[0])
        return max(steps * len(self.losses) // len(self.ends_s), 1)

    def judged(self, count: int) -> Sequence[int]:
        """Return the judged ones of the first ``count`` steps.

        These are the last quarter. With local steps they are those of the average in it, or the
        last four, which begin earlier, if it has fewer; none if no round has ended.
        """
        first = count - last_quarter(count)
        if not self.local_steps:
            return range(first, count)
        rounds = range(min(self.in_round, default=count), count)
        averages = [step for step in rounds if step not in self.in_round]
        late = [step for step in averages if step >= first]
        return late if len(late) >= _FEWEST_ROUNDS else averages[-_FEWEST_ROUNDS:]


def losses_of(result: TrialResult) -> tuple[float, ...]:
    """Return the mean over ranks of the loss of each step; empty if a rank has none, or several."""
    rows = [rank.losses for rank in result.ranks]
    if not result.status.measured or not rows or has_several_losses(result):
        return ()
    return tuple(statistics.fmean(step) for step in zip(*rows, strict=False))


def in_every_step(result: TrialResult) -> bool:
    """Return whether each step has a loss, but for one that may be reported after the last."""
    steps = min((len(rank.step_s) for rank in result.ranks), default=0)
    return len(losses_of(result)) >= _COMPLETE * steps - 1


def has_several_losses(result: TrialResult) -> bool:
    """Return whether optimizers have losses of their own, and the script reports none."""
    return any(rank.several_losses for rank in result.ranks)


def ends_of(result: TrialResult) -> tuple[float, ...]:
    """Return the seconds from the first step's beginning to the end of each, means over ranks."""
    rows = [rank.step_s for rank in result.ranks]
    return tuple(accumulate(statistics.fmean(step) for step in zip(*rows, strict=False)))


def _is_behind(one: RankReport, other: RankReport) -> bool:
    """Return whether the losses of a rank were in rounds one position after those of another."""
    expected = {step + 1 for step in other.in_round if step + 1 < len(one.losses)}
    return bool(expected) and expected == set(one.in_round) != set(other.in_round)


def failed(trial: QualityTrial) -> bool:
    """Return whether a trial has ended without losses to judge it by, or with infinite ones."""
    losses = trial.losses
    return not trial.running and (len(losses) < FEWEST_STEPS or not math.isfinite(sum(losses)))


def ended_early(trial: QualityTrial, default: QualityTrial) -> bool:
    """Return whether a training ended by itself before it had the steps of the default's.

    It may have been asked for fewer, as the warm-up follows the last trial of the default.
    """
    steps = len(default.losses)
    return len(trial.losses) < _COMPLETE * min(steps, trial.whole or steps)


def are_alike(one: Sequence[float], other: Sequence[float]) -> bool:
    """Return whether two seeds have given the same training, but for rounding.

    Their losses then differ by far less than those of successive steps do.
    """
    apart = _mean_square(a - b for a, b in zip(one, other, strict=False))
    return apart <= _ALIKE * _mean_square(after - before for before, after in pairwise(one))


def _mean_square(differences: Iterable[float]) -> float:
    return statistics.fmean(each * each for each in differences)


def usable(default: Sequence[QualityTrial]) -> list[QualityTrial]:
    """Return those of the default's trials that give the decrease and the noise of its loss.

    A launch may fail without a fault of the script's.
    """
    return [trial for trial in default if not trial.crashed][:FIRST_SEEDS]


def enough_steps(
    default: Strategy, trials: Sequence[QualityTrial], steps: int, *, spent: bool
) -> int:
    """Return the steps of a trial after which the default's loss has fallen beyond its noise.

    They are more than ``steps`` only if all first seeds have shown that fewer do not suffice, and,
    if the budget is spent, only if all have been tried with more.
    """
    enough = steps
    for length in (factor * steps for factor in LENGTHS):
        own = usable([t for t in trials if t.strategy == default and t.steps == length])
        complete = len(own) == FIRST_SEEDS and not any(trial.running for trial in own)
        if spent and not complete:
            break
        enough = length
        # A script may report a loss in some steps only.
        short = any(failed(t) or (len(t.losses) < length and not t.whole) for t in own)
        if not complete or short or has_fallen([fall_of(trial.averages) for trial in own]):
            break
    return enough


def fall_of(losses: Sequence[float]) -> Estimate:
    """Return the decrease of a loss since the beginning."""
    last = last_losses(losses)
    beginning = losses[: max(int(_BEGINNING * len(losses)), 1)]
    return Estimate(statistics.fmean(beginning) - statistics.fmean(last), standard_error(last))


def last_losses(losses: Sequence[float]) -> Sequence[float]:
    """Return the losses of the last quarter of the steps."""
    return losses[-last_quarter(len(losses)) :]


def last_quarter(count: int) -> int:
    """Return the number of steps in the last quarter of ``count``."""
    return max(int(_LAST * count), 1)


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean of ``values``, or of that of their blocks if larger."""
    if len(values) < 2:
        return 0.0
    error = deviation(values) / math.sqrt(len(values))
    starts = range(0, len(values) - _BLOCK + 1, _BLOCK)
    blocks = [statistics.fmean(values[start : start + _BLOCK]) for start in starts]
    if len(blocks) < _FEWEST_ROUNDS:
        return error
    return max(error, deviation(blocks) / math.sqrt(len(blocks)))
