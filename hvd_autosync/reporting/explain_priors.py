"""Whom the learner believed: the cost model, and related studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hvd_autosync.reporting.listing import plain_table
from hvd_autosync.traces import TrialRecord


@dataclass(frozen=True)
class PriorUse:
    """An expert in one study.

    Attributes:
        name: For people.
        similarity: Of its task to the study's, where it is a related study.
        heard: Numbers of the trials that it had a say in.
        rise: By how much the leave-one-out score of the trials rose without it, when it was dropped
            first; ``None``: it was not.
    """

    name: str
    similarity: float | None
    heard: tuple[int, ...]
    rise: float | None = None

    @property
    def label(self) -> str:
        """Name and similarity."""
        return self.name if self.similarity is None else f"{self.name} ({self.similarity:.2f})"


def priors_table(trials: Sequence[TrialRecord]) -> Table | None:
    """Each expert, how similar its task is, and in which trials it was heard; ``None``: nobody.

    Args:
        trials: All trials of a study.
    """
    experts = prior_uses(trials)
    if not experts:
        return None
    last = max(trial.number for trial in _asked(trials))
    table = plain_table("expert", "similarity", "heard")
    for each in experts:
        alike = "" if each.similarity is None else f"{each.similarity:.2f}"
        table.add_row(each.name, alike, _heard_text(each, last))
    return table


def prior_uses(trials: Sequence[TrialRecord]) -> list[PriorUse]:
    """Each expert of a study with the trials in which it was heard.

    Args:
        trials: All trials of the study.
    """
    asked = _asked(trials)
    similar = _similarities(trials)
    names = dict.fromkeys([*(name for t in asked for name in _experts(t)), *similar])
    return [
        PriorUse(
            f"study {name}" if name in similar else name,
            similar.get(name),
            tuple(trial.number for trial in asked if name in _experts(trial)),
            next((found[name] for found in map(_dropped, asked) if name in found), None),
        )
        for name in (names if asked else ())
    ]


def _heard_text(expert: PriorUse, last: int) -> str:
    heard = expert.heard
    rise = "" if expert.rise is None else f" (leave-one-out score {expert.rise:+.1f} without it)"
    if not heard and not rise:
        return "in no trial: it says nothing here, or the first trials spoke against it"
    if not heard:
        return f"in no trial: the first ones spoke against it{rise}"
    where = f"in trials {heard[0]} to {heard[-1]}" if len(heard) > 1 else f"in trial {heard[0]}"
    return where if heard[-1] == last else f"{where}, then dropped: it misled{rise}"


def _asked(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The trials that a model has chosen, or left to chance because it was misled."""
    return [trial for trial in trials if trial.kind == "model" or _dropped(trial)]


def _experts(trial: TrialRecord) -> list[str]:
    return [name for name in _entries(trial, "experts") if isinstance(name, str)]


def _dropped(trial: TrialRecord) -> dict[str, float]:
    pairs = [e for e in _entries(trial, "dropped") if isinstance(e, list) and len(e) == 2]
    return {str(name): float(rise) for name, rise in pairs if _is_number(rise)}


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
