"""The quality check: is a lossy strategy as good for the model as the default?

Quality trials are longer than others and are judged by the losses of their steps. The default and a
candidate are trained in pairs, with the same seed and the same data, seed after seed, until the
test is conclusive (:mod:`hvd_autosync.study.noninferiority`) or the budget is used up. It compares
the losses, means over all ranks, of the last quarter of the steps, after equally many samples. The
tolerance is a share of the decrease of the default's loss since the beginning of the training.
Where that loss has not fallen beyond its noise, the default's trials are repeated with more steps.
A candidate whose training ends earlier than the default's has not shown anything.

With local steps replicas differ within a round, and their average is the model. So only losses are
compared that were measured while replicas were equal, after the first round: those of the first
step of each round. Ranks tell which these are, because a round can end early, as at the end of a
pass over the data.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, starmap

from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.schedule import SEE_EPOCHS
from hvd_autosync.search_space.sync_plan import schedule_of
from hvd_autosync.study.noninferiority import (
    LOOKS,
    MOST_PAIRS,
    Estimate,
    Outcome,
    Pair,
    PairedResult,
    deviation,
    has_fallen,
    judge_pairs,
)
from hvd_autosync.study.quality_trial import (
    FEWEST_STEPS,
    FIRST_SEEDS,
    SEVERAL_LOSSES,
    QualityTrial,
    are_alike,
    ended_early,
    enough_steps,
    failed,
    fall_of,
    last_losses,
    standard_error,
    usable,
)
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.util.amounts import amount

#: Failed trials of the default that are no fault of the script's, among the first seeds and later.
_FORGIVEN, _FORGIVEN_LATER = 1, 3
#: Seeds of the trials, in order; seed 0 would be the script's own random numbers.
SEEDS = tuple(range(1, MOST_PAIRS + _FORGIVEN + _FORGIVEN_LATER + 1))

#: From the candidates that were not tried and the verdicts so far to the next candidate, if any.
Choose = Callable[[Sequence[Strategy], Sequence[Verdict]], Strategy | None]


class QualityCheck:
    """Chooses the next quality trial, and gives the verdicts on the trials so far.

    Args:
        default: The default strategy.
        candidates: Lossy strategies that may be judged.
        trials: The quality trials so far, in order.
        choose: Chooses the next candidate.
        steps: Steps of the first trials.
        tolerance: Allowed loss above the default's, as a share of the decrease of the default's.
        goal: ``"steps"``: losses are compared after equally many steps; ``"time-to-loss"``: after
            equal time, for which candidates train longer.
        spent: Why no further quality trial is allowed; empty if some are.

    Attributes:
        steps: Steps of a trial, so many that the default's loss falls.
    """

    def __init__(
        self,
        default: Strategy,
        candidates: Sequence[Strategy],
        trials: Sequence[QualityTrial],
        choose: Choose,
        *,
        steps: int,
        tolerance: float = 0.01,
        goal: str = "steps",
        spent: str = "",
    ) -> None:
        self._default = default
        self._candidates = candidates
        self.steps = enough_steps(default, trials, steps, spent=bool(spent))
        self._trials = trials = [trial for trial in trials if trial.steps >= self.steps]
        self._by_strategy: dict[Strategy, list[QualityTrial]] = {}
        for trial in trials:
            self._by_strategy.setdefault(trial.strategy, []).append(trial)
        self._choose = choose
        self._tolerance = tolerance
        self._goal = goal
        self._spent = spent

    def next(self) -> tuple[Strategy, int] | None:
        """Return strategy and seed of the next trial; ``None`` if none is needed now."""
        if not self._candidates or self._spent or self._obstacle:
            return None
        begun = {(trial.strategy, trial.seed) for trial in self._trials}
        if not begun and self._choose(self._candidates, ()) is None:
            return None  # no candidate is worth the trials of the default
        first = usable(self._of(self._default))
        if len(first) < FIRST_SEEDS:
            seed = next(seed for seed in SEEDS if (self._default, seed) not in begun)
            return self._default, seed
        if any(trial.running for trial in first):
            return None  # their losses decide whether candidates can be judged
        candidate = self.under_way
        if candidate is None:
            untried = [s for s in self._candidates if not self._of(s)]
            candidate = self._choose(untried, self.verdicts()) if untried else None
        return None if candidate is None else self._next_of_pairs(candidate)

    def _next_of_pairs(self, candidate: Strategy) -> tuple[Strategy, int] | None:
        """Return strategy and seed of the next trial of a candidate's pairs; ``None``: no more."""
        if len(self._left_out) > _FORGIVEN + _FORGIVEN_LATER:
            return None
        return next(iter(self._missing(candidate, MOST_PAIRS)), None)

    def _missing(self, candidate: Strategy, pairs: int) -> list[tuple[Strategy, int]]:
        """Return strategy and seed of the trials that its first pairs still need, in order."""
        begun = {(trial.strategy, trial.seed) for trial in self._trials}
        seeds = [seed for seed in SEEDS if seed not in self._left_out][:pairs]
        both = ((strategy, seed) for seed in seeds for strategy in (self._default, candidate))
        return [trial for trial in both if trial not in begun]

    @property
    def trials_to_look(self) -> int:
        """Trials until the next look that may admit the candidate under way, or a further one."""
        candidate = self.under_way
        if candidate is None:
            return FIRST_SEEDS
        done = len(self._pairs(candidate))
        return len(self._missing(candidate, min(look for look in LOOKS if look > done)))

    @property
    def under_way(self) -> Strategy | None:
        """The candidate that has some trials and needs more, if any."""
        if self._spent or self._obstacle:
            return None
        return next((s for s in self._candidates if self._undecided(s)), None)

    @property
    def closed(self) -> bool:
        """Whether no further candidate can be judged."""
        return bool(self._spent or self._obstacle)

    def verdicts(self) -> list[Verdict]:
        """Return a verdict for each candidate that is decided; for all if none can be judged."""
        return [
            self._verdict(each)
            for each in self._candidates
            if self.closed or (self._of(each) and not self._undecided(each))
        ]

    def _of(self, strategy: Strategy) -> list[QualityTrial]:
        return self._by_strategy.get(strategy, [])

    @cached_property
    def _crashed(self) -> set[int]:
        """Seeds of the default's trials that have failed."""
        return {trial.seed for trial in self._of(self._default) if trial.crashed}

    @cached_property
    def _left_out(self) -> set[int]:
        """Seeds on which the default's own training has failed or diverged: they show nothing."""
        ended = (trial for trial in self._of(self._default) if not trial.running)
        return {trial.seed for trial in ended if failed(trial)}

    def _compared(self, candidate: Strategy) -> list[QualityTrial]:
        return [trial for trial in self._of(candidate) if trial.seed not in self._left_out]

    @cached_property
    def _first(self) -> list[QualityTrial]:
        """The default's first seeds that have finished."""
        return [trial for trial in usable(self._of(self._default)) if not trial.running]

    @cached_property
    def _obstacle(self) -> str:
        """Why no candidate can be judged; empty if candidates can."""
        first = self._first
        if len(first) < FIRST_SEEDS and len(self._crashed) > _FORGIVEN:
            return "the default's own training failed, so no strategy can be judged"
        if any(trial.several_losses for trial in self._of(self._default)):
            return SEVERAL_LOSSES
        if any(len(trial.losses) < FEWEST_STEPS for trial in first):
            return "no loss is seen to judge it by: call hvd_autosync.report(loss) in every step"
        if not all(math.isfinite(sum(trial.losses)) for trial in first):
            return "the default's own losses are NaN or infinite, so no strategy can be judged"
        if len(first) < FIRST_SEEDS:
            return ""
        if any(starmap(are_alike, combinations([trial.averages for trial in first], 2))):
            return "two seeds gave the default the same losses, so its noise cannot be estimated"
        if not has_fallen(self._falls):
            one = first[0]
            ended = not one.whole and one.made < one.steps
            remedy = "let the script train longer" if ended else "increase --autosync-quality-steps"
            return (
                f"the default's own loss has not fallen beyond its noise in {one.made} steps, so "
                f"no strategy can be judged; {remedy}"
            )
        return ""

    @cached_property
    def _falls(self) -> list[Estimate]:
        """Decrease of the default's loss, for each of its first seeds."""
        return [fall_of(trial.averages) for trial in self._first]

    @cached_property
    def _seeds_deviation(self) -> float:
        """Standard deviation of the default's loss over its first seeds."""
        return deviation([statistics.fmean(last_losses(trial.averages)) for trial in self._first])

    def _undecided(self, candidate: Strategy) -> bool:
        """Return whether a candidate has trials but no outcome yet."""
        trials = self._of(candidate)
        if self._spent or not trials or len(self._first) < FIRST_SEEDS:
            return bool(trials) and not self._spent
        compared = self._compared(candidate)
        if any(failed(trial) or trial.unseen for trial in compared) or self._ended_early(candidate):
            return False
        pairs = self._pairs(candidate)
        if pairs and self._find(pairs).outcome is not None:
            return False
        running = any(trial.running for trial in (*trials, *self._of(self._default)))
        return running or self._next_of_pairs(candidate) is not None

    def _find(self, pairs: Sequence[tuple[_Losses, _Losses]]) -> PairedResult:
        return self._with_tolerance(self._estimates(pairs), self._tolerance)

    def _estimates(
        self, pairs: Sequence[tuple[_Losses, _Losses]]
    ) -> list[tuple[Estimate, Estimate]]:
        """Return the difference of each pair, and the decrease of the default's loss in it."""
        return [
            (_difference(default, own, self._goal), fall_of(default.averages))
            for default, own in pairs
        ]

    def _with_tolerance(
        self, estimates: Sequence[tuple[Estimate, Estimate]], tolerance: float
    ) -> PairedResult:
        compared = [
            Pair(difference, Estimate(tolerance * fall.mean, tolerance * fall.error))
            for difference, fall in estimates
        ]
        return judge_pairs(compared, self._seeds_deviation)

    def _admitting_tolerance(self, pairs: Sequence[tuple[_Losses, _Losses]]) -> float | None:
        """Return the least tolerance that would admit, in steps of 0.1 %; ``None`` up to 100 %."""
        estimates = self._estimates(pairs)

        def admits(tolerance: float) -> bool:
            return self._with_tolerance(estimates, tolerance).outcome is Outcome.ADMITTED

        shares = [step / 1000 for step in range(1, 1001)]
        first = bisect_left(shares, True, key=admits)
        return shares[first] if first < len(shares) and admits(shares[first]) else None

    def _finished(self, candidate: Strategy) -> list[tuple[QualityTrial, QualityTrial]]:
        """Return the trials of the default and the candidate of each seed, in their order.

        They end before the first seed whose trials have not finished, so that what was found on
        some pairs stays when further ones are added.
        """
        own = {trial.seed: trial for trial in self._of(candidate)}
        found = []
        for trial in sorted(self._of(self._default), key=lambda trial: trial.seed):
            if trial.seed in self._left_out:
                continue
            other = own.get(trial.seed)
            if other is None or trial.running or other.running:
                break
            found.append((trial, other))
        return found

    def _ended_early(self, candidate: Strategy) -> tuple[QualityTrial, QualityTrial] | None:
        """Return the first trials of a seed in which the candidate's training ended by itself."""
        finished = self._finished(candidate)
        return next((pair for pair in finished if ended_early(pair[1], pair[0])), None)

    def _pairs(self, candidate: Strategy) -> list[tuple[_Losses, _Losses]]:
        """Return the losses of the default and the candidate for each seed that both finished."""
        pairs = []
        for trial, other in self._finished(candidate):
            # A space file can make local steps the default.
            both = replace(
                other,
                local_steps=trial.local_steps or other.local_steps,
                in_round=trial.in_round | other.in_round,
            )
            steps = both.judged(min(len(trial.losses), len(other.losses)))
            base = last = steps
            if self._goal == "time-to-loss":
                base = trial.judged(len(trial.losses))
                last = other.judged(other.count_within(trial))
            if steps and base and last:
                default = _Losses(trial.losses, trial.averages, steps, base)
                pairs.append((default, _Losses(other.losses, other.averages, steps, last)))
        return pairs

    def _verdict(self, candidate: Strategy) -> Verdict:
        nothing = math.nan
        trials = self._of(candidate)
        if self._obstacle or not trials:
            why = self._obstacle or self._spent
            return Verdict(candidate, Outcome.NOT_SHOWN, nothing, nothing, nothing, why)
        allowed = self._tolerance * statistics.fmean(fall.mean for fall in self._falls)
        compared = self._compared(candidate)
        if any(failed(trial) and not trial.crashed for trial in compared):
            reason = "its loss is NaN or infinite, or cannot be seen"
            return Verdict(candidate, Outcome.WORSE, nothing, nothing, allowed, reason)
        if any(trial.crashed for trial in compared):
            reason = "its training failed"
            return Verdict(candidate, Outcome.NOT_SHOWN, nothing, nothing, allowed, reason)
        if early := self._ended_early(candidate):
            default, own = (len(trial.losses) for trial in early)
            reason = f"its training ended by itself after {own} of {default} steps"
            return Verdict(candidate, Outcome.NOT_SHOWN, nothing, nothing, allowed, reason)
        pairs = self._pairs(candidate)
        if not pairs:
            reason = _why_without_average(candidate, trials)
            return Verdict(candidate, Outcome.NOT_SHOWN, nothing, nothing, allowed, reason)
        found = self._find(pairs)
        pairs = pairs[: found.pairs]
        loss = statistics.fmean(_mean(own.losses, own.steps) for _, own in pairs)
        base = statistics.fmean(_mean(default.losses, default.steps) for default, _ in pairs)
        reason = self._reason(found, loss - base, pairs)
        return Verdict(
            candidate,
            found.outcome or Outcome.NOT_SHOWN,
            loss,
            base,
            found.allowed,
            reason,
            found.bound if math.isfinite(found.bound) else nothing,
            found.pairs,
            found.difference,
        )

    def _reason(
        self, found: PairedResult, at_equal_steps: float, pairs: Sequence[tuple[_Losses, _Losses]]
    ) -> str:
        """Return one sentence for people.

        Args:
            found: The result of the test.
            at_equal_steps: Mean difference of the losses after equally many steps.
            pairs: The pairs that were used.
        """
        steps = max(pairs[0][1].steps) + 1
        seeds = f"{amount(steps, 'step')} of {amount(found.pairs, 'seed')}"
        if found.outcome is Outcome.ADMITTED:
            text = f"at most {found.bound:.2g} above"
            if found.bound < 0:
                text = f"at least {-found.bound:.2g} below"
            text = f"its loss is {text} the default's ({seeds})"
        elif found.outcome is Outcome.WORSE:
            text = f"its loss is {found.difference:.2g} above the default's ({seeds})"
        else:
            text = f"could not be shown to be as good in {seeds}"
            if (tolerance := self._admitting_tolerance(pairs)) is not None:
                text += f"; with a tolerance of {tolerance:.1%} it could"
            if self._spent and found.outcome is None:
                text += f"; {self._spent}"
        if self._goal == "time-to-loss":
            text += f"; at equal time, and {at_equal_steps:+.2g} at equal steps"
        return text


