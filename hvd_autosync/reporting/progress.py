"""The choice of the progress display, and a guard against its failures."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO, TypeAlias

from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.reporting.plain import PREFIX, PlainProgress
from hvd_autosync.reporting.terminal import TerminalProgress
from hvd_autosync.reporting.widget import WidgetProgress
from hvd_autosync.search_space import TrialResult
from hvd_autosync.study.values import Conclusion, Trial
from hvd_autosync.util.printable import printable

if TYPE_CHECKING:
    from hvd_autosync.study.forecast import Forecast
    from hvd_autosync.study.study import AskTellStudy

Display: TypeAlias = TerminalProgress | PlainProgress | WidgetProgress


class GuardedProgress:
    """Forwards every call to a display until the display fails; then ignores all calls.

    Use it as ``with contextlib.closing(progress_listener()) as listener``: the terminal is
    restored however the tuning ends, before anything else is printed.

    Args:
        display: The display.
        stream: Stream for the message that the display failed.
    """

    def __init__(self, display: Display, stream: TextIO) -> None:
        self._display: Display | None = display
        self._stream = stream

    @property
    def shows_result(self) -> bool:
        """Whether the display shows the result of a study that ends, and has not failed."""
        return isinstance(self._display, WidgetProgress)

    def on_wait(self, elapsed_s: float) -> None:
        self._guard(lambda display: display.on_wait(elapsed_s))

    def on_study_start(self, study: AskTellStudy, *, resumed: bool) -> None:
        self._guard(lambda display: display.on_study_start(study, resumed=resumed))

    def on_links_progress(self, study: AskTellStudy, progress: TrialProgress) -> None:
        self._guard(lambda display: display.on_links_progress(study, progress))

    def on_ask_start(self, study: AskTellStudy) -> None:
        self._guard(lambda display: display.on_ask_start(study))

    def on_trial_start(self, study: AskTellStudy, trial: Trial) -> None:
        self._guard(lambda display: display.on_trial_start(study, trial))

    def on_trial_progress(self, study: AskTellStudy, trial: Trial, progress: TrialProgress) -> None:
        self._guard(lambda display: display.on_trial_progress(study, trial, progress))

    def on_trial_end(self, study: AskTellStudy, trial: Trial, result: TrialResult) -> None:
        self._guard(lambda display: display.on_trial_end(study, trial, result))

    def on_study_end(self, study: AskTellStudy, conclusion: Conclusion) -> None:
        self._guard(lambda display: display.on_study_end(study, conclusion))

    def on_forecast(self, study: AskTellStudy, forecast: Forecast) -> None:
        self._guard(lambda display: display.on_forecast(study, forecast))

    def on_notice(self, text: str) -> None:
        self._guard(lambda display: display.on_notice(text))

    def close(self) -> None:
        """Restore the terminal."""
        self._guard(lambda display: display.close())

    def _guard(self, call: Callable[[Display], None]) -> None:
        display = self._display
        if display is None:
            return
        try:
            call(display)
        except Exception as error:  # a failing display must not end the tuning
            self._display = None
            with suppress(Exception):
                display.close()
            with suppress(OSError, ValueError):  # the stream may be what failed
                reason = printable(f"{type(error).__name__}: {error}")
                print(
                    f"{PREFIX}: the progress display failed, tuning continues without it: {reason}",
                    file=self._stream,
                )


def progress_listener(stream: TextIO | None = None) -> GuardedProgress:
    """Return a live display if ``stream`` (``sys.stderr``) is a terminal; else plain lines."""
    stream = sys.stderr if stream is None else stream
    display = TerminalProgress(stream) if _is_capable_terminal(stream) else PlainProgress(stream)
    return GuardedProgress(display, stream)


def _is_capable_terminal(stream: TextIO) -> bool:
    """Return whether ``stream`` is a terminal whose cursor can be moved.

    The check of rich is not used: with FORCE_COLOR it treats every stream as a terminal.
    """
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
