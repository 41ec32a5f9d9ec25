"""The budget of a study: its minutes, and the time that tuning can save in the training.

It depends only on the settings and the seconds of the trials so far, so a resumed study gets the
same budget.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from hvd_autosync.search_space import TrialResult
from hvd_autosync.study.confirm import MIN_ROUNDS
from hvd_autosync.study.quality_trial import (
    FIRST_SEEDS,
    SEVERAL_LOSSES,
    ends_of,
    has_several_losses,
)
from hvd_autosync.study.stage_budget import explored
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import TrialRecord, default_result
from hvd_autosync.util.amounts import amount

#: Exploring does not stop for a small expected gain before so many trials, the default's included.
FEWEST_TRIALS = 4
#: The default and one candidate.
_CONTENDERS = 2


class Budget:
    """The time that is left, and the time that trials take.

    Args:
        settings: The settings of the study.
        trials: The finished trials, and those that still run.
    """

    def __init__(self, settings: StudySettings, trials: Sequence[TrialRecord]) -> None:
        self._settings = settings
        self._trials = trials

    @property
    def left_s(self) -> float:
        """Seconds that are left of the study's minutes; infinite without a limit."""
        minutes = self._settings.minutes
        return math.inf if minutes is None else 60 * minutes - _spent_s(self._trials)

    @property
    def _judging_left_s(self) -> float:
        """Seconds that are left of the minutes of quality trials."""
        judging = [trial for trial in self._trials if trial.kind == "quality"]
        return 60 * self._settings.quality_minutes - _spent_s(judging)

    def left_for(self, kind: str) -> float:
        """Return the seconds that are left for a trial of this kind; infinite without a limit."""
        return min(self.left_s, self._judging_left_s) if kind == "quality" else self.left_s

    @property
    def _minutes(self) -> str:
        return amount(self._settings.minutes or 0, "minute")

    @property
    def trial_s(self) -> float:
        """Mean seconds of an exploring trial and the search for it; 0 if unknown."""
        others = [trial for trial in self._ended() if trial.kind != "default"]
        return self._run_s + (_asked_s(others) / len(others) if others else 0.0)

    @property
    def _run_s(self) -> float:
        """Mean seconds of an exploring trial alone, as of one that confirms; 0 if unknown."""
        ended = self._ended()
        others = [trial for trial in ended if trial.kind != "default"]
        if others:
            return _ran_s(others) / len(others)
        default = ended[-1].result if ended else None
        return 0.0 if default is None else trial_s_after(default, self._settings)

    def _ended(self) -> list[TrialRecord]:
        """Return the exploring trials that have ended, the default's included."""
        return [t for t in explored(self._trials) if t.result and math.isfinite(t.result.total_s)]

    @property
    def cost_s(self) -> float:
        """Mean seconds that an exploring trial costs, at least 0; 0 if unknown."""
        return self.trial_s if self._launches else self._lost_in_steps_s

    def _confirming_cost_s(self, steps: int | None) -> float:
        """Return the mean seconds that a confirming trial costs, at least 0; 0 if unknown."""
        if self._launches:
            return self._run_s + self._further_s(steps)
        return self._lost_in_steps_s

    @property
    def _launches(self) -> bool:
        """Whether trials are no steps of the training, as far as is known."""
        default = default_result(self._trials)
        return self._settings.mode != "live" or default is None or default.step_time is None

    @property
    def _lost_in_steps_s(self) -> float:
        """Mean seconds that a live trial costs, at least 0.

        A live trial consists of steps of the training, which goes on during the search, too. So it
        costs only what its steps take longer than under the default.
        """
        default = default_result(self._trials)
        assert default is not None and default.step_time is not None, "it was measured"
        step_s = default.step_time.mean_s
        exploring = {trial.number for trial in explored(self._trials)}
        lost_s = []
        for trial in self._trials:
            result = trial.result
            if trial.kind == "default" and result is not None and result.step_time is not None:
                step_s = result.step_time.mean_s  # each day has its own speed
            if result is not None and trial.number in exploring:
                lost_s.append(_lost_s(result, step_s))
        return max(statistics.fmean(lost_s), 0.0)

    @property
    def training_s(self) -> float:
        """Expected seconds of the training."""
        return 3600 * self._settings.expected_hours

    def confirming_s(self, contenders: int = _CONTENDERS, steps: int | None = None) -> float:
        """Return the seconds of the shortest confirmation.

        Args:
            contenders: Number of candidates plus one for the default.
            steps: Measured steps of each trial; ``None``: those of other trials.
        """
        return MIN_ROUNDS * contenders * (self._run_s + self._further_s(steps))

    def _further_s(self, steps: int | None) -> float:
        """Return the seconds of a confirming trial's steps that an exploring one has not."""
        default = default_result(self._trials)
        if steps is None or default is None or default.step_time is None:
            return 0.0
        _, usual = self._settings.steps_after(default)
        return max(steps - usual, 0) * default.step_time.mean_s

    def judging_s(self, steps: int, trials: int = 1) -> float:
        """Return the seconds until the next verdict on a lossy strategy.

        Args:
            steps: Steps of each quality trial; a candidate is assumed as slow as the default.
            trials: Least number of quality trials until then.
        """
        default = default_result(self._trials)
        if default is None or math.isnan(default.total_s):
            return 0.0
        each_s = quality_trial_s(default, self._settings, steps)
        return each_s * max(2 * FIRST_SEEDS - len(self._judging(steps)), trials)

    def least_saving(self, steps: int, trials: int = 1) -> float:
        """Return the share of a step for which a lossy strategy is worth judging and confirming.

        Args:
            steps: As of :meth:`judging_s`.
            trials: As of :meth:`judging_s`.
        """
        confirming_s = MIN_ROUNDS * _CONTENDERS * self._confirming_cost_s(None)
        return (self.judging_s(steps, trials) + confirming_s) / self.training_s

    def _judging(self, steps: int = 0) -> list[TrialRecord]:
        """Return the quality trials of at least so many steps that have not failed."""
        return [
            trial
            for trial in self._trials
            if trial.kind == "quality"
            and trial.info.get("steps", self._settings.quality_steps) >= steps
            and (trial.result is None or trial.result.status.measured)
        ]

    def why_not_explore(self) -> str:
        """Return why another exploring trial does not fit into the budget; empty if it does."""
        if self.left_s < self.trial_s + self.confirming_s():
            return (
                f"the limit of {self._minutes} leaves no time for another trial of "
                f"{self.trial_s:.0f} s and the confirmation"
            )
        count = max(FEWEST_TRIALS - len(explored(self._trials)), 0)
        least_s = count * self.trial_s + self.confirming_s()
        if least_s >= self.training_s:
            return (
                f"tuning would take at least {least_s:.0f} s more, and the training is expected "
                f"to take {self.training_s:.0f} s"
            )
        return ""

    def why_not_judge(self, steps: int, trials: int = 1) -> str:
        """Return why no other quality trial is of use or fits into the budget; empty if one is.

        Args:
            steps: Its steps, each as long as the default's.
            trials: As of :meth:`judging_s`.
        """
        default = default_result(self._trials)
        if default is not None and has_several_losses(default):
            return SEVERAL_LOSSES
        minutes, left_s = self._settings.quality_minutes, self._judging_left_s
        if left_s <= 0:
            return f"the limit of {amount(minutes, 'minute')} of quality trials is reached"
        least_s, before = self.judging_s(steps, trials), self._judging(steps)
        # Before the first look too few are known to tell how long all will take.
        needed = trials if len(before) >= 2 * FIRST_SEEDS else 1
        if before and left_s < needed * (each_s := _used_s(before) / len(before)):
            return (
                f"the limit of {amount(minutes, 'minute')} of quality trials leaves no time for "
                f"{amount(needed, 'more trial')} of {each_s:.0f} s"
            )
        if not before and least_s > left_s:
            return (
                f"the first verdict by trials of {steps} steps takes {least_s / 60:.0f} min, more "
                f"than is left of {amount(minutes, 'minute')} (--autosync-quality-minutes)"
            )
        if self.left_s < least_s + self.confirming_s():
            return (
                f"the limit of {self._minutes} leaves no time for quality trials and the "
                "confirmation"
            )
        return ""

    def why_not_confirm(self, contenders: int, saving: float, steps: int | None = None) -> str:
        """Return why the confirmation does not fit into the budget or does not pay; else empty.

        Args:
            contenders: Number of candidates plus one for the default.
            saving: Share of a step that the best candidate is expected to save.
            steps: As of :meth:`confirming_s`.
        """
        if self.left_s < self.confirming_s(contenders, steps):
            return f"the limit of {self._minutes} leaves no time for the confirmation"
        cost_s = MIN_ROUNDS * contenders * self._confirming_cost_s(steps)
        saved_s = saving * self.training_s
        if saved_s < cost_s:
            return (
                f"the confirmation costs {cost_s:.0f} s and is expected to save "
                f"{saved_s:.0f} s of the training"
            )
        return ""

    def why_not_go_on(self, trials: int, saving: float, steps: int | None = None) -> str:
        """Return why a confirmation that has begun does not go on; empty if it does.

        Args:
            trials: Those of the round that begins; 0 if none does.
            saving: Share of a step that it may save.
            steps: As of :meth:`confirming_s`.
        """
        if self.left_s < self._run_s + self._further_s(steps):
            return "the minutes were used before anything was confirmed"
        cost_s, saved_s = trials * self._confirming_cost_s(steps), saving * self.training_s
        if saved_s < cost_s:
            return (
                f"another round of the confirmation costs {cost_s:.0f} s and may save "
                f"{saved_s:.0f} s of the training"
            )
        return ""