@dataclass(frozen=True)
class _Losses:
    """Losses of one training.

    Attributes:
        losses: Losses of all its steps.
        averages: Those at which replicas did not differ.
        steps: The judged steps, after as many samples as in the other training of the pair.
        last: For the goal time-to-loss, the judged steps of those in the time of the default.
    """

    losses: tuple[float, ...]
    averages: Sequence[float]
    steps: Sequence[int]
    last: Sequence[int] = ()


def _why_without_average(candidate: Strategy, trials: Sequence[QualityTrial]) -> str:
    """Return why no loss of an average of replicas was seen."""
    schedule = schedule_of(candidate)
    at_once = schedule is not None and schedule.base > 1 and not schedule.start
    if at_once and not any(trial.in_round for trial in trials):
        return f"it made no local step, because no end of an epoch was seen: {SEE_EPOCHS}"
    if any(trial.one_late for trial in trials):
        return (
            "the losses of rank 0 are one step behind those of others: call "
            "hvd_autosync.report(loss) on every rank"
        )
    return (
        "too few steps to see the loss of an average of its replicas; increase "
        "--autosync-quality-steps"
    )


def _difference(default: _Losses, own: _Losses, goal: str) -> Estimate:
    if goal == "time-to-loss":
        # The steps have different batches, so only the seed is paired.
        mine = [own.losses[step] for step in own.last]
        base = [default.losses[step] for step in default.last]
        difference = statistics.fmean(mine) - statistics.fmean(base)
        return Estimate(difference, math.hypot(standard_error(mine), standard_error(base)))
    apart = [own.losses[step] - default.losses[step] for step in own.steps]
    return Estimate(statistics.fmean(apart), standard_error(apart))


def _mean(losses: Sequence[float], steps: Sequence[int]) -> float:
    return statistics.fmean(losses[step] for step in steps)
