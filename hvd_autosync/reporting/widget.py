"""Progress in a notebook: a widget with a Stop button.

A running cell blocks the kernel's main thread. The button works nevertheless, in a separate thread:
JupyterLab from 4.4 sends widget events to a subshell of the kernel (IPython's kernel from 7.0). In
other front ends interrupt the kernel, which stops a tuning just as cleanly.
"""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING

from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.reporting.closing import answer_line
from hvd_autosync.reporting.tuning_progress import EndedTrial, TuningProgress, best_first
from hvd_autosync.reporting.words import (
    again_live_text,
    forecast_text,
    span_text,
    speedup_text,
    step_time_text,
)
from hvd_autosync.search_space import TrialResult, TrialStatus
from hvd_autosync.study.resumed import repeated_defaults
from hvd_autosync.study.stage_budget import explores
from hvd_autosync.study.values import Conclusion, Trial
from hvd_autosync.util.amounts import amount
from hvd_autosync.util.printable import printable_html

if TYPE_CHECKING:
    import ipywidgets

    from hvd_autosync.study.forecast import Forecast
    from hvd_autosync.study.study import AskTellStudy

_REDRAW_EVERY_S = 0.5
_TABLE = (
    "max-height:18em;overflow:auto;margin-top:.5em;"
    "border:1px solid var(--jp-border-color2,#ddd);border-radius:4px"
)
_CELL = "padding:.1em .8em .1em .4em;text-align:{align};white-space:nowrap"
_DIM = "opacity:.65"


class StopRequested(KeyboardInterrupt):
    """The widget's Stop button was pressed; all measurements are in the store.

    Args:
        study_id: Id of the study that was running; empty: it had not begun.
    """

    def __init__(self, study_id: str) -> None:
        super().__init__("Stop was pressed")
        self.study_id = study_id


