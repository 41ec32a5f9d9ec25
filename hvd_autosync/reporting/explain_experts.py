"""Whom the learner believed: the cost model, and related studies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from hvd_autosync.reporting.listing import plain_table
from hvd_autosync.traces import TrialRecord


def experts_table(trials: Sequence[TrialRecord]) -> Table | None:
    """Each expert, how similar its task is, and in which trials it was heard; ``None``: nobody.

    Args:
        trials: All trials of a study.
    """
    asked = [trial for trial in trials if trial.kind == "model"]
    similar = _similarities(trials)
    names = list(dict.fromkeys([*(name for t in asked for name in _experts(t)), *similar]))
    if not names or not asked:
        return None
    table = plain_table("expert", "similarity", "heard")
    for name in names:
        heard = [trial.number for trial in asked if name in _experts(trial)]
        kind = f"study {name}" if name in similar else name
        alike = f"{similar[name]:.2f}" if name in similar else ""
        table.add_row(kind, alike, _heard_text(heard, asked[-1].number))
    return table


def _heard_text(heard: Sequence[int], last: int) -> str:
    if not heard:
        return "in no trial: it says nothing here, or the first trials spoke against it"
    where = f"in trials {heard[0]} to {heard[-1]}" if len(heard) > 1 else f"in trial {heard[0]}"
    return where if heard[-1] == last else f"{where}, then dropped: it misled"


def _experts(trial: TrialRecord) -> list[str]:
    return [name for name in _entries(trial, "experts") if isinstance(name, str)]


def _similarities(trials: Sequence[TrialRecord]) -> dict[str, float]:
    """Id of each related study -> its similarity, as the first trial that knows says."""
    for trial in trials:
        pairs = [e for e in _entries(trial, "related") if isinstance(e, list) and len(e) == 2]
        if pairs:
            return {str(name): float(alike) for name, alike in pairs if _is_number(alike)}
    return {}


def _entries(trial: TrialRecord, name: str) -> list[Any]:
    """A list of a trial's information, which a stranger may have written."""
    value = trial.info.get(name)
    return value if isinstance(value, list) else []


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
