"""Where a tuning stands: what every progress display shows, kept without any display."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.reporting.words import (
    evidence_text,
    first_line,
    seconds_text,
    span_text,
    speedup_text,
)
from hvd_autosync.search_space import StepTime, Strategy, TrialResult, TrialStatus
from hvd_autosync.study.confirm import MIN_ROUNDS, Comparison, Confirmation, Measurement
from hvd_autosync.study.knob_order import knobs_by_effect
from hvd_autosync.study.noninferiority import MOST_JUDGED
from hvd_autosync.study.quality import FIRST_SEEDS
from hvd_autosync.study.related_studies import observations_of
from hvd_autosync.study.stage_budget import explores
from hvd_autosync.study.values import Trial

if TYPE_CHECKING:
    from hvd_autosync.study.study import Study
    from hvd_autosync.traces import TrialRecord

#: A trial that has made no step for so long is worth a word.
_SILENT_S = 60.0
#: A set-up that takes longer, and more than half of its trial, is worth one, too.
_LONG_SETUP_S = 5.0
#: Contenders of a confirmation that has not begun: the default and one candidate.
_USUAL_CONTENDERS = 2


@dataclass(frozen=True)
class EndedTrial:
    """One ended trial, as listings show it.

    Attributes:
        number: Its number in the study.
        kind: Why it was asked for.
        strategy: What was tried, in words.
        status: How it ended.
        reason: Why it ended so; empty when it completed.
        time: Its step time, if it has one.
        speedup: Times faster than the default of the same phase and round; NaN when unknown.
        round: Round of the confirmation, from 1; 0 while exploring.
        slow_setup: How much of its time it took to come to its first step, where that is most of
            it and worth a word; else empty.
    """

    number: int
    kind: str
    strategy: str
    status: TrialStatus
    reason: str
    time: StepTime | None
    speedup: float
    round: int
    slow_setup: str = ""

    @property
    def explores(self) -> bool:
        """Whether it was not there to judge or to confirm."""
        return explores(self.kind)


class TuningProgress:
    """Follows one study through the calls that a listener gets.

    Args:
        clock: Seconds from an arbitrary moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._durations_s: list[float] = []
        self._default_s = math.nan
        self._confirming: list[Measurement] = []
        self._contenders = _USUAL_CONTENDERS
        self._hinted = -1
        self._order: tuple[str, ...] = ()
        self.most_trials = 0
        self.ended: list[EndedTrial] = []

    def start(self, study: Study) -> None:
        """Begin to follow ``study``; trials of an interrupted one count."""
        self.most_trials = study.settings.trials
        history = study.history
        if history:
            self._estimate(study)
        for record in history:
            if record.result is not None:
                trial = Trial(record.number, record.kind, record.strategy)
                self._take(study, trial, record.result)
                self._contenders = _contenders(record, self._contenders)
                if math.isfinite(record.result.total_s):
                    asking_s = float(record.info.get("ask_s", 0.0))
                    self._durations_s.append(record.result.total_s + asking_s)

    def waiting(self) -> None:
        """The time of the next trial, with the search for it, begins now."""
        self._began_at = self._clock()

    def begin(self, study: Study, trial: Trial) -> None:
        """A trial is launched."""
        if trial.kind == "confirm" and not self._confirming:
            self._contenders = _contenders(study.history[-1], self._contenders)

    def hint(self, trial: Trial, progress: TrialProgress) -> str | None:
        """What may be wrong with a trial that does not come to its first step; said once."""
        silent = progress.phase == "starting" and progress.elapsed_s > _SILENT_S
        if not silent or trial.number == self._hinted:
            return None
        self._hinted = trial.number
        trained = sum(ended.time is not None for ended in self.ended)
        if trained:
            return (
                f"trial {trial.number}: no step after {_SILENT_S:.0f} s, where the script has "
                f"trained in {trained} trial{'s' * (trained != 1)} before: a slow launch, as on a "
                "busy machine, or a strategy that hangs; then the trial is ended, and tuning goes "
                "on"
            )
        return (
            f"trial {trial.number}: no step of hvd.DistributedOptimizer after {_SILENT_S:.0f} s; "
            "if the script does not train with horovod.torch, end this with Ctrl-C"
        )

    def end(self, study: Study, trial: Trial, result: TrialResult) -> EndedTrial:
        """A trial ended."""
        self._durations_s.append(self._clock() - self._began_at)
        self._estimate(study)
        return self._take(study, trial, result)

    def _estimate(self, study: Study) -> None:
        """Which knobs matter, anew: once for each trial, not for each line."""
        if study.record.space is not None:
            observed = observations_of(study.space, study.history)
            self._order = knobs_by_effect(study.space, observed)

    def _take(self, study: Study, trial: Trial, result: TrialResult) -> EndedTrial:
        round_ = self.next_round(study, trial)
        step_time = result.step_time
        if trial.kind == "confirm":
            strategy = study.space.complete(trial.strategy)
            self._confirming.append(Measurement(strategy, step_time))
        if step_time is not None and _is_default(study, trial):
            self._default_s = step_time.mean_s
        ended = EndedTrial(
            trial.number,
            trial.kind,
            self.describe(study, trial),
            result.status,
            first_line(result.reason),
            step_time,
            self._default_s / step_time.mean_s if step_time else math.nan,
            round_,
            _slow_setup(result),
        )
        self.ended.append(ended)
        return ended

    def describe(self, study: Study, trial: Trial) -> str:
        """What is tried, in words."""
        return "default" if _is_default(study, trial) else self._in_words(study, trial.strategy)

    def _in_words(self, study: Study, strategy: Strategy) -> str:
        """A strategy, the knobs first that matter as far as is known."""
        return replace(study.space, shown_first=self._order).describe(strategy)

    def next_round(self, study: Study, trial: Trial) -> int:
        """The round of the confirmation that ``trial`` belongs to; 0 while exploring."""
        if trial.kind != "confirm":
            return 0
        strategy = study.space.complete(trial.strategy)
        return 1 + sum(m.strategy == strategy for m in self._confirming)

    @property
    def spent_s(self) -> float:
        """Seconds that the trials took, with the search for them."""
        return sum(self._durations_s)

    @property
    def explored(self) -> int:
        """Number of ended trials of the exploration, the default's among them."""
        return sum(trial.explores for trial in self.ended)

    @property
    def best(self) -> EndedTrial | None:
        """The fastest trial of the exploration."""
        measured = [t for t in self.ended if t.explores and t.time is not None]
        return max(measured, key=lambda t: t.speedup, default=None)

    def best_text(self, study: Study) -> str:
        """What is confirmed so far, else what was fastest, in one line."""
        if study.record.space is not None:
            for comparison in self.comparisons(study)[:1]:
                speedup = f"{speedup_text(comparison.speedup)} ({evidence_text(comparison)})"
                return f"confirmed so far {speedup}: {self._in_words(study, comparison.strategy)}"
        best = self.best
        if best is None or best.time is None:
            return "best so far: nothing was measured yet"
        step = seconds_text(best.time.mean_s)
        return f"best so far {speedup_text(best.speedup)}, {step} per step: {best.strategy}"

    def comparisons(self, study: Study) -> list[Comparison]:
        """The candidates against the default, as far as they are confirmed; best first."""
        if not self._confirming:
            return []
        default = study.space.default
        candidates: dict[Strategy, None] = dict.fromkeys(m.strategy for m in self._confirming)
        candidates.pop(default, None)
        return Confirmation(default, list(candidates), self._confirming).comparisons()

    def left_s(self, study: Study) -> float:
        """Estimated seconds to the end of the tuning; NaN before the first trial has ended.

        All trials are counted that may still be asked for; the study may well stop earlier.
        """
        if not self._durations_s:
            return math.nan
        each_s = self.spent_s / len(self._durations_s)
        confirmed = len(self._confirming)
        to_explore = to_judge = 0
        if not confirmed:
            to_judge = self._to_judge(study)
            to_explore = max(self.most_trials - self.explored, 0)
        rounds = max(MIN_ROUNDS, confirmed // self._contenders + 1)
        to_confirm = rounds * self._contenders - confirmed
        running_s = min(self._clock() - self._began_at, each_s)
        minutes = study.settings.minutes
        unused_s = math.inf if minutes is None else max(60 * minutes - self.spent_s, 0.0)
        return min((to_explore + to_judge + to_confirm) * each_s, unused_s) - running_s

    def _to_judge(self, study: Study) -> int:
        """How many trials may still judge lossy strategies by their losses."""
        if study.record.space is None or not study.space.has_lossy:
            return 0
        judged = sum(trial.kind == "quality" for trial in self.ended)
        return max(FIRST_SEEDS * (1 + MOST_JUDGED) - judged, 0)


def _slow_setup(result: TrialResult) -> str:
    if not result.setup_s > max(result.total_s / 2, _LONG_SETUP_S):
        return ""
    return f"{span_text(result.setup_s)} of {span_text(result.total_s)} until its first step ended"


def _contenders(record: TrialRecord, otherwise: int) -> int:
    """How many strategies are confirmed in turn, as a trial of the confirmation knows."""
    return 1 + len(record.info["candidates"]) if record.kind == "confirm" else otherwise


def _is_default(study: Study, trial: Trial) -> bool:
    return trial.kind == "default" or study.space.complete(trial.strategy) == study.space.default
