"""The priors that the learner used: the cost model and related studies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hvd_autosync.reporting.listing import plain_table
from hvd_autosync.traces import TrialRecord


@dataclass(frozen=True)
class PriorUse:
    """A prior in one study.

    Attributes:
        name: Displayed name.
        similarity: Similarity of its task to the study's; ``None`` if it is not a related study.
        used_in: Numbers of the trials that were chosen with it.
        rise: Increase of the leave-one-out score of the trials without it, when it was first
            dropped; ``None`` if it never was.
    """

    name: str
    similarity: float | None
    used_in: tuple[int, ...]
    rise: float | None = None

    @property
    def label(self) -> str:
        """Name and similarity."""
        return self.name if self.similarity is None else f"{self.name} ({self.similarity:.2f})"


def priors_table(trials: Sequence[TrialRecord]) -> Table | None:
    """Return each prior, its task's similarity, and the trials that used it; ``None`` without any.

    Args:
        trials: All trials of a study.
    """
    priors = prior_uses(trials)
    if not priors:
        return None
    last = max(trial.number for trial in _asked(trials))
    table = plain_table("prior", "similarity", "used in trials")
    for each in priors:
        alike = "" if each.similarity is None else f"{each.similarity:.2f}"
        table.add_row(each.name, alike, _use_text(each, last))
    return table


def prior_uses(trials: Sequence[TrialRecord]) -> list[PriorUse]:
    """Return each prior of a study with the trials that used it.

    Args:
        trials: All trials of the study.
    """
    asked = _asked(trials)
    similar = _similarities(trials)
    names = dict.fromkeys([*(name for t in asked for name in _prior_names(t)), *similar])
    return [
        PriorUse(
            f"study {name}" if name in similar else name,
            similar.get(name),
            tuple(trial.number for trial in asked if name in _prior_names(trial)),
            next((found[name] for found in map(_dropped, asked) if name in found), None),
        )
        for name in (names if asked else ())
    ]


def _use_text(prior: PriorUse, last: int) -> str:
    used = prior.used_in
    rise = "" if prior.rise is None else f" (leave-one-out score {prior.rise:+.1f} without it)"
    if not used and not rise:
        return "none: constant over this space, or rejected by cross-validation"
    if not used:
        return f"none: rejected by cross-validation{rise}"
    where = f"{used[0]} to {used[-1]}" if len(used) > 1 else str(used[0])
    return where if used[-1] == last else f"{where}, then rejected by cross-validation{rise}"


def _asked(trials: Sequence[TrialRecord]) -> list[TrialRecord]:
    """Return the trials that the model chose, and Sobol points after a prior was dropped."""
    return [trial for trial in trials if trial.kind == "model" or _dropped(trial)]


def _prior_names(trial: TrialRecord) -> list[str]:
    return [name for name in _entries(trial, "priors") if isinstance(name, str)]


def _dropped(trial: TrialRecord) -> dict[str, float]:
    pairs = [e for e in _entries(trial, "dropped") if isinstance(e, list) and len(e) == 2]
    return {str(name): float(rise) for name, rise in pairs if _is_number(rise)}


def _similarities(trials: Sequence[TrialRecord]) -> dict[str, float]:
    """Id of each related study -> its similarity, from the first trial that records it."""
    for trial in trials:
        pairs = [e for e in _entries(trial, "related") if isinstance(e, list) and len(e) == 2]
        if pairs:
            return {str(name): float(alike) for name, alike in pairs if _is_number(alike)}
    return {}


def _entries(trial: TrialRecord, name: str) -> list[Any]:
    """Return a list of a trial's information; empty if malformed, as in an untrusted trace."""
    value = trial.info.get(name)
    return value if isinstance(value, list) else []


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