def trial_s_after(default: TrialResult, settings: StudySettings) -> float:
    """Return the seconds of a trial with the settings' steps, from those of the default trial.

    The default trial may have run more steps.

    Args:
        default: Result of the default trial.
        settings: The settings of the study.
    """
    if default.step_time is None:
        return default.total_s
    ran = max(len(rank.step_s) for rank in default.ranks)
    fewer = max(ran - sum(settings.steps_after(default)), 0)
    return default.total_s - fewer * default.step_time.mean_s


def quality_trial_s(default: TrialResult, settings: StudySettings, steps: int) -> float:
    """Return the seconds of a quality trial; a candidate is assumed as slow as the default.

    Args:
        default: Result of the default trial.
        settings: The settings of the study.
        steps: The trial's steps after its warm-up.
    """
    if default.step_time is None:
        return 0.0
    warmup, _ = settings.steps_after(default)
    ran = max(len(rank.step_s) for rank in default.ranks)
    return max(default.total_s + (warmup + steps - ran) * default.step_time.mean_s, 0.0)


def _lost_s(result: TrialResult, default_s: float) -> float:
    """Return the seconds by which a live trial, with its switch, exceeds as many default steps.

    The trial may have been longer by steps with an evaluation, which its report leaves out.

    Args:
        result: The result of the trial.
        default_s: Step time of the default, seconds.
    """
    ends_s = ends_of(result)
    if not ends_s or math.isnan(result.setup_s):
        return 0.0 if math.isnan(result.total_s) else result.total_s
    return result.setup_s - ends_s[0] + ends_s[-1] - len(ends_s) * default_s


def _used_s(trials: Sequence[TrialRecord]) -> float:
    """Return the seconds of the trials and of the learner before them."""
    return _ran_s(trials) + _asked_s(trials)


def _ran_s(trials: Sequence[TrialRecord]) -> float:
    trial_s = [t.result.total_s for t in trials if t.result is not None]
    return sum(s for s in trial_s if not math.isnan(s))


def _asked_s(trials: Sequence[TrialRecord]) -> float:
    return sum(float(t.info.get("ask_s", 0.0)) for t in trials)


def _spent_s(trials: Sequence[TrialRecord]) -> float:
    """Return the seconds of the trials, of the learner, and of runs that were discarded."""
    return _used_s(trials) + sum(t.result.discarded_s for t in trials if t.result is not None)
