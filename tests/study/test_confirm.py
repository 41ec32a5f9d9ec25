"""The comparison that decides."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hvd_autosync.search_space import StepTime, Strategy
from hvd_autosync.study.confirm import Confirmation, Measurement, compare

S = Strategy({"cycle_time_ms": 0.5})
DEFAULT = Strategy()


def times(*means: float, error: float = 0.0) -> list[StepTime]:
    return [StepTime(mean, error * mean, 40) for mean in means]


def test_a_clear_winner_is_proven() -> None:
    found = compare(S, times(1.00, 1.02, 0.99), times(0.80, 0.81, 0.80))
    assert found.proven and 1.2 < found.low < found.speedup < found.high < 1.3


def test_drift_that_hits_both_does_not_hide_it() -> None:
    drift = np.array([1.0, 1.5, 2.0])
    assert compare(S, times(*drift), times(*(drift * 0.9))).proven


def test_noise_is_not_proven() -> None:
    found = compare(S, times(1.00, 1.10, 0.95), times(0.99, 1.02, 1.01))
    assert not found.proven and found.speedup > 1


def test_a_loser_is_decided() -> None:
    found = compare(S, times(1.0, 1.0, 1.0), times(1.2, 1.21, 1.2))
    assert not found.proven and found.high < 1


def test_equal_rounds_by_luck_do_not_make_a_proof() -> None:
    """Three identical ratios have no spread; the steps' own noise still counts."""
    found = compare(S, times(1, 1, 1, error=0.05), times(0.99, 0.99, 0.99, error=0.05))
    assert not found.proven


def test_one_round_decides_nothing() -> None:
    found = compare(S, times(1.0), times(0.5))
    assert not found.proven and found.speedup > 1 and math.isinf(found.high)


def test_two_rounds_prove_nothing() -> None:
    """The allowed error is spent from the third round on."""
    assert not compare(S, times(1.0, 1.0), times(0.5, 0.5)).proven


def test_the_default_is_rarely_beaten_by_itself() -> None:
    """The lower end is a one-sided 95 % bound: few of equal strategies may seem proven."""
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        a, b = (np.exp(rng.normal(0, 0.03, 3)) for _ in range(2))
        wrong += compare(S, times(*a), times(*b)).proven
    assert wrong / 400 < 0.08


def winners_of_equals(
    rng: np.random.Generator,
    candidates: int,
    spread: float,
    drift: float = 0.0,
    disturbed: float = 0.0,
) -> int:
    """Whether one whole confirmation of strategies that equal the default proves any of them.

    The logarithm of the step time changes by ``drift`` from trial to trial. Of all launches the
    share ``disturbed`` takes 1.6 times as long.
    """
    names = [Strategy({"cycle_time_ms": 1.0 + i}) for i in range(candidates)]
    measured: list[Measurement] = []
    while (strategy := Confirmation(DEFAULT, names, measured).next()) is not None:
        slow = 1.6 if rng.random() < disturbed else 1.0
        (time,) = times(slow * math.exp(rng.normal(0, spread) + drift * len(measured)))
        measured.append(Measurement(strategy, time))
    return any(c.proven for c in Confirmation(DEFAULT, names, measured).comparisons())


@pytest.mark.parametrize("candidates", [1, 2])
def test_looking_again_and_again_does_not_make_false_winners(candidates: int) -> None:
    rng = np.random.default_rng(2)
    wrong = sum(winners_of_equals(rng, candidates, 0.03) for _ in range(400))
    assert wrong / 400 < 0.07  # 5 %, and two standard errors


def confirmed(rng: np.random.Generator, speedup: float, spread: float) -> tuple[bool, int]:
    """Whether a confirmation of one candidate proves it, and its rounds.

    Logarithms of step times have the standard deviation ``spread`` between launches.
    """
    measured: list[Measurement] = []
    while (strategy := Confirmation(DEFAULT, [S], measured).next()) is not None:
        mean = 1.0 if strategy == DEFAULT else 1 / speedup
        (time,) = times(mean * math.exp(rng.normal(0, spread)))
        measured.append(Measurement(strategy, time))
    (comparison,) = Confirmation(DEFAULT, [S], measured).comparisons()
    return comparison.proven, comparison.rounds


