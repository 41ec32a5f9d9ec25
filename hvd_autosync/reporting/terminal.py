"""Progress on a terminal: a few lines redrawn in place, and a final summary.

The driver shares its processors with the measured ranks. There is therefore no redrawing thread,
and calls during a trial redraw at most once per second.
"""

from __future__ import annotations

import atexit
import math
import time
from typing import TYPE_CHECKING, TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.reporting.console import PrintableConsole
from hvd_autosync.reporting.tuning_progress import EndedTrial, TuningProgress, best_first
from hvd_autosync.reporting.words import forecast_text, span_text, speedup_text, step_time_text
from hvd_autosync.search_space import TrialResult, TrialStatus
from hvd_autosync.study.resumed import repeated_defaults
from hvd_autosync.study.stage_budget import explores
from hvd_autosync.study.values import Conclusion, Trial
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.printable import printable

if TYPE_CHECKING:
    from hvd_autosync.study.forecast import Forecast
    from hvd_autosync.study.study import AskTellStudy

_REDRAW_EVERY_S = 1.0
_BEST_SHOWN, _LAST_SHOWN = 3, 4
_BAR_WIDTH = 40


class TerminalProgress:
    """Shows the running trial and its progress, the best result, and the last and best trials.

    Args:
        stream: A terminal that can move its cursor.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = PrintableConsole(stream)
        self._tuning = TuningProgress()
        self._clear()

    def _clear(self) -> None:
        """Begin an empty drawing, below the one of a study before."""
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
        self._table: RenderableType = ""
        self._drawn_at = -math.inf
        self._phase = ""

    def on_wait(self, elapsed_s: float) -> None:
        """See :class:`hvd_autosync.engine.tuning.Listener`; nothing to draw."""

    def on_study_start(self, study: AskTellStudy, *, resumed: bool) -> None:
        self.close()
        self._clear()
        self._tuning.start(study)
        if resumed:
            self._console.print(
                f"study {study.study_id} resumes after {amount(len(self._tuning.ended), 'trial')}"
            )
        atexit.register(self.close)
        self._live.start()

    def on_links_progress(self, study: AskTellStudy, progress: TrialProgress) -> None:
        if time.monotonic() - self._drawn_at >= _REDRAW_EVERY_S:
            self._draw(study, Text(f"measuring links, {span_text(progress.elapsed_s)}"))

    def on_ask_start(self, study: AskTellStudy) -> None:
        self._tuning.waiting()
        self._table = trials_so_far(self._tuning.ended)
        self._draw(study, Text("choosing the next strategy"))

    def on_trial_start(self, study: AskTellStudy, trial: Trial) -> None:
        self._tuning.begin(study, trial)
        self._phase = ""
        self._draw(study, self._running(study, trial, TrialProgress("starting", 0, 0, 0.0)))

    def on_trial_progress(self, study: AskTellStudy, trial: Trial, progress: TrialProgress) -> None:
        if hint := self._tuning.hint(trial, progress):
            self.on_notice(hint)
        due = time.monotonic() - self._drawn_at >= _REDRAW_EVERY_S
        if due or progress.phase != self._phase:
            self._phase = progress.phase
            self._draw(study, self._running(study, trial, progress))

    def on_trial_end(self, study: AskTellStudy, trial: Trial, result: TrialResult) -> None:
        self._tuning.end(study, trial, result)

    def on_study_end(self, study: AskTellStudy, conclusion: Conclusion) -> None:
        trials = amount(len(self._tuning.ended), "trial")
        spent = span_text(self._tuning.spent_s)
        self._live.update(
            Group(
                trials_so_far(self._tuning.ended),
                f"study {study.study_id}: {trials} in {spent}; {conclusion.stopped}",
            )
        )
        self.close()

    def on_forecast(self, study: AskTellStudy, forecast: Forecast) -> None:
        self.on_notice(forecast_text(forecast))

    def on_notice(self, text: str) -> None:
        self._console.print(f"hvd-autosync: {text}")

    def close(self) -> None:
        """Keep the last drawing and restore the terminal."""
        atexit.unregister(self.close)
        self._live.stop()

    def _draw(self, study: AskTellStudy, activity: RenderableType) -> None:
        left_s = self._tuning.left_s(study)
        left = f"about {span_text(left_s)} left" if math.isfinite(left_s) else ""
        head = Table.grid(padding=(0, 2))
        head.add_row(Text(f"study {study.study_id}", style="bold"), Text(left, style="dim"))
        self._live.update(
            Group(head, activity, one_line(self._tuning.best_text(study)), self._table),
            refresh=True,
        )
        self._drawn_at = time.monotonic()

    def _running(
        self, study: AskTellStudy, trial: Trial, progress: TrialProgress
    ) -> RenderableType:
        """Return the running trial and its progress."""
        tuning = self._tuning
        round_ = tuning.next_round(study, trial)
        if round_:
            what = f"confirming, round {round_}: trial {trial.number}"
        elif not explores(trial.kind):
            what = f"judging quality: trial {trial.number}"
        elif trial.number in repeated_defaults(study.history):
            what = f"measuring the default again: trial {trial.number}"
        else:
            count = f"{tuning.explored + 1} of at most {tuning.most_trials}"
            what = f"exploring: trial {trial.number} ({trial.kind}), {count}"
        line = one_line(f"{what}: {tuning.describe(study, trial)}")
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(progress.of or 1, progress.steps, width=_BAR_WIDTH),
            Text(
                f"{progress.phase}, step {progress.steps} of {progress.of}"
                if progress.of
                else progress.phase
            ),
            Text(span_text(progress.elapsed_s), style="dim"),
        )
        return Group(line, bar)


def one_line(text: str) -> Text:
    """``text`` truncated to the width of the terminal, to keep the height of the display."""
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def trials_so_far(ended: list[EndedTrial]) -> RenderableType:
    """Return a table of the default, the best and the last ended trials, in order."""
    if not ended:
        return ""
    best = best_first(ended)[:_BEST_SHOWN]
    shown = {t.number: t for t in [*ended[:1], *best, *ended[-_LAST_SHOWN:]]}
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name, justify in (
        ("trial", "right"),
        ("kind", "left"),
        ("step time", "right"),
        ("speed-up", "right"),
    ):
        table.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("strategy")
    for number in sorted(shown):
        trial = shown[number]
        note = "" if trial.status is TrialStatus.COMPLETED else f"{trial.status.value}: "
        if trial.time is None and trial.reason:
            note += f"{trial.reason}: "
        table.add_row(
            str(number),
            f"confirm {trial.round}" if trial.round else trial.kind,
            step_time_text(trial.time) if trial.time else "-",
            speedup_text(trial.speedup),
            one_line(note + trial.strategy),
            style="green" if trial in best[:1] else "" if trial.time else "red",
        )
    return table
