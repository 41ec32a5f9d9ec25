"""The verdict on a lossy strategy: may it be used, by how much is its loss above, and why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.records import LEFT_OUT, OrNan, Record
from hvd_autosync.study.noninferiority import Outcome

#: Least violation of a refused candidate, by outcome.
_REFUSED = {Outcome.WORSE: 2.0, Outcome.NOT_SHOWN: 1.5}


@dataclass(frozen=True)
class Verdict(Record):
    """The verdict on one candidate.

    Attributes:
        strategy: The candidate.
        outcome: Whether it is admitted, worse, or not shown to be as good.
        loss: Its loss after as many samples as the default, mean over the pairs; NaN without pairs.
        default_loss: Loss of the default in the same pairs.
        allowed: Allowed difference of the two, mean over the pairs.
        reason: One sentence for people.
        bound: Upper bound of the difference at the last look; NaN without a look.
        pairs: Number of pairs of trainings.
        difference: Mean difference that was tested, at equal time with the goal time-to-loss; NaN
            without pairs and in older traces.
    """

    strategy: Strategy
    outcome: Outcome
    loss: OrNan
    default_loss: OrNan
    allowed: OrNan
    reason: str
    bound: OrNan = math.nan
    pairs: int = 0
    difference: OrNan = field(default=math.nan, metadata=LEFT_OUT)

    @property
    def admissible(self) -> bool:
        """Whether it may be used."""
        return self.outcome is Outcome.ADMITTED

    @property
    def gap(self) -> float:
        """The difference that was tested; in older traces that of the losses."""
        return self.difference if math.isfinite(self.difference) else self.loss - self.default_loss

    @property
    def violation(self) -> float:
        """The tested difference over the allowed one; infinite without a loss.

        It is at most 1 if the candidate was admitted, and above 1 if it was refused.
        """
        if not math.isfinite(self.loss):
            return math.inf
        violation = self.gap / max(self.allowed, 1e-12)
        return min(violation, 1.0) if self.admissible else max(violation, _REFUSED[self.outcome])
