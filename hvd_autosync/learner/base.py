"""The contract of learners: from what was observed to what should be tried next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import Strategy


@dataclass(frozen=True)
class Suggestion:
    """A strategy to try next.

    Attributes:
        strategy: The strategy, complete in its space.
        kind: Who chose it: ``"sobol"``, ``"random"``, ``"model"``, or what a learner of your own
            calls it. Only with a model's suggestion exploring may end.
        info: Why, as plain JSON. A model's suggestion has ``predicted_step_s`` (median),
            ``predicted_low_s`` and ``predicted_high_s`` (90 % interval) and ``acquisition``
            (logarithm of the expected improvement, in the model's standardized unit, times the
            chance of a measurement, per second), ``experts``, the names of those believed, and
            ``expected_gain``, the share of the best's step time that it is expected to save.
            ``dropped``: who is not believed any more, and by how much the leave-one-out score rose.
    """

    strategy: Strategy
    kind: str
    info: dict[str, Any] = field(default_factory=dict)


class Learner(Protocol):
    """Whoever proposes strategies.

    A learner is a pure function: the same arguments give the identical answer, whatever was asked
    before; no global random number generator is touched.

    Attributes:
        name: Name in traces and reports.
    """

    name: str

    def suggest(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        pending: Sequence[Strategy] = (),
        *,
        seed: int,
    ) -> Suggestion | None:
        """The strategy to try next; never one that was tried or is pending.

        Args:
            problem: What may be varied, and what is known of it.
            observations: All that was learned so far, in any number, failures included.
            pending: Strategies that are being tried right now.
            seed: Of the whole study: not below 0 and the same at every call. What changes from
                call to call follows from the observations.

        Returns:
            The suggestion, or ``None`` when nothing is left to try.

        Raises:
            SpaceError: An observed or pending strategy does not lie in the problem's space.
        """
        ...