def test_rounds_go_on_where_they_may_show_a_gain() -> None:
    rng = np.random.default_rng(3)
    faster, equal = ([confirmed(rng, speedup, 0.1) for _ in range(200)] for speedup in (1.2, 1.0))
    assert np.mean([proven for proven, _ in faster]) > 0.87
    assert np.mean([rounds > 8 for _, rounds in faster]) > 0.2
    assert np.mean([rounds for _, rounds in equal]) < 5
    assert max(rounds for _, rounds in faster) == 16


def test_one_disturbed_launch_does_not_hide_a_gain() -> None:
    """While rounds are few there are more; later it is left out, a default's likewise."""
    rows = [(1.0, own) for own in (0.90, 1.6, 0.92, 0.89, 0.91, 0.93)]
    measured = [
        Measurement(s, t) for row in rows for s, t in zip((DEFAULT, S), times(*row), strict=True)
    ]
    early = Confirmation(DEFAULT, [S], measured[:6])
    assert early.comparisons()[0].speedup < 1 and early.next() is not None
    assert early.next_round() == (2, pytest.approx(1 - 0.92))
    (found,) = Confirmation(DEFAULT, [S], measured).comparisons()
    assert found.proven and found.speedup == pytest.approx(1 / 0.91, rel=0.01)
    assert found.rounds == 6

    slow_default = [Measurement(s, t) for s, t in zip((DEFAULT, S), times(1.7, 0.9), strict=True)]
    others = [*measured[:2], *measured[4:], *slow_default]
    assert Confirmation(DEFAULT, [S], others).default_s() == pytest.approx(1.0)


def test_rounds_that_differ_much_are_all_kept() -> None:
    two = [0.90, 1.6, 0.92, 1.5, 0.91, 0.93]
    found = compare(S, times(*[1.0] * 6), times(*two))
    assert found.speedup == pytest.approx(1 / np.prod(two) ** (1 / 6))


def test_disturbed_launches_do_not_make_false_winners() -> None:
    rng = np.random.default_rng(2)
    wrong = sum(winners_of_equals(rng, 1, 0.03, disturbed=0.05) for _ in range(200))
    assert wrong / 200 < 0.08  # 5 %, and two standard errors


def test_what_another_round_may_save_is_a_share_of_what_would_be_used_without_it() -> None:
    sure, wild = (Strategy({"cycle_time_ms": value}) for value in (2.0, 3.0))
    measured: list[Measurement] = []
    for factor in (1.0, 0.5, 2.0):
        rows = zip((DEFAULT, sure, wild), times(1, 0.5, 0.4 * factor), strict=True)
        measured += [Measurement(s, t) for s, t in rows]
    both = Confirmation(DEFAULT, [sure, wild], measured)
    assert [c.proven for c in both.comparisons()] == [True, False]
    assert both.next_round() == (3, pytest.approx(1 - 0.4 / 0.5))
    alone = [m for m in measured if m.strategy != sure]
    assert Confirmation(DEFAULT, [wild], alone).next_round() == (2, pytest.approx(1 - 0.4))
    for within in (1, 2, 3, 4, 5, 7, 8):
        assert Confirmation(DEFAULT, [sure, wild], measured[:within]).next_round() == (0, 0.0)


def test_a_proven_strategy_is_not_faster_than_itself() -> None:
    """In the median of its rounds: the other one alone might save more."""
    sure, slower = (Strategy({"cycle_time_ms": value}) for value in (2.0, 3.0))
    measured = [
        Measurement(s, t)
        for row in ((1.0, 0.80, 0.95), (1.0, 0.80, 1.02), (1.0, 0.82, 0.97))
        for s, t in zip((DEFAULT, sure, slower), times(*row), strict=True)
    ]
    confirmation = Confirmation(DEFAULT, [sure, slower], measured)
    assert [c.proven for c in confirmation.comparisons()] == [True, False]
    assert confirmation.next() is not None and confirmation.next_round() == (3, 0.0)


