"""Progress as plain lines, one per event, for logs and pipes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TextIO

from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.reporting.tuning_progress import EndedTrial, TuningProgress
from hvd_autosync.reporting.words import (
    forecast_text,
    span_text,
    speedup_text,
    step_time_text,
    steps_text,
)
from hvd_autosync.search_space import TrialResult, TrialStatus
from hvd_autosync.study.confirm import MAX_ROUNDS, MIN_ROUNDS
from hvd_autosync.study.values import Conclusion, Trial
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.printable import printable

if TYPE_CHECKING:
    from hvd_autosync.study.forecast import Forecast
    from hvd_autosync.study.study import AskTellStudy

PREFIX = "hvd-autosync"


class PlainProgress:
    """Writes a line when a study begins, when a trial ends, and when the study concludes.

    Args:
        stream: Output stream: ``sys.stderr``, which keeps the job's standard output clean.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._tuning = TuningProgress()

    def on_wait(self, elapsed_s: float) -> None:
        """See :class:`hvd_autosync.engine.tuning.Listener`; nothing to print."""

    def on_study_start(self, study: AskTellStudy, *, resumed: bool) -> None:
        self._tuning.start(study)
        settings = study.settings
        again = f" resumes after {amount(len(self._tuning.ended), 'trial')}" if resumed else ""
        minutes = settings.minutes
        limit = f" or {amount(minutes, 'minute')}" if minutes is not None else ""
        judged = settings.judged_by
        default_is = f"; its default is the winner of study {judged}" if judged else ""
        self._print(
            f"study {study.study_id}{again}: at most {amount(settings.trials, 'trial')}{limit}, "
            f"each with {steps_text(settings, live=settings.mode == 'live')}; then "
            f"{MIN_ROUNDS} to {MAX_ROUNDS} rounds of confirmation, which measure the best one or "
            "two strategies and the default in turn"
            f"{default_is}"
        )

    def on_links_progress(self, study: AskTellStudy, progress: TrialProgress) -> None:
        """See :class:`hvd_autosync.engine.tuning.Listener`; a notice was printed already."""

    def on_ask_start(self, study: AskTellStudy) -> None:
        self._tuning.waiting()

    def on_trial_start(self, study: AskTellStudy, trial: Trial) -> None:
        self._tuning.begin(study, trial)

    def on_trial_progress(self, study: AskTellStudy, trial: Trial, progress: TrialProgress) -> None:
        if hint := self._tuning.hint(trial, progress):
            self._print(hint)

    def on_trial_end(self, study: AskTellStudy, trial: Trial, result: TrialResult) -> None:
        self._print(trial_line(self._tuning.end(study, trial, result)))

    def on_study_end(self, study: AskTellStudy, conclusion: Conclusion) -> None:
        spent, count = span_text(self._tuning.spent_s), len(self._tuning.ended)
        self._print(
            f"study {study.study_id} ended after {amount(count, 'trial')} in {spent}: "
            f"{conclusion.stopped}"
        )

    def on_forecast(self, study: AskTellStudy, forecast: Forecast) -> None:
        self._print(forecast_text(forecast))

    def on_notice(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        """Do nothing; the terminal was not changed."""

    def _print(self, line: str) -> None:
        print(f"{PREFIX}: {printable(line)}", file=self._stream, flush=True)


def trial_line(ended: EndedTrial) -> str:
    """One ended trial as one line."""
    kind = f"confirm, round {ended.round}" if ended.round else ended.kind
    parts = [f"trial {ended.number} ({kind}):"]
    if ended.status is not TrialStatus.COMPLETED:
        steps = f" after {amount(ended.time.steps, 'measured step')}" if ended.time else ""
        parts.append(f"{ended.status.value}{steps},")
    if ended.time is not None:
        parts.append(f"{step_time_text(ended.time)} per step,")
        if not ended.is_default and math.isfinite(ended.speedup):
            parts.append(f"{speedup_text(ended.speedup)} against the default,")
    if ended.status is not TrialStatus.COMPLETED and ended.time is None and ended.reason:
        parts.append(f"{ended.reason},")
    if ended.slow_setup:
        parts.append(f"{ended.slow_setup},")
    line = " ".join(parts).rstrip(",")
    known = ended.kind == ended.strategy == "default"
    return line if known else f"{line}: {ended.strategy}"
