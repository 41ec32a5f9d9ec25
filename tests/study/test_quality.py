"""Judging lossy strategies: which trials are made, in which order, and the verdicts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from hvd_autosync.search_space import RankReport, Strategy, TrialResult, TrialStatus
from hvd_autosync.study.noninferiority import MOST_PAIRS, Outcome
from hvd_autosync.study.quality import SEEDS, QualityCheck
from hvd_autosync.study.quality_trial import (
    FEWEST_STEPS,
    FIRST_SEEDS,
    QualityTrial,
    ends_of,
    losses_of,
)
from hvd_autosync.study.verdict import Verdict

DEFAULT, FAST, SAFE = (Strategy({"codec": name}) for name in ("none", "topk", "fp16"))
#: What is trained: strategy and seed -> losses.
Job = Callable[[Strategy, int], tuple[float, ...]]
STEPS = 200


def noisy(end: float, seed: int, *, own: int = 0, steps: int = STEPS) -> tuple[float, ...]:
    """Losses that fall by 1; batches follow from the seed, and ``own`` noise is the strategy's."""
    batches = np.random.default_rng(seed).normal(0, 0.05, 2000)[:steps]
    alone = np.random.default_rng((seed, own)).normal(0, 0.002, steps) if own else 0.0
    level = end + 0.02 * math.sin(seed) + np.exp(-np.arange(steps) / 20)
    return tuple(float(loss) for loss in level + batches + alone)


def job(**ends: float) -> Job:
    """Strategies end at these losses; the default at 1."""

    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        codec = str(strategy["codec"])
        return noisy(ends.get(codec, 1.0), seed, own=0 if codec == "none" else len(codec))

    return train


def in_turn(untried: Sequence[Strategy], verdicts: Sequence[Verdict]) -> Strategy | None:
    """The next one, until one may be used."""
    return None if any(verdict.admissible for verdict in verdicts) else untried[0]


class Judging:
    """Trains what is asked for."""

    def __init__(
        self,
        train: Job,
        candidates: Sequence[Strategy] = (FAST,),
        *,
        in_round: frozenset[int] | None = None,
        grows: bool = False,
        goal: str = "steps",
        tolerance: float = 0.01,
        most: int = 999,
        step_s: Callable[[Strategy], float] | None = None,
    ) -> None:
        self.asked: list[tuple[Strategy, int]] = []
        self.lengths: list[int] = []
        self.trials: list[QualityTrial] = []

        def check(spent: str = "") -> QualityCheck:
            return QualityCheck(
                DEFAULT,
                candidates,
                self.trials,
                in_turn,
                steps=STEPS,
                tolerance=tolerance,
                goal=goal,
                spent=spent,
            )

        while (wanted := check().next()) is not None and len(self.asked) < most:
            self.asked.append(wanted)
            strategy, seed = wanted
            self.lengths.append(check().steps)
            local = strategy != DEFAULT and in_round is not None
            losses = train(strategy, seed)
            each_s = step_s(strategy) if step_s is not None else 0.0
            trial = QualityTrial(
                strategy,
                seed,
                self.lengths[-1],
                losses if not grows else losses[: self.lengths[-1]],
                local_steps=local,
                in_round=(in_round or frozenset()) if local else frozenset(),
                ends_s=tuple(each_s * (i + 1) for i in range(len(losses) if step_s else 0)),
            )
            self.trials.append(trial)
        self.check = check()
        self.verdicts = self.check.verdicts()
        self.verdicts_when_spent = check("the 3 minutes were used").verdicts()

    @property
    def only(self) -> Verdict:
        (verdict,) = self.verdicts
        return verdict


def test_the_default_comes_first_then_pairs_of_one_candidate_after_the_other() -> None:
    judging = Judging(job(topk=2.0), [FAST, SAFE])
    defaults = [(DEFAULT, seed) for seed in SEEDS[:FIRST_SEEDS]]
    # What is clearly worse is so after one pair; the other takes all seeds of the first look.
    assert judging.asked == [*defaults, (FAST, 1), *((SAFE, seed) for seed in SEEDS[:FIRST_SEEDS])]
    assert [(v.strategy, v.outcome) for v in judging.verdicts] == [
        (FAST, Outcome.WORSE),
        (SAFE, Outcome.ADMITTED),
    ]
    assert judging.check.under_way is None


