"""The state of a tuning that progress displays show, independent of any display."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hvd_autosync.errors import SpaceError
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
from hvd_autosync.study.damaged import named_if_damaged
from hvd_autosync.study.knob_order import knobs_by_effect
from hvd_autosync.study.noninferiority import MOST_JUDGED
from hvd_autosync.study.quality_trial import FIRST_SEEDS
from hvd_autosync.study.related_studies import observations_of
from hvd_autosync.study.resumed import repeated_defaults
from hvd_autosync.study.stage_budget import explores
from hvd_autosync.study.values import Trial
from hvd_autosync.traces.speedups import Speedups, is_default
from hvd_autosync.util.amounts import amount

if TYPE_CHECKING:
    from hvd_autosync.study.study import AskTellStudy
    from hvd_autosync.traces import TrialRecord

#: Seconds without a first step after which a hint is printed.
_SILENT_S = 60.0
#: A set-up that takes longer than this, and more than half of its trial, is reported.
_LONG_SETUP_S = 5.0
#: Expected number of strategies in a confirmation before it begins: default and one candidate.
_USUAL_CONTENDERS = 2


@dataclass(frozen=True)
class EndedTrial:
    """One ended trial, as listings show it.

    Attributes:
        number: Its number in the study.
        kind: The kind of trial.
        strategy: Its strategy as text.
        status: Its final status.
        reason: The reason for the status; empty if it completed.
        time: Its step time, if it has one.
        speedup: Speed-up over the last default before it; NaN if unknown.
        round: Round of the confirmation, from 1; 0 while exploring.
        slow_setup: A note on the duration of its set-up if that was most of the trial; else empty.
        is_default: Whether it measures the default.
        exact: Whether its strategy trains the same model as the default.
        repeats: Whether it measures the default again, which explores nothing.
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
    is_default: bool = False
    exact: bool = True
    repeats: bool = False

    @property
    def explores(self) -> bool:
        """Whether it is a trial of the exploration."""
        return explores(self.kind)


