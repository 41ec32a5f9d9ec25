"""The data of figures: a study that is running, finished or imported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hvd_autosync.errors import StudyError
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.study.knob_order import with_knob_order
from hvd_autosync.study.related_studies import observations_of
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord, TrialRecord, default_result


@dataclass(frozen=True)
class Evidence:
    """A study and all that it knows.

    Attributes:
        study: Its record.
        trials: Its trials, in order.
        problem: What its learner works on; ``None`` before the space is known.
    """

    study: StudyRecord
    trials: Sequence[TrialRecord]
    problem: Problem | None

    @property
    def space(self) -> SearchSpace:
        """The search space.

        Raises:
            StudyError: It is not known yet.
        """
        if self.study.space is None:
            raise StudyError(
                f"study {self.study.study_id} has no search space yet",
                hint="Wait until its first trial, of the default strategy, has ended.",
            )
        return self.study.space

    @property
    def conclusion(self) -> Conclusion | None:
        """How the study ended, if it has."""
        return Conclusion.of(self.study)

    @cached_property
    def observations(self) -> list[Observation]:
        """What a learner sees of the trials."""
        return observations_of(self.space, self.trials)

    @property
    def default_s(self) -> float:
        """Seconds of a step of the job as it is, in its first trial; NaN when unknown."""
        result = default_result(self.trials)
        return result.step_time.mean_s if result and result.step_time else math.nan

    @property
    def best(self) -> Strategy:
        """The winner; before there is one, the fastest of the exact strategies tried."""
        if self.conclusion is not None:
            return self.conclusion.winner
        measured = [o for o in self.observations if o.measured and self.space.is_exact(o.strategy)]
        fastest = min(measured, key=lambda o: o.log_step, default=None)
        return self.space.default if fastest is None else fastest.strategy

    def trial(self, number: int) -> TrialRecord:
        """The trial of that number.

        Raises:
            StudyError: There is none.
        """
        found = next((trial for trial in self.trials if trial.number == number), None)
        if found is None:
            raise StudyError(
                f"study {self.study.study_id} has no trial {number}",
                hint=f"It has {len(self.trials)} trials, numbered from 0.",
            )
        return found

    def name(self, strategy: Strategy) -> str:
        """``strategy`` for people: what it changes."""
        space = with_knob_order(self.study, self.trials).space
        assert space is not None, "a strategy of it is named"
        return space.describe(strategy)


def step_ms(trial: TrialRecord) -> float:
    """Milliseconds of a step in a trial; NaN when it was not measured."""
    time_s = trial.result.step_time if trial.result is not None else None
    return math.nan if time_s is None else 1e3 * time_s.mean_s