def test_seeds_of_the_default_are_shared_and_added_when_they_are_needed() -> None:
    """If the first seeds do not decide, both sides get more, in turn."""

    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        apart = 0.012 * (-1) ** seed if strategy == FAST else 0.0
        return tuple(loss + apart for loss in noisy(1.0, seed))

    judging = Judging(train)
    later = judging.asked[2 * FIRST_SEEDS :]
    assert later[:4] == [(DEFAULT, 5), (FAST, 5), (DEFAULT, 6), (FAST, 6)]
    assert len(set(judging.asked)) == len(judging.asked)
    assert judging.only.pairs > FIRST_SEEDS


def test_how_many_trials_the_next_look_needs() -> None:
    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        apart = 0.012 * (-1) ** seed if strategy == FAST else 0.0
        return tuple(loss + apart for loss in noisy(1.0, seed))

    def needed(most: int) -> int:
        return Judging(train, most=most).check.trials_to_look

    assert needed(0) == needed(FIRST_SEEDS) == FIRST_SEEDS
    at_first = 2 * FIRST_SEEDS
    # Looks are after 4 and 6 pairs.
    assert [needed(at_first + more) for more in (-1, 0, 1, 3)] == [1, 4, 3, 1]
    assert Judging(job(topk=2.0)).check.trials_to_look == FIRST_SEEDS, "of a further candidate"


@pytest.mark.parametrize("goal", ["steps", "time-to-loss"])
def test_a_tolerance_that_is_named_admits(goal: str) -> None:
    """The noise of the allowed difference, a share of the decrease, grows with the tolerance."""

    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        losses = np.array(noisy(1.0, seed))
        falls = np.exp(-np.arange(STEPS) / 20) * 0.15 * math.sin(3 * seed)
        apart = 0.02 * (2 + (-1) ** seed) * (strategy == FAST)
        return tuple(map(float, losses + falls + apart))

    judging = Judging(train, goal=goal, tolerance=0.03)
    assert judging.only.outcome is Outcome.NOT_SHOWN
    found = re.search(r"with a tolerance of ([\d.]+)% it could", judging.only.reason)
    assert found is not None
    for share, admitted in ((0.0, True), (-0.001, False)):
        again = QualityCheck(
            DEFAULT,
            [FAST],
            judging.trials,
            in_turn,
            steps=STEPS,
            tolerance=float(found[1]) / 100 + share,
            goal=goal,
        )
        assert any(verdict.admissible for verdict in again.verdicts()) is admitted


def test_a_candidate_that_is_better_is_said_to_be_below_the_default() -> None:
    verdict = Judging(job(topk=0.75)).only
    assert verdict.admissible and "its loss is at least 0.2" in verdict.reason
    assert " below the default's" in verdict.reason and "-" not in verdict.reason


@pytest.mark.parametrize("goal", ["steps", "time-to-loss"])
@pytest.mark.parametrize("candidate_is_local", [True, False])
def test_losses_within_a_round_of_the_default_are_not_compared(
    goal: str, candidate_is_local: bool
) -> None:
    """A space file can make local steps the default."""
    in_round = frozenset(step for step in range(STEPS) if step % 2)

    def trial(strategy: Strategy, seed: int) -> QualityTrial:
        losses = noisy(1.0, seed, own=4 * (strategy == FAST))
        local = strategy == DEFAULT or candidate_is_local
        wrong = in_round if local and strategy == DEFAULT else frozenset()
        losses = tuple(loss - 0.5 * (step in wrong) for step, loss in enumerate(losses))
        own = frozenset(step for step in range(STEPS) if step % 4)
        own = own if strategy == FAST else in_round
        return QualityTrial(
            strategy,
            seed,
            STEPS,
            losses,
            local_steps=local,
            in_round=own if local else frozenset(),
            ends_s=tuple(0.1 * (step + 1) for step in range(STEPS)),
        )

    trials = [trial(each, seed) for seed in SEEDS[:FIRST_SEEDS] for each in (DEFAULT, FAST)]
    check = QualityCheck(
        DEFAULT, [FAST], trials, in_turn, steps=STEPS, tolerance=0.5, goal=goal, spent="spent"
    )
    (verdict,) = check.verdicts()
    assert verdict.loss - verdict.default_loss == pytest.approx(0.0, abs=0.01)
    assert verdict.admissible


