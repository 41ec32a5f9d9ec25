from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hvd_autosync.reporting.plain import PlainProgress


@pytest.fixture
def lines(author: Any) -> list[str]:
    stream = io.StringIO()
    author.play(PlainProgress(stream))
    return stream.getvalue().splitlines()


def test_one_line_per_event(lines: list[str]) -> None:
    assert len(lines) == 1 + 12 + 1
    assert all(line.startswith("hvd-autosync: ") for line in lines)


def test_the_first_line_says_what_will_be_done(author: Any, lines: list[str]) -> None:
    assert f"study {author.study_id}: at most 20 trials, each with 10 warm-up steps" in lines[0]


def test_the_first_line_of_a_live_study_has_its_warm_up_steps(author: Any) -> None:
    stream = io.StringIO()
    study = author.study
    study.settings = replace(study.settings, mode="live")
    PlainProgress(stream).on_study_start(study, resumed=False)
    assert "each with 3 warm-up steps and 40 measured steps" in stream.getvalue()
    assert "its default is" not in stream.getvalue()


def test_the_first_line_after_launched_trials_says_what_its_default_is(author: Any) -> None:
    stream = io.StringIO()
    study = author.study
    study.settings = replace(study.settings, judged_by="other")
    PlainProgress(stream).on_study_start(study, resumed=False)
    assert stream.getvalue().endswith("; its default is the winner of study other\n")


def test_a_trial_is_shown_with_number_kind_step_time_speedup_and_strategy(lines: list[str]) -> None:
    assert re.fullmatch(r"hvd-autosync: trial 0 \(default\): 50\.\d ± 0\.\d ms per step", lines[1])
    assert re.fullmatch(
        r"hvd-autosync: trial 1 \(sobol\): 40\.\d ± 0\.\d ms per step, 1\.2\dx against the "
        r"default: buckets=4",
        lines[2],
    )


def test_a_second_study_has_its_own_figures(new_author: Callable[..., Any]) -> None:
    """As of a training that is tuned again after drift."""
    stream = io.StringIO()
    listener = PlainProgress(stream)
    new_author().play(listener)
    first = stream.getvalue().splitlines()
    new_author().play(listener)
    second = stream.getvalue().splitlines()[len(first) :]
    assert "trial 6 (confirm, round 1): " in second[7]
    assert " ended after 12 trials in " in second[-1]
    assert listener._tuning.explored == 6 and len(listener._tuning._durations_s) == 12


def test_trials_that_did_not_complete_say_how_they_ended(lines: list[str]) -> None:
    assert "trial 2 (sobol): cut short after 40 measured steps, 75.0 ±" in lines[3]
    assert lines[4].startswith(
        "hvd-autosync: trial 3 (model): crashed, rank 1 exited with status 3: "
    )


def test_the_confirmation_is_shown_by_rounds(lines: list[str]) -> None:
    assert "trial 6 (confirm, round 1): 50." in lines[7] and lines[7].endswith(": default")
    assert "trial 11 (confirm, round 3): 3" in lines[12]
    assert "buckets=8" in lines[12]


def test_the_last_line_is_why_it_stopped(lines: list[str]) -> None:
    assert re.search(r"ended after 12 trials in \d+ s: all 20 trials were used$", lines[-1])


def test_a_resumed_study_says_so(author: Any) -> None:
    author.explore()
    stream = io.StringIO()
    PlainProgress(stream).on_study_start(author.study, resumed=True)
    assert f"study {author.study_id} resumes after 6 trials" in stream.getvalue()


def test_a_set_up_that_is_most_of_a_trial_is_reported(author: Any) -> None:
    stream = io.StringIO()
    listener = author.listener = PlainProgress(stream)
    listener.on_study_start(author.study, resumed=False)
    author.trial("default", {})
    author.trial("sobol", {"buckets": 4}, setup_s=24.0, total_s=28.0)
    usual, slow = stream.getvalue().splitlines()[1:]
    assert "first step" not in usual
    assert "24 s of 28 s before the end of step 1: buckets=4" in slow
