from __future__ import annotations

import math
from dataclasses import replace

import pytest

from hvd_autosync.reporting.words import (
    answer_text,
    evidence_text,
    forecast_text,
    interval_text,
    seconds_text,
    size_text,
    span_text,
    speedup_text,
    step_time_text,
    steps_text,
)
from hvd_autosync.search_space import CATALOGUE, SearchSpace, StepTime, Strategy
from hvd_autosync.study.confirm import Comparison
from hvd_autosync.study.forecast import Forecast
from hvd_autosync.study.values import Conclusion, StudySettings


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0412, "41.2 ms"),
        (1.319, "1.32 s"),
        (0.000812, "812 µs"),
        (0.9999, "1.00 s"),
        (12.34, "12.3 s"),
        (1234.0, "1234 s"),
        (math.nan, "unknown"),
        (0.0, "0 µs"),
    ],
)
def test_step_times_keep_three_digits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("mean_s", "error_s", "text"),
    [
        (0.0412, 0.00025, "41.2 ± 0.4 ms"),
        (0.53, 0.075, "530 ± 123 ms"),
        (2.0, 0.1, "2.00 ± 0.16 s"),
        (0.0412, 0.00001, "41.2 ± 0.02 ms"),
        (0.04, 0.0, "40.0 ± 0 ms"),
        (0.01, 5e-19, "10.0 ± 0 ms"),
    ],
)
def test_a_step_time_has_half_of_its_90_percent_interval(
    mean_s: float, error_s: float, text: str
) -> None:
    assert step_time_text(StepTime(mean_s, error_s, 40)) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(44.6, "45 s"), (240, "4 min"), (3900, "65 min"), (7500, "2 h 05 min")]
)
def test_waiting_times_are_rounded(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (640, "640 B"),
        (12 * 1024, "12 KiB"),
        (97.5 * 1024**2, "97.5 MiB"),
        (2.5 * 1024**4, "2560 GiB"),
    ],
)
def test_sizes_have_binary_units(size: float, text: str) -> None:
    assert size_text(size) == text


def test_unknown_values_are_shown_as_unknown() -> None:
    assert speedup_text(math.nan) == "-"
    assert interval_text(0.0, math.inf) == "unknown after one round"
    assert evidence_text(Comparison(Strategy(), 1.2, 0.0, math.inf, 1)).endswith(", 1 round")


def test_the_answer_names_speedup_interval_rounds_and_winner() -> None:
    space = SearchSpace(CATALOGUE)
    winner = space.complete({"cycle_time_ms": 5.0})
    comparison = Comparison(winner, 1.214, 1.171, 1.249, 4)
    conclusion = Conclusion(winner, "proven", "all", 0.05, (comparison,))
    assert answer_text(conclusion, space) == (
        "1.21x faster than the default (90 % interval 1.17x to 1.25x, 4 rounds): cycle_time_ms=5 ms"
    )


def test_without_a_gain_the_answer_is_the_default_and_why() -> None:
    space = SearchSpace(CATALOGUE)
    comparison = Comparison(space.complete({"cycle_time_ms": 5.0}), 1.01, 0.98, 1.04, 5)
    conclusion = Conclusion(space.default, "nothing was faster", "all", 0.05, (comparison,))
    assert answer_text(conclusion, space) == (
        "no gain found, the default is kept: nothing was faster"
    )
    shared = replace(conclusion, reason="")
    assert answer_text(shared, space) == "no gain found, the default is kept"


def test_a_forecast_says_what_a_trial_takes_and_how_it_can_be_ended() -> None:
    forecast = Forecast(70.0, 60.0, 19, 0.0, 1750.0, 4690.0, 36000.0, trains=True)
    text = forecast_text(forecast)
    assert text.startswith("each trial about 70 s (60 s of it before the end of the first step)")
    assert "at most 19 more trials and 3 to 16 rounds of confirmation: 29 min to 78 min" in text
    assert "in a training of 10 h" in text
    assert text.endswith("Ctrl-C ends tuning and trains with the best confirmed strategy")
    plain = forecast_text(
        replace(forecast, setup_s=5.0, trains=False, high_s=1750.0, judging_s=500.0)
    )
    assert plain.startswith(
        "each trial about 70 s; at most 19 more trials, at most 8 min of quality trials"
    )
    assert "confirmation: 29 min;" in plain and "Ctrl-C" not in plain
    unjudged = forecast_text(replace(forecast, unjudged="no loss is seen"))
    assert unjudged == f"{text}; no lossy strategy is judged: no loss is seen"


def test_one_of_a_thing_is_singular() -> None:
    forecast = Forecast(70.0, 5.0, 1, 0.0, 500.0, 500.0, 36000.0, trains=False)
    assert "at most 1 more trial and 3 to 16 rounds" in forecast_text(forecast)
    settings = StudySettings(warmup=1)
    assert steps_text(settings, live=False) == "1 warm-up step and 40 measured steps"