def test_a_candidate_under_way_is_known_and_has_no_verdict() -> None:
    judging = Judging(job(), most=FIRST_SEEDS + 2)
    assert judging.check.under_way == FAST and judging.verdicts == []
    (spent,) = judging.verdicts_when_spent
    assert spent.outcome is Outcome.NOT_SHOWN
    assert "could not be shown to be as good" in spent.reason and "3 minutes" in spent.reason


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (1.0, Outcome.ADMITTED),
        (0.9, Outcome.ADMITTED),
        (1.004, Outcome.ADMITTED),
        (1.04, Outcome.WORSE),
        (2.0, Outcome.WORSE),
    ],
)
def test_verdicts(end: float, outcome: Outcome) -> None:
    verdict = Judging(job(topk=end)).only
    assert verdict.outcome is outcome and verdict.reason
    # A hundredth of what it has fallen by, from 2 to 1, and not of the loss itself.
    assert verdict.allowed == pytest.approx(0.01 * 0.8, rel=0.25)
    assert verdict.loss - verdict.default_loss == pytest.approx(end - 1.0, abs=0.002)
    assert (verdict.bound < verdict.allowed) == (outcome is Outcome.ADMITTED)


def test_a_candidate_at_the_tolerance_is_not_called_worse() -> None:
    verdict = Judging(job(topk=1.0079)).only
    assert verdict.outcome is Outcome.NOT_SHOWN
    assert "could not be shown to be as good in 200 steps of" in verdict.reason
    assert "with a tolerance of" in verdict.reason


def test_noise_counts_against_the_candidate() -> None:
    """The same mean difference of nothing; what differs from seed to seed is more than allowed."""

    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        luck = np.random.default_rng((seed, 5)).normal(0, 0.2) if strategy == FAST else 0.0
        return tuple(loss + luck for loss in noisy(1.0, seed))

    assert Judging(train).only.outcome is Outcome.NOT_SHOWN
    assert Judging(train, tolerance=1.0).only.outcome is Outcome.ADMITTED


def test_a_larger_tolerance_admits_more() -> None:
    assert Judging(job(topk=1.04), tolerance=0.1).only.admissible


def test_a_default_that_learns_nothing_admits_nothing() -> None:
    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        noise = np.random.default_rng((seed, len(str(strategy["codec"])))).normal(0, 0.05, STEPS)
        return tuple(2.3 + float(each) for each in noise)

    judging = Judging(train, [FAST, SAFE])
    # Trials of twice the steps end as early: the script has no more.
    assert [strategy for strategy, _ in judging.asked] == [DEFAULT] * 2 * FIRST_SEEDS
    assert [v.outcome for v in judging.verdicts] == [Outcome.NOT_SHOWN] * 2
    assert "not fallen beyond its noise" in judging.verdicts[0].reason


def test_seeds_without_effect_show_nothing() -> None:
    judging = Judging(lambda strategy, seed: noisy(1.0, 0))
    assert judging.only.outcome is Outcome.NOT_SHOWN
    assert "the same losses" in judging.only.reason


def test_seeds_that_differ_by_rounding_show_nothing() -> None:
    """As where only the order of sums differs from run to run."""

    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        rounding = np.random.default_rng(seed).normal(0, 1e-6, STEPS)
        return tuple(np.asarray(noisy(1.0, 0, own=strategy == FAST)) + rounding)

    judging = Judging(train)
    assert judging.only.outcome is Outcome.NOT_SHOWN
    assert "the same losses" in judging.only.reason


def test_how_far_above_the_default_a_loss_is() -> None:
    assert Judging(job()).only.violation == pytest.approx(0.0, abs=0.2)
    assert Judging(job(topk=1.08)).only.violation == pytest.approx(0.08 / 0.008, rel=0.25)
    assert Judging(job(topk=1.0079)).only.violation == 1.5
    broken = Judging(lambda s, seed: noisy(1.0, seed) if s == DEFAULT else (math.nan,) * STEPS)
    assert broken.only.violation == math.inf


@pytest.mark.parametrize("losses", [(math.nan,) * STEPS, (), noisy(1.0, 1, steps=10)])
def test_a_training_without_finite_losses_is_worse_at_once(losses: tuple[float, ...]) -> None:
    judging = Judging(lambda s, seed: noisy(1.0, seed) if s == DEFAULT else losses)
    assert judging.only.outcome is Outcome.WORSE and "NaN or infinite" in judging.only.reason
    assert judging.asked[FIRST_SEEDS:] == [(FAST, 1)]


def test_a_launch_that_fails_shows_nothing() -> None:
    trials = [QualityTrial(DEFAULT, seed, STEPS, noisy(1.0, seed)) for seed in SEEDS[:FIRST_SEEDS]]
    trials.append(QualityTrial(FAST, 1, STEPS, crashed=True))
    check = QualityCheck(DEFAULT, [FAST], trials, in_turn, steps=STEPS)
    (verdict,) = check.verdicts()
    assert verdict.outcome is Outcome.NOT_SHOWN and verdict.reason == "its training failed"


