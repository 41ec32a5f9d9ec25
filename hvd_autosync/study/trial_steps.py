"""How many steps of a trial are measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.sync_plan import schedule_of
from hvd_autosync.search_space.trial import MIN_MEASURED_STEPS


def whole_rounds(strategy: Strategy, steps: int) -> int:
    """Return ``steps``, rounded up to whole rounds of local steps, enough for a step time."""
    schedule = schedule_of(strategy)
    length = 1 if schedule is None else schedule.base
    return length * max(math.ceil(steps / length), MIN_MEASURED_STEPS + 1 if length > 1 else 0)


def comparable_steps(contenders: Sequence[Strategy], steps: int) -> int | None:
    """Return how many steps to measure of each of the strategies that are compared.

    They see the same steps of the script, whose later ones may take longer or less long.

    Args:
        contenders: The strategies.
        steps: Measured steps of other trials.

    Returns:
        ``None`` if they are as many as of other trials.
    """
    most = max(whole_rounds(each, steps) for each in contenders)
    return most if most > steps else None
