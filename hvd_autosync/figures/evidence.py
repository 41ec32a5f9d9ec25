"""The data of figures: a study that is running, finished or imported."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hvd_autosync.errors import StudyError
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.problem import Problem
from hvd_autosync.reporting.words import first_line
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.study.knob_order import with_knob_order
from hvd_autosync.study.related_studies import observations_of
from hvd_autosync.study.values import Conclusion
from hvd_autosync.traces import StudyRecord, StudyStatus, TrialRecord, default_result
from hvd_autosync.util.amounts import amount


@dataclass(frozen=True)
class Evidence:
    """A study with its trials and its learner's problem.

    Attributes:
        study: The record of the study.
        trials: Its trials, in order, with all step times as of the last default trial
            (:func:`hvd_autosync.study.resumed.at_one_speed`).
        problem: The learner's problem; ``None`` before the space is known.
    """

    study: StudyRecord
    trials: Sequence[TrialRecord]
    problem: Problem | None

    @property
    def space(self) -> SearchSpace:
        """The search space.

        Raises:
            StudyError: The space is not known yet, or never will be.
        """
        if self.study.space is None:
            raise _without_space(self.study)
        return self.study.space

    @property
    def conclusion(self) -> Conclusion | None:
        """The conclusion of the study; ``None`` if it has not ended."""
        return Conclusion.of(self.study)

    @cached_property
    def observations(self) -> list[Observation]:
        """The trials as observations of a learner."""
        return observations_of(self.space, self.trials)

    @property
    def default_s(self) -> float:
        """Seconds of a step under the default, in the default trial; NaN if unknown."""
        result = default_result(self.trials)
        return result.step_time.mean_s if result and result.step_time else math.nan

    @property
    def best(self) -> Strategy:
        """The winner; before the study has ended, the fastest of the tried exact strategies."""
        if self.conclusion is not None:
            return self.conclusion.winner
        measured = [o for o in self.observations if o.measured and self.space.is_exact(o.strategy)]
        fastest = min(measured, key=lambda o: o.log_step, default=None)
        return self.space.default if fastest is None else fastest.strategy

    def trial(self, number: int) -> TrialRecord:
        """Return the trial with that number.

        Raises:
            StudyError: There is no such trial.
        """
        found = next((trial for trial in self.trials if trial.number == number), None)
        if found is None:
            raise StudyError(
                f"study {self.study.study_id} has no trial {number}",
                hint=f"It has {amount(len(self.trials), 'trial')}, numbered from 0.",
            )
        return found

    def name(self, strategy: Strategy) -> str:
        """``strategy`` as text, for people."""
        space = with_knob_order(self.study, self.trials).space
        assert space is not None, "strategies are complete in a space"
        return space.describe(strategy)


def _without_space(study: StudyRecord) -> StudyError:
    """Return the error that a study has no space."""
    name = f"study {study.study_id}"
    if study.status is StudyStatus.FAILED:
        return StudyError(
            f"{name} has no search space, because it failed: {first_line(study.failure)}",
            hint="Remove the cause, and run the job again.",
        )
    if study.status is StudyStatus.FINISHED:
        return StudyError(
            f"{name} has no search space: it is a log of Horovod's own tuner",
            hint="Read its samples: study.trials, or hvd-autosync show.",
        )
    return StudyError(
        f"{name} has no search space yet",
        hint="Wait until its first trial, of the default strategy, has ended.",
    )


def step_ms(trial: TrialRecord) -> float:
    """Milliseconds of a step in a trial; NaN if it was not measured."""
    time_s = trial.step_time
    return math.nan if time_s is None else 1e3 * time_s.mean_s
