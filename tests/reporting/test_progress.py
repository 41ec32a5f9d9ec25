from __future__ import annotations

import io
from typing import Any

import pytest

from hvd_autosync.reporting.plain import PlainProgress
from hvd_autosync.reporting.progress import GuardedProgress, progress_listener
from hvd_autosync.reporting.terminal import TerminalProgress
from hvd_autosync.reporting.widget import WidgetProgress


def test_a_stream_that_is_no_terminal_gets_plain_lines(author: Any) -> None:
    stream = io.StringIO()
    author.play(progress_listener(stream))
    assert "trial 0 (default)" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_the_default_stream_is_standard_error(
    author: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    progress_listener().on_study_start(author.study, resumed=False)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert author.study_id in captured.err


def test_a_terminal_that_cannot_move_its_cursor_gets_plain_lines(
    author: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")

    class Dumb(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Dumb()
    progress_listener(stream).on_study_start(author.study, resumed=False)
    assert stream.getvalue().startswith("hvd-autosync: study")


def test_a_colour_setting_makes_no_terminal_of_a_log(
    author: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    author.play(progress_listener(stream))
    assert "\x1b" not in stream.getvalue()


def test_a_display_that_fails_is_dropped_and_the_tuning_goes_on(author: Any) -> None:
    class Failing(PlainProgress):
        calls = 0

        def on_trial_end(self, study: Any, trial: Any, result: Any) -> None:
            Failing.calls += 1
            raise RuntimeError("no space left")

    stream = io.StringIO()
    author.play(GuardedProgress(Failing(stream), stream))
    assert Failing.calls == 1
    assert stream.getvalue().endswith(
        "hvd-autosync: the progress display failed, tuning continues without it: "
        "RuntimeError: no space left\n"
    )


def test_only_a_widget_that_works_shows_the_result(author: Any) -> None:
    stream = io.StringIO()
    assert not progress_listener(stream).shows_result
    assert not GuardedProgress(TerminalProgress(stream), stream).shows_result
    guarded = GuardedProgress(WidgetProgress(), stream)
    author.play(guarded)
    guarded.close()
    assert guarded.shows_result
    guarded.on_forecast(author.study, object())  # type: ignore[arg-type]
    assert "the progress display failed" in stream.getvalue() and not guarded.shows_result


def test_a_closed_stream_does_not_stop_the_tuning(author: Any) -> None:
    stream = io.StringIO()
    listener = progress_listener(stream)
    stream.close()
    author.play(listener)
    listener.close()


def test_ctrl_c_goes_through(author: Any) -> None:
    class Interrupted(PlainProgress):
        def on_ask_start(self, study: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        author.play(GuardedProgress(Interrupted(io.StringIO()), io.StringIO()))
