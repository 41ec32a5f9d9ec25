"""The Stop button of the widget, without its page (``tests/test_jupyterlab.py`` has that)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from hvd_autosync.engine.options import Options
from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.reporting.widget import StopRequested, WidgetProgress
from hvd_autosync.search_space import Strategy
from hvd_autosync.study.values import Conclusion, Trial
from hvd_autosync.traces import StudyRecord

PROGRESS = TrialProgress("measuring", 0, 0, 3.0)


@pytest.mark.parametrize("during", ["links", "ask", "trial"])
def test_stop_takes_effect_in_every_phase(
    during: str, author: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {
        "links": lambda: widget.on_links_progress(author.study, PROGRESS),
        "ask": lambda: widget.on_ask_start(author.study),
        "trial": lambda: widget.on_trial_progress(author.study, trial, PROGRESS),
    }
    trial, widget = Trial(0, "default", Strategy()), WidgetProgress()
    widget.on_study_start(author.study, resumed=False)
    widget.on_trial_start(author.study, trial)
    calls[during]()
    widget._stop.click()
    later = time.monotonic() + 60  # it is not drawn at every call
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(StopRequested) as raised:
        calls[during]()
    assert raised.value.study_id == author.study_id
    widget.close()
    assert widget._stop.disabled and "again to resume" in widget._activity.value


def test_stop_of_a_live_tuning_leaves_the_training(author: Any) -> None:
    study, widget = author.study, WidgetProgress()
    study.settings = replace(study.settings, mode="live")
    widget.on_study_start(study, resumed=False)
    widget._stop.click()
    with pytest.raises(StopRequested):
        widget.on_ask_start(study)
    widget.close()
    said = "stopped; the training goes on; to resume tuning: study.training.stop(), then the same "
    assert widget._activity.value == f"{said}call"


def test_stop_takes_effect_before_a_study_begins() -> None:
    widget = WidgetProgress()
    widget.on_wait(3.0)
    assert widget._activity.value == "the training starts, 3 s"
    widget._stop.click()
    with pytest.raises(StopRequested) as raised:
        widget.on_wait(3.5)
    assert raised.value.study_id == ""
    widget.close()
    assert widget._activity.value == "stopped; run the same call again to resume tuning"


def test_the_end_leaves_no_remaining_time(author: Any) -> None:
    widget = WidgetProgress()
    author.play(widget)
    assert widget._bar.bar_style == "success"
    assert author.study_id in widget._head.value and "left" not in widget._head.value


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "stopped; run the same call again to resume tuning"),
        (RuntimeError(), "ended before its result"),
    ],
)
def test_an_interrupt_or_an_error_leaves_no_running_trial(
    error: BaseException, said: str, author: Any
) -> None:
    widget = WidgetProgress()
    widget.on_study_start(author.study, resumed=False)
    author.listener = widget
    author.trial("default", {})
    widget.on_ask_start(author.study)
    assert "left" in widget._head.value
    with pytest.raises(type(error)), closing(widget):
        raise error
    assert widget._activity.value == said and "left" not in widget._head.value
    assert widget._bar.bar_style == "warning"


def test_a_live_tuning_that_was_interrupted_says_that_the_training_goes_on(author: Any) -> None:
    """Its end is no error: the interrupt has had its effect."""
    with closing(WidgetProgress()) as widget:
        widget.on_study_start(author.study, resumed=False)
        widget._mode = "live"
    assert widget._activity.value.startswith("stopped; the training goes on")


def test_a_study_that_is_reused_shows_nothing() -> None:
    widget = WidgetProgress()
    widget.close()
    assert not widget._activity.value


def test_measuring_links_is_shown(author: Any) -> None:
    widget = WidgetProgress()
    widget.on_study_start(author.study, resumed=False)
    widget.on_links_progress(author.study, PROGRESS)
    assert widget._activity.value == "measuring links, 3 s"


def test_stop_after_the_last_trial_leaves_the_result(author: Any, finished: StudyRecord) -> None:
    conclusion, widget = Conclusion.of(finished), WidgetProgress()
    assert conclusion is not None
    widget.on_study_start(author.study, resumed=False)
    widget._stop.click()
    widget.on_study_end(author.study, conclusion)
    shown = widget._activity.value
    widget.close()
    assert widget._activity.value == shown and conclusion.stopped in shown
    assert widget._bar.bar_style == "success"
    assert widget._stop.disabled and widget._stop.description == "Stop"


def test_a_second_study_shows_nothing_of_the_first(
    author: Any, new_author: Callable[..., Any]
) -> None:
    widget = WidgetProgress()
    author.play(widget)
    shown = (widget._bar, widget._activity, widget._best, widget._trials)
    assert all(part.value for part in shown) and widget._bar.bar_style == "success"
    second = new_author().study
    widget.on_study_start(second, resumed=False)
    assert not any(part.value for part in shown) and not widget._bar.bar_style
    widget.on_links_progress(second, PROGRESS)
    assert widget._activity.value == "measuring links, 3 s", "at once"
    widget._stop.click()
    with pytest.raises(StopRequested):
        widget.on_ask_start(second)
    widget.close()
    assert widget._activity.value == "stopped; run the same call again to resume tuning"


@pytest.mark.parametrize("mode", ["launched", "live"])
def test_where_nothing_is_resumed_stop_does_not_promise_it(mode: str, author: Any) -> None:
    study, widget = author.study, WidgetProgress(Options(reuse="never").again)
    study.settings = replace(study.settings, mode=mode)
    widget.on_study_start(study, resumed=False)
    widget._stop.click()
    widget.close()
    said = widget._activity.value
    assert "to tune from scratch" in said and "resume" not in said
