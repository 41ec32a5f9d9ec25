"""The estimated effect of each single knob of the winner."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from hvd_autosync.learner.problem import Problem
from hvd_autosync.reporting.listing import plain_table
from hvd_autosync.reporting.words import LEVEL, interval_text, speedup_text
from hvd_autosync.search_space import Strategy
from hvd_autosync.study.related_studies import observations_of
from hvd_autosync.traces import TrialRecord


def knob_table(problem: Problem, trials: Sequence[TrialRecord], winner: Strategy) -> Table:
    """Return the knobs that the winner changes, with their estimated effects, largest gain first.

    Args:
        problem: The learner's problem.
        trials: All trials of the study.
        winner: A strategy other than the default.
    """
    from hvd_autosync.learner import knob_effects

    space = problem.space
    table = plain_table("knob", "default", "winner", "effect", f"{LEVEL} interval", "")
    table.caption = "Effect of each knob on the speed, with the other knobs as in the winner."
    table.caption_justify = "left"
    for effect in knob_effects(problem, observations_of(space, trials), winner):
        knob = space[effect.name]
        # The learner models step times; the table shows speed.
        speedup, low, high = 1 / effect.ratio, 1 / effect.high, 1 / effect.low
        verdict = "not significant" if low <= 1 <= high else "helps" if low > 1 else "hurts"
        table.add_row(
            effect.name,
            knob.format(effect.default),
            knob.format(effect.chosen),
            speedup_text(speedup),
            interval_text(low, high),
            verdict,
        )
    return table