class WidgetProgress:
    """Shows the progress of a tuning below the running cell.

    Args:
        again: What the same call does after Stop, as ``Options.again``.

    Raises:
        ImportError: ``ipywidgets`` is not installed.
    """

    def __init__(self, again: str = "resume tuning") -> None:
        import ipywidgets
        from IPython.display import display

        self._tuning = TuningProgress()
        self._drawn_at = -math.inf
        self._stopped = self._ended = False
        self._again = again
        self._mode = "launched"
        self._title = ""
        self._head = ipywidgets.HTML()
        self._bar = ipywidgets.FloatProgress(
            min=0.0, max=1.0, layout=ipywidgets.Layout(width="60%")
        )
        self._stop = ipywidgets.Button(
            description="Stop",
            icon="stop",
            button_style="warning",
            tooltip="Stop the tuning. Measurements are kept. "
            "Interrupting the kernel does the same.",
        )
        self._stop.on_click(self._pressed)
        self._activity = ipywidgets.HTML()
        self._best = ipywidgets.HTML()
        self._trials = ipywidgets.HTML()
        self._notices = ipywidgets.HTML()
        row = ipywidgets.HBox(
            [self._bar, self._stop], layout=ipywidgets.Layout(align_items="center")
        )
        self._all = ipywidgets.VBox(
            [self._head, row, self._activity, self._best, self._trials, self._notices]
        )
        self._all.add_class("hvd-autosync")
        display(self._all)
        # Since 7.4 the kernel sends a click to the shell that last used the button (this busy cell)
        # instead of the subshell that the page asked for.
        vars(self._stop.comm).pop("_reply_subshell_id", None)

    def on_wait(self, elapsed_s: float) -> None:
        self._activity.value = f"the training starts, {span_text(elapsed_s)}"
        if self._stopped:
            raise StopRequested("")

    def on_study_start(self, study: AskTellStudy, *, resumed: bool) -> None:
        self._tuning.start(study)
        self._drawn_at, self._ended = -math.inf, False
        self._bar.value, self._bar.bar_style = 0.0, ""
        self._activity.value = self._best.value = ""
        self._mode = study.settings.mode
        self._title = self._head.value = f"<b>hvd-autosync</b> study {study.study_id}"
        self._trials.value = trials_html(self._tuning.ended)
        if resumed:
            self.on_notice(f"resumes after {amount(len(self._tuning.ended), 'trial')}")
        self._raise_if_stopped(study)

    def on_links_progress(self, study: AskTellStudy, progress: TrialProgress) -> None:
        if time.monotonic() - self._drawn_at >= _REDRAW_EVERY_S:
            self._draw(study, f"measuring links, {span_text(progress.elapsed_s)}")
            self._raise_if_stopped(study)

    def on_ask_start(self, study: AskTellStudy) -> None:
        self._tuning.waiting()
        self._draw(study, "choosing the next strategy")
        self._raise_if_stopped(study)

    def on_trial_start(self, study: AskTellStudy, trial: Trial) -> None:
        self._tuning.begin(study, trial)
        self._draw(study, self._running(study, trial, TrialProgress("starting", 0, 0, 0.0)))
        self._raise_if_stopped(study)

    def on_trial_progress(self, study: AskTellStudy, trial: Trial, progress: TrialProgress) -> None:
        if hint := self._tuning.hint(trial, progress):
            self.on_notice(hint)
        if time.monotonic() - self._drawn_at >= _REDRAW_EVERY_S:
            self._draw(study, self._running(study, trial, progress))
            self._raise_if_stopped(study)

    def on_trial_end(self, study: AskTellStudy, trial: Trial, result: TrialResult) -> None:
        self._tuning.end(study, trial, result)
        self._trials.value = trials_html(self._tuning.ended)

    def on_study_end(self, study: AskTellStudy, conclusion: Conclusion) -> None:
        self._ended = True
        count, spent = len(self._tuning.ended), span_text(self._tuning.spent_s)
        self._head.value = self._title
        self._bar.value, self._bar.bar_style = 1.0, "success"
        text = f"{amount(count, 'trial')} in {spent}; {conclusion.stopped}"
        self._activity.value = printable_html(text)
        self._best.value = f"<b>{printable_html(answer_line(study.record))}</b>"

    def on_forecast(self, study: AskTellStudy, forecast: Forecast) -> None:
        self.on_notice(forecast_text(forecast))

    def on_notice(self, text: str) -> None:
        self._notices.value += f"<div style='{_DIM}'>{printable_html(text)}</div>"

    def close(self) -> None:
        """Keep the last drawing; of a tuning without a result, say how it ended."""
        self._stop.disabled, self._stop.description = True, "Stop"
        # Stop may be pressed too late, and a study that is reused never began here.
        if self._ended or not (self._stopped or self._title):
            return
        self._head.value, self._bar.bar_style = self._title, "warning"
        # An interrupt of the kernel passes through here; that of a live tuning has had its effect.
        error = sys.exc_info()[1]
        goes_on = error is None and self._mode == "live"
        if not (self._stopped or goes_on or isinstance(error, KeyboardInterrupt)):
            self._activity.value = "ended before its result"
            return
        self._stop.description = "Stopped"
        hint = f"run the same call again to {self._again}"
        if self._mode == "live":
            hint = f"the training goes on; {again_live_text(self._again)}"
        self._activity.value = f"stopped; {hint}"

    def _pressed(self, button: ipywidgets.Button) -> None:
        self._stopped = True
        button.disabled, button.description = True, "Stopping ..."

    def _raise_if_stopped(self, study: AskTellStudy) -> None:
        """End the tuning if Stop was pressed; another thread of the kernel handles the button.

        Raises:
            StopRequested: It was pressed.
        """
        if self._stopped:
            raise StopRequested(study.study_id)

    def _draw(self, study: AskTellStudy, activity: str) -> None:
        self._drawn_at = time.monotonic()
        tuning = self._tuning
        left_s = tuning.left_s(study)
        left = f"about {span_text(left_s)} left" if math.isfinite(left_s) else ""
        self._head.value = f"{self._title} <span style='{_DIM}'>{printable_html(left)}</span>"
        if math.isfinite(left_s):
            self._bar.value = tuning.spent_s / max(tuning.spent_s + left_s, 1e-9)
        self._activity.value = printable_html(activity)
        self._best.value = printable_html(tuning.best_text(study))

    def _running(self, study: AskTellStudy, trial: Trial, progress: TrialProgress) -> str:
        tuning = self._tuning
        round_ = tuning.next_round(study, trial)
        if round_:
            what = f"confirming, round {round_}"
        elif trial.number in repeated_defaults(study.history):
            what = "measuring the default again"
        else:
            what = f"exploring ({trial.kind})" if explores(trial.kind) else "judging quality"
        steps = f"step {progress.steps} of {progress.of}" if progress.of else progress.phase
        return f"trial {trial.number}, {what}, {steps}: {tuning.describe(study, trial)}"


def trials_html(ended: list[EndedTrial]) -> str:
    """Return all ended trials as an HTML table, newest first."""
    if not ended:
        return ""
    best = best_first(ended)[:1]
    columns = ("trial", "kind", "step time", "speed-up", "strategy")
    aligned = ("right", "left", "right", "right", "left")
    head = "".join(
        f"<th style='{_CELL.format(align=align)};{_DIM}'>{name}</th>"
        for name, align in zip(columns, aligned, strict=True)
    )
    rows = []
    for trial in reversed(ended):
        note = "" if trial.status is TrialStatus.COMPLETED else f"{trial.status.value}: "
        if trial.time is None and trial.reason:
            note += f"{trial.reason}: "
        cells = (
            str(trial.number),
            f"confirm {trial.round}" if trial.round else trial.kind,
            step_time_text(trial.time) if trial.time else "-",
            speedup_text(trial.speedup) if trial.time else "",
            note + trial.strategy,
        )
        color = "#d55e00" if trial.time is None else "#009e73" if trial in best else ""
        style = f" style='color:{color}'" if color else ""
        filled = "".join(
            f"<td style='{_CELL.format(align=align)}'>{printable_html(cell)}</td>"
            for cell, align in zip(cells, aligned, strict=True)
        )
        rows.append(f"<tr{style}>{filled}</tr>")
    return f"<div style='{_TABLE}'><table><tr>{head}</tr>{''.join(rows)}</table></div>"
