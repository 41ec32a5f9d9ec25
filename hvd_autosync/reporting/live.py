"""The lines of live tuning that launched tuning has not."""

from __future__ import annotations

from hvd_autosync.engine.live import Cost
from hvd_autosync.reporting.words import span_text, speedup_text
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord
from hvd_autosync.util.amounts import amount


def cost_line(study: StudyRecord, cost: Cost) -> str:
    """Return what tuning has cost the training, and when that is made up for; empty without a cost.

    Args:
        study: The finished study.
        cost: The cost.
    """
    conclusion = Conclusion.of(study)
    if conclusion is None or not cost.steps:
        return ""
    lost_s = cost.lost_s(conclusion.default_s)
    if lost_s <= 0:
        default = span_text(cost.steps * conclusion.default_s)
        return (
            f"tuning cost the training no time: its {amount(cost.steps, 'step')} took "
            f"{span_text(cost.spent_s)}, under the default they take {default}"
        )
    took = f"{span_text(cost.spent_s)} for {amount(cost.steps, 'step')}"
    line = f"tuning cost {span_text(lost_s)} of the training: {took}"
    saved_s = conclusion.default_s - conclusion.winner_s
    if conclusion.best is None or saved_s <= 0:
        return line
    even = cost.step + round(lost_s / saved_s)
    gain = speedup_text(conclusion.best.speedup)
    return f"{line}; since step {cost.step} it is {gain} as fast, and even at step {even}"