@pytest.mark.parametrize("goal", ["steps", "time-to-loss"])
def test_a_training_that_ends_by_itself_shows_nothing(goal: str) -> None:
    """It gets worse after it has ended, as where a script stops early, or at a limit of time."""

    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        losses = noisy(1.0, seed)
        return losses if strategy == DEFAULT or seed != 2 else losses[:150]

    verdict = Judging(train, goal=goal).only
    assert verdict.outcome is Outcome.NOT_SHOWN
    assert verdict.reason == "its training ended by itself after 150 of 200 steps"


@pytest.mark.parametrize(
    ("status", "lost", "admitted"),
    [
        (TrialStatus.COMPLETED, 0, True),
        (TrialStatus.ENDED_EARLY, 0, False),
        (TrialStatus.COMPLETED, 30, False),
    ],
)
def test_a_candidate_with_a_shorter_warm_up_has_not_ended_by_itself(
    status: TrialStatus, lost: int, admitted: bool
) -> None:
    """The default of a study that has rested was slower on the second day."""

    def trial(strategy: Strategy, seed: int) -> QualityTrial:
        steps, own = (205, 4) if strategy == FAST else (210, 0)
        losses = noisy(1.0, seed, own=own, steps=steps)[: steps - lost * (strategy == FAST)]
        rank = RankReport(0, "a", step_s=(0.1,) * steps, losses=losses)
        ended = status if strategy == FAST else TrialStatus.COMPLETED
        return QualityTrial.of(strategy, seed, STEPS, TrialResult(ended, ranks=(rank,)))

    trials = [trial(each, seed) for seed in SEEDS[:FIRST_SEEDS] for each in (DEFAULT, FAST)]
    (verdict,) = QualityCheck(DEFAULT, [FAST], trials, in_turn, steps=STEPS).verdicts()
    assert verdict.admissible is admitted
    assert ("ended by itself" in verdict.reason) is not admitted


def test_a_training_of_the_default_may_end_by_itself() -> None:
    """As a script with fewer steps than a quality trial has: a last loss may be lost."""

    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        return noisy(1.0, seed, own=4 * (strategy == FAST))[: 150 - (strategy == FAST)]

    verdict = Judging(train).only
    assert verdict.admissible and "(149 steps of 4 seeds)" in verdict.reason


def crashes(*seeds: int, apart: float = 0.0) -> Judging:
    """Jobs of the default fail at these seeds."""
    trials: list[QualityTrial] = []
    judging = object.__new__(Judging)
    judging.asked = []

    def check() -> QualityCheck:
        return QualityCheck(DEFAULT, [FAST], trials, in_turn, steps=STEPS)

    while (wanted := check().next()) is not None:
        judging.asked.append(wanted)
        strategy, seed = wanted
        lost = strategy == DEFAULT and seed in seeds
        own = strategy != DEFAULT
        # Undecided up to the last look: half of the seeds are worse.
        end = 1.0 + apart * (1 + (-1) ** seed) * own
        losses = () if lost else noisy(end, seed, own=4 * own)
        trials.append(QualityTrial(strategy, seed, STEPS, losses, crashed=lost))
    judging.verdicts = check().verdicts()
    return judging


def test_one_failed_launch_of_the_default_is_made_up_for_by_another_seed() -> None:
    judging = crashes(2)
    assert judging.asked[: FIRST_SEEDS + 1] == [(DEFAULT, seed) for seed in (1, 2, 3, 4, 5)]
    assert (FAST, 2) not in judging.asked, "it would have no pair"
    assert judging.only.admissible


@pytest.mark.parametrize("seeds", [(2,), (2, 16), tuple(range(5, 21))])
def test_what_needs_all_looks_has_them_also_where_launches_fail(seeds: tuple[int, ...]) -> None:
    """As far as the default's launches do not fail again and again."""
    judging = crashes(*seeds, apart=0.005)
    pairs = sum(strategy == FAST for strategy, _ in judging.asked)
    again_and_again = len(seeds) > 4
    assert pairs == judging.only.pairs == (4 if again_and_again else MOST_PAIRS)
    assert len(judging.asked) == 2 * pairs + (5 if again_and_again else len(seeds))


