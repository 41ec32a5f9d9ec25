from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from hvd_autosync import learner
from hvd_autosync.learner import KnobEffect, Observation
from hvd_autosync.learner.problem import Problem
from hvd_autosync.reporting.explain_knobs import knob_table
from hvd_autosync.search_space import Strategy

EFFECTS = [
    KnobEffect("buckets", 0, 8, 0.80, 0.75, 0.85),
    KnobEffect("controller", "gloo", "mpi", 0.99, 0.95, 1.03),
    KnobEffect("cycle_time_ms", 1.0, 5.0, 1.25, 1.20, 1.30),
]


def test_factors_on_the_step_time_are_shown_as_speedups(
    author: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    author.explore()
    given: list[Any] = []

    def knob_effects(*arguments: Any) -> list[KnobEffect]:
        given.extend(arguments)
        return EFFECTS

    monkeypatch.setattr(learner, "knob_effects", knob_effects)
    winner = author.space.complete({"buckets": 8})
    console = Console(width=120, markup=False)
    with console.capture() as captured:
        console.print(knob_table(Problem(author.space), author.study.history, winner))
    groups, controller, cycle = (line.split() for line in captured.get().splitlines()[1:4])
    assert groups == ["buckets", "0", "8", "1.25x", "1.18x", "to", "1.33x", "helps"]
    assert controller[-2:] == ["not", "significant"]
    assert cycle == "cycle_time_ms 1 ms 5 ms 0.80x 0.77x to 0.83x hurts".split()

    problem, observations, given_winner = given
    assert (problem.space, given_winner) == (author.space, winner)
    assert len(observations) == 6
    assert observations[0].strategy == author.space.default
    assert observations[0].step_s == pytest.approx(0.05, rel=0.01)
    failed: Observation = observations[3]
    assert failed.step_s is None and isinstance(failed.strategy, Strategy)
