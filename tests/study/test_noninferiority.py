"""The test whether a candidate's loss is at most a tolerance above the default's."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import t

from hvd_autosync.study.noninferiority import (
    LOOKS,
    MOST_PAIRS,
    Estimate,
    Outcome,
    Pair,
    PairedResult,
    has_fallen,
    judge_pairs,
)

TOLERANCE = 1.0


def pair(difference: float, error: float = 0.01, allowed: float = TOLERANCE) -> Pair:
    return Pair(Estimate(difference, error), Estimate(allowed, 0.0))


def planted(difference: float, spread: float, seed: int, falls: float = 0.0) -> list[Pair]:
    """Pairs whose tolerances, shares of the default's decrease, vary by ``falls`` of the mean."""
    generator = np.random.default_rng(seed)
    differences = generator.normal(difference, spread, MOST_PAIRS)
    allowed = TOLERANCE * (1 + generator.normal(0, falls, MOST_PAIRS))
    return [pair(float(d), 0.01, float(a)) for d, a in zip(differences, allowed, strict=True)]


def found(difference: float, spread: float, seed: int, falls: float = 0.0) -> PairedResult:
    return judge_pairs(planted(difference, spread, seed, falls), 2 * spread)


def outcomes(
    difference: float, spread: float, count: int = 400, falls: float = 0.0
) -> Counter[Outcome | None]:
    return Counter(found(difference, spread, seed, falls).outcome for seed in range(count))


def test_the_error_is_spent_once() -> None:
    assert sum(LOOKS.values()) == pytest.approx(1.0)
    assert list(LOOKS) == sorted(LOOKS)


@pytest.mark.parametrize(("count", "spent"), [(4, 0.05), (6, 0.1), (8, 0.15), (12, 0.2), (16, 0.5)])
def test_the_bound_at_a_look_has_its_share_of_the_error(count: int, spent: float) -> None:
    """Of 5 % false admissions each of six candidates has a sixth, which is spent over the looks."""
    assert list(LOOKS)[-1] == MOST_PAIRS
    differences = [TOLERANCE - 0.25 + 0.3 * (-1) ** i for i in range(count)]
    deviation = 0.3 * math.sqrt(count / (count - 1))
    quantile = float(t.ppf(1 - spent * 0.05 / 6, count - 1))
    pairs = [pair(difference) for difference in differences]
    bound = TOLERANCE - 0.25 + quantile * deviation / math.sqrt(count)
    assert judge_pairs(pairs, 1.0).bound == pytest.approx(bound)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0, 3.0])
def test_noise_does_not_open_the_door(spread: float) -> None:
    """Of candidates that are worse by the tolerance, few are admitted, however noisy they are."""
    generator = np.random.default_rng(round(10 * spread))
    seeds = generator.choice(10**6, 400, replace=False)
    said = Counter(found(TOLERANCE, spread, int(seed)).outcome for seed in seeds)
    # 400 x 5 % / 6 are 3.3 on the average; more than 10 come once in a thousand times.
    assert said[Outcome.ADMITTED] <= 10


@pytest.mark.parametrize("spread", [0.02, 0.25])
@pytest.mark.parametrize("falls", [0.1, 0.22, 0.33])
def test_nor_does_a_tolerance_that_is_known_from_few_trainings(spread: float, falls: float) -> None:
    """One that came out too large by chance would admit all candidates of the study."""
    assert outcomes(TOLERANCE, spread, falls=falls)[Outcome.ADMITTED] <= 10
    assert outcomes(0.0, spread, 100, falls)[Outcome.ADMITTED] >= 95


def test_a_strategy_as_good_is_admitted_given_enough_pairs() -> None:
    assert outcomes(0.0, 0.1)[Outcome.ADMITTED] == 400
    assert outcomes(0.0, 1.0)[Outcome.ADMITTED] >= 0.75 * 400  # 0.83 in the mean
    noisy = outcomes(0.0, 4.0)
    assert noisy[Outcome.ADMITTED] < 0.1 * 400 and noisy[Outcome.WORSE] < 0.05 * 400


def test_what_is_clearly_worse_ends_early_and_is_called_so() -> None:
    for seed in range(50):
        one = found(8.0, 0.3, seed)
        assert (one.outcome, one.pairs) == (Outcome.WORSE, 1)
    assert found(2.0, 0.1, 0).pairs < min(LOOKS)


def test_an_undecided_strategy_is_not_called_worse() -> None:
    said = outcomes(TOLERANCE, 0.5)
    assert said[Outcome.NOT_SHOWN] >= 0.95 * 400
    assert None not in said  # the last look ends it


def test_noise_within_a_pair_counts_where_pairs_agree_by_luck() -> None:
    alike = [pair(0.0, 5.0)] * MOST_PAIRS
    assert judge_pairs(alike, 1.0).outcome is Outcome.NOT_SHOWN
    noisy_falls = [Pair(Estimate(0.0, 0.1), Estimate(TOLERANCE, 5.0))] * MOST_PAIRS
    assert judge_pairs(noisy_falls, 1.0).outcome is Outcome.NOT_SHOWN
    assert judge_pairs([pair(0.0, 0.1)] * MOST_PAIRS, 1.0).outcome is Outcome.ADMITTED


def test_more_pairs_do_not_change_what_was_found() -> None:
    for seed in range(30):
        pairs = planted(0.3, 0.5, seed)
        whole = judge_pairs(pairs, 1.0)
        assert judge_pairs(pairs[: whole.pairs], 1.0) == whole
        for count in range(1, whole.pairs):
            assert judge_pairs(pairs[:count], 1.0).outcome is None


def test_a_fall_within_its_noise_is_none() -> None:
    assert has_fallen([Estimate(fall, 0.01) for fall in (1.0, 1.1, 0.9, 1.0)])
    assert not has_fallen([Estimate(fall, 0.01) for fall in (1.0, -0.5, 0.2, -0.6)])
    assert not has_fallen([Estimate(0.1, 0.5)] * 4)