def test_a_default_that_fails_again_is_at_fault() -> None:
    judging = crashes(2, 3)
    assert judging.asked == [(DEFAULT, 1), (DEFAULT, 2), (DEFAULT, 3)]
    assert "own training failed" in judging.only.reason


def test_later_seeds_of_the_default_may_fail() -> None:
    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        if strategy == DEFAULT and seed == 5:
            return ()
        apart = 0.012 * (-1) ** seed if strategy == FAST else 0.0
        return tuple(loss + apart for loss in noisy(1.0, seed))

    judging = Judging(train)
    assert judging.only.outcome in (Outcome.ADMITTED, Outcome.NOT_SHOWN)
    assert (FAST, 5) not in judging.asked, "it would have no pair"
    assert len(judging.asked) <= 2 * MOST_PAIRS + 1


@pytest.mark.parametrize("own", ["diverges", "learns"])
def test_a_seed_on_which_the_default_itself_diverges_is_made_up_for(own: str) -> None:
    """It says nothing about a candidate, and all looks can be had without it."""

    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        if seed == 6 and (strategy == DEFAULT or own == "diverges"):
            return (math.nan,) * STEPS
        # Undecided up to the last look: half of the seeds are worse.
        end = 1.0 + 0.005 * (1 + (-1) ** seed) * (strategy == FAST)
        return noisy(end, seed, own=4 * (strategy == FAST))

    judging = Judging(train)
    assert (DEFAULT, 6) in judging.asked and (FAST, 6) not in judging.asked
    assert judging.only.pairs == MOST_PAIRS and "NaN" not in judging.only.reason


def test_nothing_lossy_nothing_to_judge() -> None:
    judging = Judging(job(), [])
    assert judging.asked == [] and judging.verdicts == []


def late(strategy: Strategy, seed: int) -> tuple[float, ...]:
    """The loss stays where it is for 300 steps."""
    own = 0 if strategy == DEFAULT else 3
    return noisy(2.0, seed, own=own, steps=300)[200:] * 3 + noisy(1.0, seed, own=own, steps=900)


def test_trials_grow_until_the_loss_of_the_default_falls() -> None:
    judging = Judging(late, grows=True)
    assert judging.lengths[: 2 * FIRST_SEEDS] == [STEPS] * FIRST_SEEDS + [2 * STEPS] * FIRST_SEEDS
    assert judging.asked[: 2 * FIRST_SEEDS] == [(DEFAULT, seed) for seed in SEEDS[:FIRST_SEEDS]] * 2
    assert judging.only.admissible and "400 steps" in judging.only.reason


def test_trials_do_not_grow_beyond_the_script_nor_the_budget() -> None:
    judging = Judging(lambda strategy, seed: late(strategy, seed)[:300], grows=True)
    assert set(judging.lengths) == {STEPS, 2 * STEPS}
    assert "not fallen beyond its noise in 300 steps" in judging.only.reason
    assert "let the script train longer" in judging.only.reason
    begun = Judging(late, grows=True, most=FIRST_SEEDS + 1)
    assert begun.verdicts == []
    (verdict,) = begun.verdicts_when_spent
    assert "not fallen beyond its noise in 200 steps" in verdict.reason