class TuningProgress:
    """Tracks one study at a time through the calls of a listener.

    Args:
        clock: Seconds from an arbitrary moment.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reset()

    def _reset(self) -> None:
        """Forget the study before, as when a training is tuned again."""
        self._began_at = self._clock()
        self._durations_s: list[float] = []
        self._speedups = Speedups()
        self._confirming: list[Measurement] = []
        self._contenders = _USUAL_CONTENDERS
        self._hinted = -1
        self._order: tuple[str, ...] = ()
        self.most_trials = 0
        self.ended: list[EndedTrial] = []

    def start(self, study: AskTellStudy) -> None:
        """Begin to track ``study`` alone, including the trials before an interruption."""
        self._reset()
        self.most_trials = study.settings.trials
        history = study.history
        if history:
            self._estimate(study)
        for record in history:
            if record.result is not None:
                trial = Trial(record.number, record.kind, record.strategy)
                self._take(study, trial, record.result)
                self._contenders = _contenders(record, self._contenders)
                if math.isfinite(took_s := _took_s(record, record.result)):
                    self._durations_s.append(took_s)

    def waiting(self) -> None:
        """Start the time of the next trial, which includes the search for its strategy."""
        self._began_at = self._clock()

    def begin(self, study: AskTellStudy, trial: Trial) -> None:
        """A trial is launched."""
        if trial.kind == "confirm" and not self._confirming:
            self._contenders = _contenders(study.history[-1], self._contenders)

    def hint(self, trial: Trial, progress: TrialProgress) -> str | None:
        """Return a hint on a trial that has not reached its first step; returned once per trial."""
        silent = progress.phase == "starting" and progress.elapsed_s > _SILENT_S
        if not silent or trial.number == self._hinted:
            return None
        self._hinted = trial.number
        trained = sum(ended.time is not None for ended in self.ended)
        if trained:
            return (
                f"trial {trial.number}: no step after {_SILENT_S:.0f} s, although the script "
                f"trained in {amount(trained, 'earlier trial')}: the launch is slow "
                "(busy machine), or the strategy hangs; a trial that hangs is ended, and tuning "
                "continues"
            )
        return (
            f"trial {trial.number}: no step of hvd.DistributedOptimizer after {_SILENT_S:.0f} s; "
            "if the script does not train with horovod.torch, stop with Ctrl-C"
        )

    def end(self, study: AskTellStudy, trial: Trial, result: TrialResult) -> EndedTrial:
        """Return a trial ended."""
        took_s = _took_s(study.history[trial.number], result)  # not by the clock: in a replay, too
        self._durations_s.append(
            took_s if math.isfinite(took_s) else self._clock() - self._began_at
        )
        self._estimate(study)
        return self._take(study, trial, result)

    def _estimate(self, study: AskTellStudy) -> None:
        """Estimate again which knobs matter: once per trial, not per line."""
        if study.record.space is not None:
            observed = observations_of(study.space, study.history)
            self._order = knobs_by_effect(study.space, observed)

    def _take(self, study: AskTellStudy, trial: Trial, result: TrialResult) -> EndedTrial:
        round_ = self.next_round(study, trial)
        step_time = result.step_time
        if trial.kind == "confirm":
            strategy = study.space.complete(trial.strategy)
            self._confirming.append(Measurement(strategy, step_time))
        default = is_default(study.record.space, trial.kind, trial.strategy)
        ended = EndedTrial(
            trial.number,
            trial.kind,
            self.describe(study, trial),
            result.status,
            first_line(result.reason),
            step_time,
            self._speedups.take(step_time, default=default),
            round_,
            _slow_setup(result),
            default,
            _is_exact(study, trial.strategy),
            trial.number in repeated_defaults(study.history),
        )
        self.ended.append(ended)
        return ended

    def describe(self, study: AskTellStudy, trial: Trial) -> str:
        """Return the strategy of ``trial`` as text."""
        if study.record.space is None and trial.kind == "default":
            return "default"
        return self._in_words(study, trial.strategy)

    def _in_words(self, study: AskTellStudy, strategy: Strategy) -> str:
        """Return a strategy as text, with the most important knobs first."""
        return replace(study.space, shown_first=self._order).describe(strategy)

    def next_round(self, study: AskTellStudy, trial: Trial) -> int:
        """Return the round of the confirmation that ``trial`` belongs to; 0 while exploring."""
        if trial.kind != "confirm":
            return 0
        strategy = study.space.complete(trial.strategy)
        return 1 + sum(m.strategy == strategy for m in self._confirming)

    @property
    def spent_s(self) -> float:
        """Seconds spent on trials, including the search for their strategies."""
        return sum(self._durations_s)

    @property
    def explored(self) -> int:
        """Number of ended trials of the exploration, including the default's first."""
        return sum(trial.explores and not trial.repeats for trial in self.ended)

    @property
    def best(self) -> EndedTrial | None:
        """The fastest exact trial of the exploration."""
        return next(iter(best_first(self.ended)), None)

    def best_text(self, study: AskTellStudy) -> str:
        """Return the best confirmed strategy, or else the fastest trial, in one line."""
        if study.record.space is not None:
            for comparison in self.comparisons(study)[:1]:
                speedup = f"{speedup_text(comparison.speedup)} ({evidence_text(comparison)})"
                return f"confirmed so far {speedup}: {self._in_words(study, comparison.strategy)}"
        best = self.best
        if best is None or best.time is None:
            return "best so far: no measurement yet"
        step = seconds_text(best.time.mean_s)
        return f"best so far {speedup_text(best.speedup)}, {step} per step: {best.strategy}"

    def comparisons(self, study: AskTellStudy) -> list[Comparison]:
        """Comparisons of the candidates with the default from the confirmation; best first.

        Raises:
            TraceFormatError: Trials are damaged, so that nothing can be compared.
        """
        if not self._confirming:
            return []
        default = study.space.default
        candidates: dict[Strategy, None] = dict.fromkeys(m.strategy for m in self._confirming)
        candidates.pop(default, None)
        with named_if_damaged(study.history):
            return Confirmation(default, list(candidates), self._confirming).comparisons()

    def left_s(self, study: AskTellStudy) -> float:
        """Estimated seconds to the end of the tuning; NaN before the first trial has ended.

        Assumes the maximum number of exploring trials, and verdicts at the first look; the study
        may stop earlier, and judge for longer.
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
        to_do_s = min((to_explore + to_judge + to_confirm) * each_s, unused_s)
        return max(to_do_s - running_s, 0.0)

    def _to_judge(self, study: AskTellStudy) -> int:
        """Number of remaining quality trials if each verdict needs no more than the first look."""
        if study.record.space is None or not study.space.has_lossy:
            return 0
        judged = sum(trial.kind == "quality" for trial in self.ended)
        return max(FIRST_SEEDS * (1 + MOST_JUDGED) - judged, 0)


def best_first(ended: Iterable[EndedTrial]) -> list[EndedTrial]:
    """Return the measured trials of the exploration, fastest first, without lossy strategies.

    A lossy strategy may be refused for its losses, however fast it is.
    """
    measured = (t for t in ended if t.explores and t.exact and math.isfinite(t.speedup))
    return sorted(measured, key=lambda t: t.speedup, reverse=True)


def _is_exact(study: AskTellStudy, strategy: Strategy) -> bool:
    if study.record.space is None:  # before the end of the default's trial
        return True
    try:
        return study.space.is_exact(strategy)
    except SpaceError:  # an imported trial may lie outside of the space
        return False


def _took_s(record: TrialRecord, result: TrialResult) -> float:
    """Return the recorded seconds of a trial, including the search for its strategy; NaN: none."""
    asking_s = record.info_number("ask_s")
    return result.total_s + result.discarded_s + (asking_s if math.isfinite(asking_s) else 0.0)


def _slow_setup(result: TrialResult) -> str:
    if not result.setup_s > max(result.total_s / 2, _LONG_SETUP_S):
        return ""
    return f"{span_text(result.setup_s)} of {span_text(result.total_s)} before the end of step 1"


def _contenders(record: TrialRecord, otherwise: int) -> int:
    """Number of strategies in the confirmation, from a trial of it if it names them."""
    candidates = record.info.get("candidates") if record.kind == "confirm" else None
    return 1 + len(candidates) if isinstance(candidates, list) else otherwise
