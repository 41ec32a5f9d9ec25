"""Which share the next run tries, and which one is found."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.recurring import SEARCHES, RecurringOutcome, SearchSettings
from hvd_autosync.recurring.bayesian import _missed, times_of
from hvd_autosync.recurring.curve import keeps
from hvd_autosync.recurring.outcomes import Goal, goal_of

# Searches are judged here as the benchmark judges them.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from recurring_recorded import Recorded, play

WANTED = SearchSettings(tolerance=0.01)


def knee(share: float) -> float:
    return 0.92 - 0.06 / (1 + (share / 0.12) ** 3)


def table(
    curve: Callable[[float], float] = knee, noise: float = 0.002, speed: float = 3.0, seed: int = 0
) -> Recorded:
    random = np.random.default_rng(seed)
    return Recorded(
        [
            RecurringOutcome(
                float(f), curve(f) + random.normal(0, noise), 100 * f + 100 * (1 - f) / speed
            )
            for f in (0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1)
            for _ in range(4)
        ]
    )


outcomes = st.lists(
    st.builds(
        RecurringOutcome,
        st.sampled_from([0.0, 0.0625, 0.25, 0.5, 0.8, 1.0]),
        st.floats(-1e3, 1e3) | st.just(math.nan),
        st.floats(0.1, 1e4),
    ),
    max_size=12,
)


@pytest.mark.parametrize("name", SEARCHES)
@given(seen=outcomes)
@settings(max_examples=60)
def test_a_decision_is_a_function_of_the_outcomes(name: str, seen: list[RecurringOutcome]) -> None:
    for wanted in (SearchSettings(), WANTED, SearchSettings(target=0.5)):
        one, other = (SEARCHES[name](wanted).next_share(seen) for _ in range(2))
        assert one == other
        assert 0 <= one.share <= 1 and one.reason


@pytest.mark.parametrize("target", [None, 0.9])
@pytest.mark.parametrize("name", SEARCHES)
def test_bsp_alone_comes_first(name: str, target: float | None) -> None:
    search = SEARCHES[name](SearchSettings(target=target, repeats=2))
    first = search.next_share([])
    assert (first.share, first.final) == (1.0, False)
    assert search.next_share([RecurringOutcome(1.0, 0.9, 10.0)]).share == 1.0
    assert (
        search.next_share(
            [RecurringOutcome(1.0, 0.9, 10.0), RecurringOutcome(1.0, 0.91, 10.0)]
        ).share
        < 1
    )


@pytest.mark.parametrize("name", SEARCHES)
def test_where_bsp_alone_fails_nothing_is_tried(name: str) -> None:
    failed = [RecurringOutcome(1.0, math.nan, 1.0, "failed")] * 2
    decision = SEARCHES[name](SearchSettings()).next_share(failed)
    assert decision.final and decision.share == 1.0


@pytest.mark.parametrize("name", SEARCHES)
def test_a_share_is_found_that_keeps_the_target(name: str) -> None:
    games = [play(table(seed=s), SEARCHES[name](WANTED), WANTED, seed=s) for s in range(5)]
    assert all(game.runs <= 10 for game in games)
    assert all(0.1 <= game.share <= 0.5 for game in games)
    assert sum(game.violates for game in games) <= 2


@pytest.mark.parametrize("name", SEARCHES)
def test_everything_that_diverges_leaves_bsp(name: str) -> None:
    seen: list[RecurringOutcome] = []
    search = SEARCHES[name](WANTED)
    for _ in range(20):
        decision = search.next_share(seen)
        if decision.final:
            break
        metric = 0.9 if decision.share == 1 else math.nan
        seen.append(RecurringOutcome(decision.share, metric, 10.0, "completed"))
    assert decision.final and decision.share == 1.0


def test_the_binary_search_halves_as_in_the_paper() -> None:
    search, seen, asked = SEARCHES["binary"](WANTED), [RecurringOutcome(1.0, 0.92, 100.0)], []
    while not (decision := search.next_share(seen)).final:
        asked.append(decision.share)
        seen.append(RecurringOutcome(decision.share, 0.92 if decision.share > 0.05 else 0.5, 50.0))
    assert asked == [0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert decision.share == 0.0625


def test_repeated_runs_of_a_share_count_by_their_mean() -> None:
    search = SEARCHES["binary"](SearchSettings(target=0.9, tolerance=0.01, repeats=2))
    seen = [RecurringOutcome(1.0, 0.9, 1.0)] * 2 + [RecurringOutcome(0.5, 0.88, 1.0)]
    assert search.next_share(seen).share == 0.5
    assert search.next_share([*seen, RecurringOutcome(0.5, 0.91, 1.0)]).share == 0.25
    assert search.next_share([*seen, RecurringOutcome(0.5, 0.89, 1.0)]).share == 0.75


@pytest.mark.parametrize(("metric", "next_share"), [(0.5, 0.625), (0.9, 0.125)])
def test_the_binary_search_goes_on_from_what_a_run_of_a_grown_job_had(
    metric: float, next_share: float
) -> None:
    """It was planned with half of its work under BSP, and had a quarter."""
    seen = [RecurringOutcome(1.0, 0.9, 10.0), RecurringOutcome(0.25, metric, 8.0, planned=0.5)]
    assert SEARCHES["binary"](WANTED).next_share(seen).share == next_share


def test_the_bayesian_search_counts_a_miss_for_the_share_that_was_done() -> None:
    """A run that was planned with a quarter, and had a tenth, does not rule the quarter out."""
    base = RecurringOutcome(1.0, 0.9, 10.0)
    was = RecurringOutcome(0.1, 0.5, 5.0, planned=0.25)
    assert _missed([base, was], Goal(0.9, 0.01)) == {0.1}


def test_the_bayesian_search_ends_where_less_bsp_is_no_faster() -> None:
    game = play(table(speed=1.0), SEARCHES["bayesian"](WANTED), WANTED)
    assert game.share == 1.0 and game.runs <= 4


def test_runs_of_the_baseline_take_none_from_the_bayesian_search() -> None:
    wanted = replace(WANTED, repeats=12)
    baseline = [RecurringOutcome(1.0, 0.9, 100.0)] * 12
    decision = SEARCHES["bayesian"](wanted).next_share(baseline)
    assert not decision.final and decision.share < 1


def test_a_failed_run_is_no_second_run_that_was_no_faster() -> None:
    """A single run with less BSP is measured once more."""
    slow = [RecurringOutcome(1.0, 0.9, 100.0), RecurringOutcome(1.0, 0.9, 100.0)]
    slow += [RecurringOutcome(0.5, 0.9, 101.0), RecurringOutcome(0.25, math.nan, 1.0, "failed")]
    decision = SEARCHES["bayesian"](WANTED).next_share(slow)
    assert not decision.final and decision.share == 0.5


def test_where_bsp_is_not_needed_little_of_it_is_left() -> None:
    game = play(table(lambda f: 0.92, speed=5.0), SEARCHES["bayesian"](WANTED), WANTED)
    assert game.share <= 0.0625 and game.runs <= 6


@pytest.mark.parametrize("unit", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("level", [-5.0, 0.0, 3.0])
def test_the_metrics_unit_and_level_do_not_matter(unit: float, level: float) -> None:
    def decided(unit: float, level: float) -> list[float]:
        wanted = SearchSettings(tolerance=0.01 * unit)
        curve = table(lambda f: unit * (knee(f) + level), noise=0.002 * unit)
        return [e.share for e in play(curve, SEARCHES["bayesian"](wanted), wanted).outcomes]

    assert decided(unit, level) == decided(1.0, 0.0)


def test_more_bsp_is_never_less_likely_to_keep_the_target() -> None:
    seen = [
        RecurringOutcome(1.0, 0.92, 100.0),
        RecurringOutcome(0.3, 0.919, 50.0),
        RecurringOutcome(0.05, 0.87, 30.0),
    ]
    shares = np.linspace(0, 1, 41)
    likely = keeps(seen, Goal(0.92, 0.01), shares, False)
    assert likely[-1] == pytest.approx(1.0) and likely[0] < 0.05
    assert np.all(np.diff(likely) > -0.02)


def test_a_failed_run_without_asp_speaks_for_no_share() -> None:
    """The target is the mean of the runs that did not fail."""
    failed = RecurringOutcome(1.0, math.nan, 1.0, "failed")
    seen = [RecurringOutcome(1.0, 0.92, 100.0), RecurringOutcome(0.1, 0.90, 30.0)]
    goal, share = Goal(0.92, 0.01), np.array([0.1])
    (before,) = keeps(seen, goal, share, False)
    assert keeps([failed, *seen], goal, share, False) == pytest.approx([before])
    assert before < 0.5


def test_the_time_of_a_run_is_linear_in_the_share() -> None:
    times = times_of(
        [
            RecurringOutcome(1.0, 0.9, 100.0),
            RecurringOutcome(0.5, 0.9, 60.0),
            RecurringOutcome(0.1, math.nan, 1.0, "failed"),
        ]
    )
    assert (times.bsp, times.rest) == (pytest.approx(100), pytest.approx(20))


def tolerance_after(*metrics: float) -> float:
    runs = [RecurringOutcome(1.0, metric, 1.0) for metric in metrics]
    goal = goal_of(runs, SearchSettings(repeats=len(runs)))
    assert isinstance(goal, Goal)
    return goal.tolerance


def test_the_tolerance_covers_the_noise_of_means_of_bsp_alone() -> None:
    assert tolerance_after(0.9) == pytest.approx(0.009)
    assert tolerance_after(0.899, 0.901) == pytest.approx(0.009)
    assert tolerance_after(0.894, 0.906) == pytest.approx(2 * 0.006 * math.sqrt(2))
    more = [0.894, 0.906] * 4
    assert tolerance_after(*more) == pytest.approx(0.009), "their mean is known well"


def test_a_noisier_baseline_does_not_accept_ever_worse_runs() -> None:
    assert tolerance_after(0.85, 0.95) == pytest.approx(0.018)
    assert tolerance_after(0.6, 1.2) == pytest.approx(0.018)
    assert tolerance_after(-2.0, -4.0) == pytest.approx(0.06), "minus a loss"


@pytest.mark.parametrize(
    "wrong", [{"tolerance": -1}, {"target": math.nan}, {"repeats": 0}, {"confidence": 1.0}]
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        SearchSettings(**wrong)  # type: ignore[arg-type]


def test_a_table_is_read_and_drawn_from(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text("share,metric,seconds\n1,0.9,100\n1,0.92,104\n0.5,0.8,60\n0,nan,10\n")
    found = Recorded.read(file)
    assert found.metric(1.0) == pytest.approx(0.91)
    assert found.seconds(0.75) == pytest.approx(81)
    random = np.random.default_rng(0)
    assert {round(found.run(1.0, random).metric, 6) for _ in range(20)} == {0.9, 0.92}
    assert not found.run(0.1, random).finite
    assert found.best(Goal(0.91, 0.06)) == pytest.approx(0.7275, abs=0.003)
    assert not found.keeps(0.0, Goal(0.5, 0.1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "share,metric\n1,2\n",
        "share,metric,seconds\n2,1,1\n1,1,1\n",
        "share,metric,seconds\n1,1,1\n",
        "share,metric,seconds\nx,1,1\n",
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match="recorded outcomes"):
        Recorded.read(file)
