from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from hvd_autosync.reporting.explain_priors import priors_table
from hvd_autosync.search_space import Strategy
from hvd_autosync.traces import TrialRecord


def trial(number: int, kind: str, **info: Any) -> TrialRecord:
    return TrialRecord("study", number, kind, Strategy(), "now", None, info, None)


def shown(trials: list[TrialRecord]) -> list[str]:
    table = priors_table(trials)
    assert table is not None
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table)
    return [" ".join(line.split()) for line in captured.get().splitlines()]


def test_priors_and_the_trials_that_used_them() -> None:
    related = [["helped", 0.83], ["unrelated", 0.4], ["constant", 0.2]]
    lines = shown(
        [
            trial(0, "default"),
            trial(1, "model", related=related, priors=["cost model", "helped", "unrelated"]),
            trial(2, "model", related=related, priors=["cost model", "helped", "unrelated"]),
            trial(
                3,
                "model",
                related=related,
                priors=["cost model", "helped"],
                dropped=[["unrelated", 1.234]],
            ),
            trial(4, "confirm"),
        ]
    )
    assert lines[1:] == [
        "cost model 1 to 3",
        "study helped 0.83 1 to 3",
        "study unrelated 0.40 1 to 2, then rejected by cross-validation "
        "(leave-one-out score +1.2 without it)",
        "study constant 0.20 none: constant over this space, or rejected by cross-validation",
    ]


@pytest.mark.parametrize(
    "info", [{}, {"priors": 3, "related": "no"}, {"priors": [], "related": []}]
)
def test_without_priors_there_is_no_table(info: dict[str, Any]) -> None:
    assert priors_table([trial(0, "default"), trial(1, "model", **info)]) is None
    assert priors_table([]) is None


def test_malformed_info_is_tolerated() -> None:
    lines = shown(
        [
            trial(
                1,
                "model",
                priors=["x", 7],
                dropped=[["x", "no"], 3],
                related=[["x", "much"], ["y", 0.5], [1]],
            )
        ]
    )
    assert lines[1:] == [
        "x 1",
        "study y 0.50 none: constant over this space, or rejected by cross-validation",
    ]