@pytest.mark.parametrize(
    ("status", "longer", "remedy"),
    [
        (TrialStatus.COMPLETED, True, "increase --autosync-quality-steps"),
        (TrialStatus.ENDED_EARLY, False, "let the script train longer"),
    ],
)
def test_a_script_that_reports_some_losses_only_gets_longer_trials(
    status: TrialStatus, longer: bool, remedy: str
) -> None:
    """It has fewer losses than steps, as one that has ended early has."""

    def trial(seed: int) -> QualityTrial:
        steps = 210 if status is TrialStatus.COMPLETED else 190
        losses = late(DEFAULT, seed)[: steps // 2]
        rank = RankReport(0, "a", step_s=(0.1,) * steps, losses=losses)
        return QualityTrial.of(DEFAULT, seed, STEPS, TrialResult(status, ranks=(rank,)))

    trials = [trial(seed) for seed in SEEDS[:FIRST_SEEDS]]
    check = QualityCheck(DEFAULT, [FAST], trials, in_turn, steps=STEPS)
    assert check.next() == ((DEFAULT, 1) if longer else None)
    assert check.steps == STEPS * (1 + longer)
    spent = QualityCheck(DEFAULT, [FAST], trials, in_turn, steps=STEPS, spent="all is used")
    (verdict,) = spent.verdicts()
    steps = trials[0].made
    assert f"noise in {steps} steps" in verdict.reason and verdict.reason.endswith(remedy)


def test_without_further_candidates_no_trial_is_made() -> None:
    assert (
        QualityCheck(DEFAULT, [FAST], [], lambda untried, verdicts: None, steps=STEPS).next()
        is None
    )


def test_more_steps_in_the_same_time_count_where_that_is_the_goal() -> None:
    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        slow = tuple(1.0 + math.exp(-step / 100) for step in range(500))
        apart = np.random.default_rng((seed, 7)).normal(0, 0.001, 500)
        own = tuple(loss + float(each) for loss, each in zip(slow, apart, strict=True))
        return noisy(1.0, seed) if strategy == DEFAULT else own

    assert Judging(train, tolerance=0.05).only.outcome is Outcome.WORSE
    unknown = Judging(train, tolerance=0.05, goal="time-to-loss").only
    assert unknown.outcome is Outcome.WORSE, "without times as many steps are judged"
    in_time = Judging(
        train,
        tolerance=0.05,
        goal="time-to-loss",
        step_s=lambda strategy: 0.1 if strategy == DEFAULT else 0.039,
    ).only
    assert in_time.admissible and "at equal steps" in in_time.reason
    assert "+0.1" in in_time.reason or "+0.2" in in_time.reason
    # What was tested counts, not the losses at equal steps.
    at_equal_steps = in_time.loss - in_time.default_loss
    assert in_time.gap < in_time.allowed < at_equal_steps and in_time.violation < 1.0
    assert Verdict.from_json(in_time.to_json()) == in_time
    older = {name: each for name, each in in_time.to_json().items() if name != "difference"}
    assert Verdict.from_json(older).gap == at_equal_steps


@pytest.mark.parametrize(("step_s", "admitted"), [(0.039, True), (0.06, False), (0.2, False)])
def test_steps_that_ended_after_the_training_of_the_default_are_not_judged(
    step_s: float, admitted: bool
) -> None:
    """How fast a candidate was predicted to be says nothing of the time that it took."""

    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        if strategy == DEFAULT:
            return noisy(1.0, seed)
        apart = np.random.default_rng((seed, 7)).normal(0, 0.001, 500)
        return tuple(1.0 + math.exp(-i / 100) + float(apart[i]) for i in range(500))

    judging = Judging(
        train,
        tolerance=0.05,
        goal="time-to-loss",
        step_s=lambda strategy: 0.1 if strategy == DEFAULT else step_s,
    )
    assert judging.only.admissible == admitted


@pytest.mark.parametrize("setup_s", [0.0, 5.0])
@pytest.mark.parametrize("slow_to_begin", [DEFAULT, FAST])
def test_what_comes_before_the_end_of_the_first_step_is_no_time_of_training(
    setup_s: float, slow_to_begin: Strategy
) -> None:
    def trial(strategy: Strategy, step_s: float) -> QualityTrial:
        before_s = setup_s if strategy == slow_to_begin else 0.0
        ends_s = tuple(before_s + step_s * step for step in range(1, STEPS + 1))
        return QualityTrial(strategy, 1, STEPS, (1.0,) * STEPS, ends_s=ends_s)

    for step_s, share in ((0.1, 1.0), (0.125, 0.8)):
        count = trial(FAST, step_s).count_within(trial(DEFAULT, 0.1))
        assert count == pytest.approx(share * STEPS, abs=1)


def test_the_times_of_steps_are_means_of_the_ranks() -> None:
    ranks = (RankReport(0, "a", step_s=(1.0, 2.0, 9.0)), RankReport(1, "b", step_s=(3.0, 4.0)))
    assert ends_of(TrialResult(TrialStatus.COMPLETED, ranks=ranks)) == (2.0, 5.0)
    assert ends_of(TrialResult(TrialStatus.CRASHED)) == ()


def test_without_losses_no_strategy_is_judged() -> None:
    judging = Judging(lambda strategy, seed: (), [FAST, SAFE])
    assert judging.asked == [(DEFAULT, 1)]
    assert [v.admissible for v in judging.verdicts] == [False, False]
    assert "hvd_autosync.report" in judging.verdicts[0].reason


def test_losses_of_the_default_that_are_no_numbers_judge_no_strategy() -> None:
    def train(strategy: Strategy, seed: int) -> tuple[float, ...]:
        losses = noisy(1.0, seed)
        return (*losses[:-1], math.inf) if (strategy, seed) == (DEFAULT, 2) else losses

    assert "NaN or infinite" in Judging(train).only.reason


def test_nothing_is_decided_while_a_trial_runs() -> None:
    trials = [QualityTrial(DEFAULT, 1, STEPS, running=True)]
    running = QualityCheck(DEFAULT, [FAST], trials, in_turn, steps=STEPS)
    assert running.next() == (DEFAULT, 2)
    assert running.verdicts() == []
    trials = [QualityTrial(DEFAULT, seed, STEPS, noisy(1.0, seed)) for seed in SEEDS[:FIRST_SEEDS]]
    trials += [QualityTrial(FAST, seed, STEPS, running=True) for seed in SEEDS[:FIRST_SEEDS]]
    running = QualityCheck(DEFAULT, [FAST], trials, in_turn, steps=STEPS)
    assert running.next() == (DEFAULT, FIRST_SEEDS + 1) and running.verdicts() == []


def test_pairs_count_in_the_order_of_their_seeds() -> None:
    """Else an outcome would change when a trial ends that was slower than later ones."""
    seeds = SEEDS[: FIRST_SEEDS + 1]
    trials = [QualityTrial(DEFAULT, seed, STEPS, noisy(1.0, seed)) for seed in seeds]
    trials += [QualityTrial(FAST, seed, STEPS, noisy(1.0, seed, own=4)) for seed in seeds]
    slow = trials.pop(len(seeds) + 2)
    trials.append(QualityTrial(FAST, slow.seed, STEPS, running=True))
    check = QualityCheck(DEFAULT, [FAST], trials, in_turn, steps=STEPS)
    assert check.verdicts() == [] and check.under_way == FAST
    whole = QualityCheck(DEFAULT, [FAST], [*trials[:-1], slow], in_turn, steps=STEPS)
    assert whole.verdicts()[0].pairs == FIRST_SEEDS


def test_losses_are_means_of_the_ranks() -> None:
    ranks = (RankReport(0, "a", losses=(1.0, 2.0, 9.0)), RankReport(1, "b", losses=(3.0, 4.0)))
    assert losses_of(TrialResult(TrialStatus.COMPLETED, ranks=ranks)) == (2.0, 3.0)
    assert losses_of(TrialResult(TrialStatus.CRASHED, ranks=ranks)) == ()
    assert losses_of(TrialResult(TrialStatus.COMPLETED)) == ()
    blind = (*ranks, RankReport(2, "b"))
    assert losses_of(TrialResult(TrialStatus.COMPLETED, ranks=blind)) == ()


@pytest.mark.parametrize("steps", [FEWEST_STEPS, STEPS])
def test_several_losses_show_nothing(steps: int) -> None:
    """Whether their mixture falls or not; the other rank reports."""

    def trial(seed: int) -> QualityTrial:
        losses = noisy(1.0, seed, steps=steps) if seed % 2 else (1.0,) * steps
        ranks = [RankReport(rank, "a", losses=losses, several_losses=rank == 1) for rank in (0, 1)]
        result = TrialResult(TrialStatus.COMPLETED, ranks=tuple(ranks))
        assert losses_of(result) == ()
        return QualityTrial.of(DEFAULT, seed, steps, result)

    for count in range(1, FIRST_SEEDS + 1):
        trials = [trial(seed) for seed in SEEDS[:count]]
        check = QualityCheck(DEFAULT, [FAST], trials, in_turn, steps=steps)
        assert check.next() is None
        (verdict,) = check.verdicts()
        assert verdict.outcome is Outcome.NOT_SHOWN
        assert "has several losses: call hvd_autosync.report(loss)" in verdict.reason


def within_rounds(round_steps: int, pass_steps: int = 90) -> frozenset[int]:
    """Steps within rounds, which begin after the first step and again after each pass."""
    return frozenset(
        step
        for step in range(1, STEPS)
        if (step % pass_steps - (step < pass_steps)) % round_steps and step % pass_steps
    )


@pytest.mark.parametrize("round_steps", [2, 8, 16])
def test_under_local_steps_the_average_is_judged_and_not_its_replicas(round_steps: int) -> None:
    """Replicas are ahead on their own batches in all steps but the first of each round."""
    apart = within_rounds(round_steps)

    def train(average: float) -> Job:
        def losses(strategy: Strategy, seed: int) -> tuple[float, ...]:
            if strategy == DEFAULT:
                return noisy(1.0, seed)
            own, mean = noisy(0.9, seed, own=3), noisy(average, seed, own=4)
            return tuple((own if step in apart else mean)[step] for step in range(STEPS))

        return losses

    assert Judging(train(1.0), in_round=apart).only.admissible
    assert Judging(train(1.1), in_round=apart).only.outcome is Outcome.WORSE


@pytest.mark.parametrize("in_round", [frozenset(range(30, STEPS)), frozenset()], ids=len)
def test_without_an_average_of_replicas_nothing_is_shown(in_round: frozenset[int]) -> None:
    """Steps before the first round are those of the default; without a round all are."""
    judging = Judging(job(), in_round=in_round)
    assert judging.only.outcome is Outcome.NOT_SHOWN and "too few steps" in judging.only.reason
    assert len(judging.asked) == FIRST_SEEDS + 1, "more seeds would tell no more"


def test_a_script_whose_epochs_are_not_seen_is_told_so() -> None:
    """Its ranks never begin a round, however many steps a trial has."""
    local = Strategy({"local_steps": 4})
    first = [QualityTrial(DEFAULT, seed, STEPS, noisy(1.0, seed)) for seed in SEEDS[:FIRST_SEEDS]]
    own = QualityTrial(local, SEEDS[0], STEPS, noisy(1.0, SEEDS[0]), local_steps=True)

    def reason(trial: QualityTrial) -> str:
        (verdict,) = QualityCheck(
            DEFAULT, [trial.strategy], [*first, trial], in_turn, steps=STEPS
        ).verdicts()
        assert verdict.outcome is Outcome.NOT_SHOWN
        return verdict.reason

    assert "no local step" in reason(own) and "hvd_autosync.average(optimizer)" in reason(own)
    later = Strategy({"local_steps": 4, "local_start": 1000})
    assert "--autosync-quality-steps" in reason(replace(own, strategy=later))


@pytest.mark.parametrize("round_steps", [2, 4])
def test_a_script_that_reports_on_one_rank_is_told_so(round_steps: int) -> None:
    """After the step, so that rank 0 has a loss before that and those of all but the last."""
    apart = within_rounds(round_steps, pass_steps=STEPS)
    behind = tuple(sorted(step + 1 for step in apart if step + 1 < STEPS))
    local = Strategy({"local_steps": round_steps})

    def trial(strategy: Strategy, seed: int, *in_round: tuple[int, ...]) -> QualityTrial:
        ranks = [
            RankReport(rank, "a", losses=noisy(1.0, seed), in_round=own)
            for rank, own in enumerate(in_round)
        ]
        result = TrialResult(TrialStatus.COMPLETED, ranks=tuple(ranks))
        return QualityTrial.of(strategy, seed, STEPS, result)

    first = [trial(DEFAULT, seed, (), ()) for seed in SEEDS[:FIRST_SEEDS]]
    own = trial(local, 1, behind, tuple(sorted(apart)))
    assert own.one_late and not first[0].one_late
    check = QualityCheck(DEFAULT, [local], [*first, own], in_turn, steps=STEPS)
    assert "hvd_autosync.report(loss) on every rank" in check.verdicts()[0].reason


def test_a_loss_is_an_averages_if_no_rank_was_in_a_round() -> None:
    ranks = tuple(
        RankReport(rank, "a", losses=(1.0,) * 8, in_round=own)
        for rank, own in enumerate([(1, 2, 4), (1, 2, 5)])
    )
    result = TrialResult(TrialStatus.COMPLETED, ranks=ranks, round_steps=3)
    local = Strategy({"local_steps": 3})
    assert QualityTrial.of(local, 1, 8, result).judged(8) == [3, 6, 7]
    # Of a launcher that does not tell where rounds ended nothing is known.
    untold = replace(result, ranks=tuple(replace(rank, in_round=()) for rank in ranks))
    assert QualityTrial.of(local, 1, 8, replace(untold, round_steps=1)).unseen
    assert QualityTrial.of(FAST, 1, 8, None).running


def test_only_a_lost_launch_has_crashed() -> None:
    """A loss that is no number is the training's own."""
    crashed, hung, diverged, cut = (
        QualityTrial.of(DEFAULT, 1, STEPS, TrialResult(status))
        for status in (
            TrialStatus.CRASHED,
            TrialStatus.HUNG,
            TrialStatus.DIVERGED,
            TrialStatus.CUT_SHORT,
        )
    )
    assert crashed.crashed and hung.crashed and not diverged.crashed and not cut.crashed
    check = QualityCheck(DEFAULT, [FAST], [diverged], in_turn, steps=STEPS)
    assert check.next() is None and "NaN or infinite" in check.verdicts()[0].reason