def test_a_candidate_that_was_disturbed_is_pruned_no_earlier() -> None:
    """What would prove it follows from the rounds that are left."""
    ratios = (-0.47, -0.023, -0.003, 0.017, 0.037, 0.057)
    measured = [
        Measurement(s, t)
        for ratio in ratios
        for s, t in zip((DEFAULT, S), times(1.0, math.exp(-ratio)), strict=True)
    ]
    assert Confirmation(DEFAULT, [S], measured).next() == DEFAULT


def test_times_that_no_job_has_are_slow_or_too_large_for_a_number() -> None:
    def rounds(default: float) -> Confirmation:
        rows = [(default, 1 / default)] * 3
        return Confirmation(
            DEFAULT,
            [S],
            [Measurement(s, t) for r in rows for s, t in zip((DEFAULT, S), times(*r), strict=True)],
        )

    assert rounds(1e-200).next() is None
    with pytest.raises(OverflowError):  # named_if_damaged() says whose they are
        rounds(1e200).next()


def test_of_several_at_once_none_is_measured_that_was_pruned() -> None:
    """Nor more rounds than there are looks."""
    pruned = Strategy({"cycle_time_ms": 2.0})
    rounds = [
        Measurement(s, t)
        for ratio in (0.99, 0.7) * 3
        for s, t in zip((DEFAULT, S, pruned), times(1, ratio * 0.5, ratio), strict=True)
    ]
    assert Confirmation(DEFAULT, [S, pruned], [*rounds, Measurement(S, None, True)]).next() == (
        DEFAULT
    )
    (time,) = times(0.9)
    whole = [Measurement(each, time) for each in (DEFAULT, S) * 16]
    last = [*whole[:-1], Measurement(S, None, running=True)]
    assert Confirmation(DEFAULT, [S], last).next() is None


def test_rounds_go_on_without_one_that_a_proven_one_is_faster_than() -> None:
    slower, faster, wild = (Strategy({"cycle_time_ms": value}) for value in (2.0, 3.0, 4.0))
    measured: list[Measurement] = []
    drawn = {slower: [0.98, 0.7], faster: [0.5, 0.52], wild: [0.3, 0.7]}
    candidates = [slower, faster, wild]
    while (strategy := Confirmation(DEFAULT, candidates, measured).next()) is not None:
        number = sum(m.strategy == strategy for m in measured)
        (time,) = times(drawn[strategy][number % 2] if strategy in drawn else 1.0)
        measured.append(Measurement(strategy, time))
    counts = {each: sum(m.strategy == each for m in measured) for each in candidates}
    assert counts[slower] == 6 < counts[wild]


@pytest.mark.parametrize("drift", [-0.01, 0.01])
@pytest.mark.parametrize("candidates", [1, 2])
def test_a_steady_drift_alone_makes_no_winner(candidates: int, drift: float) -> None:
    """A round that always began with the default would favour the others while steps shorten."""
    assert not winners_of_equals(np.random.default_rng(2), candidates, 0.0, drift)


def test_a_candidate_that_fails_once_is_out() -> None:
    good, bad = Strategy({"cycle_time_ms": 2.0}), Strategy({"cycle_time_ms": 3.0})
    measured = [
        Measurement(s, t)
        for _ in range(3)
        for s, t in zip((DEFAULT, good, bad), times(1.0, 0.9, 0.5), strict=True)
    ]
    confirmation = Confirmation(DEFAULT, [good, bad], [*measured, Measurement(bad, None)])
    assert [c.strategy for c in confirmation.comparisons()] == [good]


@pytest.mark.parametrize("impossible", [0.0, math.nan, math.inf])
def test_a_time_that_is_no_duration_is_a_failure(impossible: float) -> None:
    good, bad = Strategy({"cycle_time_ms": 2.0}), Strategy({"cycle_time_ms": 3.0})
    measured = [
        Measurement(s, t)
        for _ in range(3)
        for s, t in zip((DEFAULT, good, bad), times(1.0, 0.9, impossible), strict=True)
    ]
    confirmation = Confirmation(DEFAULT, [good, bad], measured)
    assert [c.strategy for c in confirmation.comparisons()] == [good]
    assert confirmation.next() is None


