"""The interface of learners: from observations to the strategy to try next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import Strategy


@dataclass(frozen=True)
class Suggestion:
    """A strategy to try next.

    Attributes:
        strategy: The strategy, complete in its space.
        kind: How it was chosen: ``"sobol"``, ``"random"``, ``"model"``, or the name that a learner
            of your own gives. Exploring can end only with a suggestion of kind ``"model"``.
        info: Explanation as plain JSON. A model's suggestion has ``predicted_step_s`` (median),
            ``predicted_low_s`` and ``predicted_high_s`` (90 % interval); ``acquisition``, the
            logarithm of: expected improvement, in natural logarithms of the step time, times the
            probability of a usable measurement, per second of the trial; ``priors``, the names of
            the prior functions that the model uses; and ``expected_gain``, the share of the best
            strategy's step time that it is expected to save. ``dropped``: prior functions that
            source selection dropped, each with the rise of the leave-one-out score.
    """

    strategy: Strategy
    kind: str
    info: dict[str, Any] = field(default_factory=dict)


class Learner(Protocol):
    """Proposes strategies.

    A learner is a pure function: the same arguments give the same answer, independent of earlier
    calls. It does not use global random number generators.

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
        """Return the strategy to try next; never one that was tried or is pending.

        Args:
            problem: The space, and what is known before the first trial.
            observations: The outcomes of all trials so far, failures included.
            pending: Strategies of running trials.
            seed: Seed of the whole study: at least 0 and the same at every call. Suggestions
                differ between calls because the observations do.

        Returns:
            The suggestion, or ``None`` if the space is exhausted.

        Raises:
            SpaceError: An observed or pending strategy does not lie in the problem's space.
        """
        ...


def check_learner(learner: object) -> None:
    """Check that a learner is ``None`` or can suggest strategies.

    Raises:
        ConfigurationError: It cannot.
    """
    if learner is not None and not callable(getattr(learner, "suggest", None)):
        raise ConfigurationError(
            f"invalid value {learner!r:.200} for learner", hint="Give an object with suggest()."
        )
