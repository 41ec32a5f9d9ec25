"""The quality check: is a lossy strategy as good for the model as the default?

Quality trials are longer than others and are judged by the losses of their steps. The default and a
candidate are trained in pairs, with the same seed and the same data, seed after seed, until the
test is conclusive (:mod:`hvd_autosync.study.noninferiority`) or the budget is used up. It compares
the losses, means over all ranks, of the last quarter of the steps, after equally many samples. The
tolerance is a share of the decrease of the default's loss since the beginning of the training.
Where that loss has not fallen beyond its noise, the default's trials are repeated with more steps.

With local steps replicas differ within a round, and their average is the model. So only losses are
compared that were measured while replicas were equal, after the first round: those of the first
step of each round. Ranks tell which these are, because a round can end early, as at the end of a
pass over the data.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hvd_autosync.search_space import Strategy, TrialResult
from hvd_autosync.search_space.records import OrNan, Record
from hvd_autosync.study.noninferiority import (
    LENGTHS,
    LOOKS,
    MOST_PAIRS,
    Outcome,
    Pair,
    PairedResult,
    deviation,
    has_fallen,
    judge_pairs,
)

#: Seeds of the trials, in order; seed 0 would be the script's own random numbers.
SEEDS = tuple(range(1, MOST_PAIRS + 1))
#: Number of seeds of the default that run first; they give the decrease and the noise of its loss.
FIRST_SEEDS = min(LOOKS)
#: Share of a trial's steps that is judged, share that is its beginning, and fewest steps to judge.
_LAST, _BEGINNING, _FEWEST = 0.25, 0.05, 20
#: Least number of rounds of local steps whose averages are judged, if there are so many.
_FEWEST_ROUNDS = 4
#: Block length for standard errors: neighbouring steps are correlated, means of blocks are less so.
_BLOCK = 5
#: Least violation of a refused candidate, by outcome.
_REFUSED = {Outcome.WORSE: 2.0, Outcome.NOT_SHOWN: 1.5}
#: With the goal time-to-loss a candidate trains for the time of the default, but at most for so
#: many times its steps.
MOST_STEPS_FACTOR = 3.0


@dataclass(frozen=True)
class QualityTrial:
    """One quality trial.

    Attributes:
        strategy: The default or a candidate.
        seed: Seed of all its random numbers.
        steps: Steps that it was asked for.
        losses: Mean over ranks of the loss of each step; empty if it failed or reports no loss.
        running: Whether it still runs.
        local_steps: Whether the strategy has rounds of local steps.
        in_round: Positions of the losses at which replicas differed within a round.
    """

    strategy: Strategy
    seed: int
    steps: int
    losses: tuple[float, ...] = ()
    running: bool = False
    local_steps: bool = False
    in_round: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls, strategy: Strategy, seed: int, steps: int, result: TrialResult | None
    ) -> QualityTrial:
        """Return the trial with this result; ``None``: it still runs."""
        if result is None:
            return cls(strategy, seed, steps, running=True)
        in_round = frozenset(step for rank in result.ranks for step in rank.in_round)
        losses = losses_of(result)
        local = result.round_steps > 1
        return cls(strategy, seed, steps, losses, local_steps=local, in_round=in_round)

    @property
    def unseen(self) -> bool:
        """Whether it has ended without a loss of an average of its replicas."""
        return not self.running and not self.judged(len(self.losses))

    def judged(self, count: int) -> Sequence[int]:
        """Return the judged ones of the first ``count`` steps.

        These are the last quarter. With local steps they are those of the average in it, or the
        last few if it has fewer; none if no round has ended.
        """
        first = count - _last_quarter(count)
        if not self.local_steps:
            return range(first, count)
        rounds = range(min(self.in_round, default=count), count)
        averages = [step for step in rounds if step not in self.in_round]
        late = [step for step in averages if step >= first]
        return late if len(late) >= _FEWEST_ROUNDS else averages[-_FEWEST_ROUNDS:]


@dataclass(frozen=True)
class Verdict(Record):
    """The verdict on one candidate.

    Attributes:
        strategy: The candidate.
        outcome: Whether it is admitted, worse, or not shown to be as good.
        loss: Its loss after as many samples as the default, mean over the pairs; NaN without pairs.
        default_loss: Loss of the default in the same pairs.
        allowed: Allowed difference of the two.
        reason: One sentence for people.
        bound: Upper bound of the difference at the last look; NaN without a look.
        pairs: Number of pairs of trainings.
    """

    strategy: Strategy
    outcome: Outcome
    loss: OrNan
    default_loss: OrNan
    allowed: OrNan
    reason: str
    bound: OrNan = math.nan
    pairs: int = 0

    @property
    def admissible(self) -> bool:
        """Whether it may be used."""
        return self.outcome is Outcome.ADMITTED

    @property
    def violation(self) -> float:
        """Its loss minus the default's over the allowed difference; infinite without a loss.

        It is at most 1 if the candidate was admitted, and above 1 if it was refused.
        """
        if not math.isfinite(self.loss):
            return math.inf
        violation = (self.loss - self.default_loss) / max(self.allowed, 1e-12)
        return min(violation, 1.0) if self.admissible else max(violation, _REFUSED[self.outcome])


#: From the candidates that were not tried and the verdicts so far to the next candidate, if any.
Choose = Callable[[Sequence[Strategy], Sequence[Verdict]], Strategy | None]


def losses_of(result: TrialResult) -> tuple[float, ...]:
    """Return the mean over ranks of the loss of each step; empty if a rank reports none."""
    rows = [rank.losses for rank in result.ranks]
    if not result.status.measured or not rows:
        return ()
    return tuple(statistics.fmean(step) for step in zip(*rows, strict=False))


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
        self.steps = _enough_steps(default, trials, steps, spent=bool(spent))
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
        for seed in SEEDS[:FIRST_SEEDS]:
            if (self._default, seed) not in begun:
                return self._default, seed
        if any(trial.running for trial in self._of(self._default)[:FIRST_SEEDS]):
            return None  # their losses decide whether candidates can be judged
        candidate = self.under_way
        if candidate is None:
            untried = [s for s in self._candidates if not self._of(s)]
            candidate = self._choose(untried, self.verdicts()) if untried else None
        if candidate is None:
            return None
        pairs = ((strategy, seed) for seed in SEEDS for strategy in (self._default, candidate))
        return next((pair for pair in pairs if pair not in begun), None)

    @property
    def under_way(self) -> Strategy | None:
        """The candidate that has some trials and needs more, if any."""
        if self._spent or self._obstacle:
            return None
        return next((s for s in self._candidates if self._undecided(s)), None)

    def verdicts(self) -> list[Verdict]:
        """Return a verdict for each candidate that is decided; for all if none can be judged."""
        blind = bool(self._obstacle) and len(self._of(self._default)) > 0
        return [
            self._verdict(each)
            for each in self._candidates
            if blind or (self._of(each) and not self._undecided(each))
        ]

    def _of(self, strategy: Strategy) -> list[QualityTrial]:
        return self._by_strategy.get(strategy, [])

    @cached_property
    def _first(self) -> list[tuple[float, ...]]:
        """Losses of the default's first seeds that have finished."""
        trials = self._of(self._default)[:FIRST_SEEDS]
        return [trial.losses for trial in trials if not trial.running]

    @cached_property
    def _obstacle(self) -> str:
        """Why no candidate can be judged; empty if candidates can."""
        first = self._first
        if any(len(losses) < _FEWEST for losses in first):
            return "no loss is seen to judge it by: call hvd_autosync.report(loss) in every step"
        if not all(math.isfinite(sum(losses)) for losses in first):
            return "the default's own losses are NaN or infinite, so no strategy can be judged"
        if len(first) < FIRST_SEEDS:
            return ""
        if len(set(first)) < len(first):
            return "two seeds gave the default the same losses, so its noise cannot be estimated"
        if not has_fallen(self._falls):
            return (
                f"the default's own loss has not fallen beyond its noise in {len(first[0])} steps, "
                "so no strategy can be judged; increase --autosync-quality-steps"
            )
        return ""

    @cached_property
    def _falls(self) -> list[Pair]:
        """Decrease of the default's loss, for each of its first seeds."""
        return [_fall(losses) for losses in self._first]

    @cached_property
    def _allowed(self) -> float:
        """Allowed loss above the default's."""
        return self._tolerance * statistics.fmean(fall.difference for fall in self._falls)

    @cached_property
    def _seeds_deviation(self) -> float:
        """Standard deviation of the default's loss over its first seeds."""
        return deviation([statistics.fmean(_last(losses)) for losses in self._first])

    def _undecided(self, candidate: Strategy) -> bool:
        """Whether a candidate has trials but no outcome yet."""
        trials = self._of(candidate)
        if self._spent or not trials or len(self._first) < FIRST_SEEDS:
            return bool(trials) and not self._spent
        if any(_failed(trial) or trial.unseen for trial in trials):
            return False
        if trials[-1].seed == SEEDS[-1] and not any(trial.running for trial in trials):
            return False
        pairs = self._pairs(candidate)
        return not pairs or self._find(pairs).outcome is None

    def _find(self, pairs: Sequence[tuple[_Losses, _Losses]]) -> PairedResult:
        compared = [_pair(*pair, self._goal) for pair in pairs]
        return judge_pairs(compared, self._allowed, self._seeds_deviation)

    def _pairs(self, candidate: Strategy) -> list[tuple[_Losses, _Losses]]:
        """Return the losses of the default and the candidate for each seed that both finished."""
        own = {trial.seed: trial for trial in self._of(candidate)}
        pairs = []
        for trial in self._of(self._default):
            other = own.get(trial.seed)
            if other is None or trial.running or other.running or _failed(trial):
                continue
            steps = other.judged(min(len(trial.losses), len(other.losses)))
            if steps:
                last = other.judged(len(other.losses))
                pairs.append((_Losses(trial.losses, steps), _Losses(other.losses, steps, last)))
        return pairs

    def _verdict(self, candidate: Strategy) -> Verdict:
        nothing = math.nan
        if self._obstacle:
            return Verdict(candidate, Outcome.NOT_SHOWN, nothing, nothing, nothing, self._obstacle)
        trials = self._of(candidate)
        if any(_failed(trial) for trial in trials):
            reason = "its training failed or its loss is NaN or infinite"
            return Verdict(candidate, Outcome.WORSE, nothing, nothing, self._allowed, reason)
        pairs = self._pairs(candidate)
        if not pairs:
            reason = (
                "too few steps to see the loss of an average of its replicas; increase "
                "--autosync-quality-steps"
            )
            return Verdict(candidate, Outcome.NOT_SHOWN, nothing, nothing, self._allowed, reason)
        found = self._find(pairs)
        pairs = pairs[: found.pairs]
        loss = statistics.fmean(_mean(own.losses, own.steps) for _, own in pairs)
        base = statistics.fmean(_mean(default.losses, default.steps) for default, _ in pairs)
        reason = self._reason(found, loss - base, len(pairs[0][0].losses))
        return Verdict(
            candidate,
            found.outcome or Outcome.NOT_SHOWN,
            loss,
            base,
            self._allowed,
            reason,
            found.bound if math.isfinite(found.bound) else nothing,
            found.pairs,
        )

    def _reason(self, found: PairedResult, at_equal_steps: float, steps: int) -> str:
        """Return one sentence for people.

        Args:
            found: The result of the test.
            at_equal_steps: Mean difference of the losses after equally many steps.
            steps: Steps of a trial.
        """
        seeds = f"{steps} steps of {found.pairs} seed{'s' * (found.pairs > 1)}"
        share = self._tolerance / self._allowed
        if found.outcome is Outcome.ADMITTED:
            text = f"its loss is at most {found.bound:.2g} above the default's ({seeds})"
        elif found.outcome is Outcome.WORSE:
            text = f"its loss is {found.difference:.2g} above the default's ({seeds})"
        else:
            text = f"could not be shown to be as good in {seeds}"
            if math.isfinite(found.bound):
                text += f"; with a tolerance of {share * found.bound:.1%} it could"
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
        steps: The judged steps, after as many samples as in the other training of the pair.
        last: The judged steps at its own end, for the goal time-to-loss.
    """

    losses: tuple[float, ...]
    steps: Sequence[int]
    last: Sequence[int] = ()


def _pair(default: _Losses, own: _Losses, goal: str) -> Pair:
    if goal == "time-to-loss":
        # The steps have different batches, so only the seed is paired.
        mine = [own.losses[step] for step in own.last]
        base = [default.losses[step] for step in default.steps]
        difference = statistics.fmean(mine) - statistics.fmean(base)
        return Pair(difference, math.hypot(_error(mine), _error(base)))
    apart = [own.losses[step] - default.losses[step] for step in own.steps]
    return Pair(statistics.fmean(apart), _error(apart))


def _failed(trial: QualityTrial) -> bool:
    losses = trial.losses
    return not trial.running and (len(losses) < _FEWEST or not math.isfinite(sum(losses)))


def _enough_steps(
    default: Strategy, trials: Sequence[QualityTrial], steps: int, *, spent: bool
) -> int:
    """Return the steps of a trial after which the default's loss has fallen beyond its noise.

    They are more than ``steps`` only if all first seeds have shown that fewer do not suffice, and,
    if the budget is spent, only if all have been tried with more.
    """
    enough = steps
    for length in (factor * steps for factor in LENGTHS):
        own = [t for t in trials if t.strategy == default and t.steps == length][:FIRST_SEEDS]
        complete = len(own) == FIRST_SEEDS and not any(trial.running for trial in own)
        if spent and not complete:
            break
        enough = length
        short = any(_failed(trial) or len(trial.losses) < length for trial in own)
        if not complete or short or has_fallen([_fall(trial.losses) for trial in own]):
            break
    return enough


def _fall(losses: Sequence[float]) -> Pair:
    """Return the decrease of a loss since the beginning."""
    last = _last(losses)
    beginning = losses[: max(int(_BEGINNING * len(losses)), 1)]
    return Pair(statistics.fmean(beginning) - statistics.fmean(last), _error(last))


def _last(losses: Sequence[float]) -> Sequence[float]:
    """Return the losses of the last quarter of the steps."""
    return losses[-_last_quarter(len(losses)) :]


def _last_quarter(count: int) -> int:
    """Return the number of steps in the last quarter of ``count``."""
    return max(int(_LAST * count), 1)


def _mean(losses: Sequence[float], steps: Sequence[int]) -> float:
    return statistics.fmean(losses[step] for step in steps)


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean of ``values``, or of that of their blocks if larger."""
    if len(values) < 2:
        return 0.0
    error = deviation(values) / math.sqrt(len(values))
    starts = range(0, len(values) - _BLOCK + 1, _BLOCK)
    blocks = [statistics.fmean(values[start : start + _BLOCK]) for start in starts]
    if len(blocks) < _FEWEST_ROUNDS:
        return error
    return max(error, deviation(blocks) / math.sqrt(len(blocks)))