def test_the_default_may_fail_once() -> None:
    """As where a connection breaks: else this would be the end of the whole tuning."""
    other = Strategy({"cycle_time_ms": 2.0})
    measured = [Measurement(DEFAULT, None)]
    assert Confirmation(DEFAULT, [other], measured).next() == DEFAULT
    pairs = [Measurement(s, t) for s, t in zip((DEFAULT, other) * 3, times(2, 1) * 3, strict=True)]
    assert Confirmation(DEFAULT, [other], [*measured, *pairs]).next() is None
    (comparison,) = Confirmation(DEFAULT, [other], [*measured, *pairs]).comparisons()
    assert comparison.rounds == 3 and comparison.speedup == pytest.approx(2, rel=0.1)
    assert Confirmation(DEFAULT, [other], [*measured, Measurement(DEFAULT, None)]).next() is None


def test_the_fastest_of_those_that_are_proven_wins() -> None:
    """However alike the rounds of a slower one were; one that is not proven comes after them."""
    even, faster, wild = (Strategy({"cycle_time_ms": value}) for value in (2.0, 3.0, 4.0))
    rounds = [(1.0, 0.5, 0.47, 0.1), (1.0, 0.5, 0.42, 0.9), (1.0, 0.5, 0.43, 0.3)]
    measured = [
        Measurement(s, t)
        for row in rounds
        for s, t in zip((DEFAULT, even, faster, wild), times(*row), strict=True)
    ]
    found = Confirmation(DEFAULT, [even, faster, wild], measured).comparisons()
    assert [c.strategy for c in found] == [faster, even, wild]
    assert [c.proven for c in found] == [True, True, False]
    assert found[0].low < found[1].low and found[2].speedup > found[0].speedup


def test_nothing_is_decided_while_measurements_run() -> None:
    """As where several trials are open at once: the next one is asked for, up to a new round."""
    default, other = Strategy({"cycle_time_ms": 1.0}), Strategy({"cycle_time_ms": 2.0})
    slower = [Measurement(s, t) for s, t in zip((default, other) * 3, times(1, 2) * 3, strict=True)]
    assert Confirmation(default, [other], slower).next() is None
    running = [*slower[:-1], Measurement(other, None, running=True)]
    assert Confirmation(default, [other], running).next() == other  # the fourth round is backward
    without_times = [replace(m, time=None, running=True) for m in slower]
    assert Confirmation(default, [other], without_times).next() == other
    more = [*slower, *(Measurement(default, t) for t in times(*[1] * 9))]
    assert Confirmation(default, [other], more).comparisons()[0].rounds == 3


@pytest.mark.parametrize(
    ("rounds", "goes_on"),
    [
        ([0.8], True),
        ([1.05], True),  # launches differ by that
        ([2.5], False),
        ([1.02, 1.01], False),
        ([1.02, 0.99], True),
    ],
)
def test_a_candidate_that_is_never_faster_is_not_measured_for_long(
    rounds: list[float], goes_on: bool
) -> None:
    slow, other = Strategy({"cycle_time_ms": 2.0}), Strategy({"cycle_time_ms": 3.0})
    measured = [
        Measurement(s, t)
        for own in rounds
        for s, t in zip((DEFAULT, slow), times(1, own), strict=True)
    ]
    backward = len(rounds) % 2 == 1  # the order of the next round
    first = slow if backward else DEFAULT
    assert Confirmation(DEFAULT, [slow], measured).next() == (first if goes_on else None)
    assert [c.strategy for c in Confirmation(DEFAULT, [slow], measured).comparisons()] == [slow]
    both = [
        Measurement(s, t)
        for own in rounds
        for s, t in zip((DEFAULT, slow, other), times(1, own, 0.8), strict=True)
    ]
    (time,) = times(1)
    begun = [*both, Measurement(other if backward else DEFAULT, time)]
    last = DEFAULT if backward else other
    assert Confirmation(DEFAULT, [slow, other], begun).next() == (slow if goes_on else last)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="no round"):
        compare(S, [], [])
