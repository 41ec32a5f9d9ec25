from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hvd_autosync.launch.runner import TrialProgress
from hvd_autosync.reporting.progress import progress_listener
from hvd_autosync.reporting.terminal import TerminalProgress, trials_so_far
from hvd_autosync.search_space import Strategy
from hvd_autosync.study.values import Trial

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Terminal:
    """A pseudo-terminal, with all that was written to it."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = os.fdopen(slave, "w")
        self._closing = contextlib.ExitStack()
        self._closing.callback(os.close, self._master)
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the end, once no writer is left
            while part := os.read(self._master, 65536):
                self._parts.append(part)

    def output(self) -> str:
        """Everything that was written; closes the terminal."""
        self.stream.close()
        self._reader.join(120)
        self._closing.close()  # once: the number may be another file's by now
        return b"".join(self._parts).decode()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("LINES", "50")
    opened = Terminal()
    yield opened
    opened.output()


def plain(text: str) -> str:
    """``text`` without what moves the cursor or colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


@pytest.fixture
def played(terminal: Terminal, author: Any) -> str:
    author.play(progress_listener(terminal.stream))
    return terminal.output()


def test_what_runs_and_how_far_it_is(played: str) -> None:
    text = plain(played)
    assert "measuring links, 3 s" in text
    assert "exploring: trial 1 (sobol), 2 of at most 20: buckets=4" in text
    assert "warming up, step 3 of 50" in text
    assert "measuring, step 17 of 50" in text


def test_the_best_so_far_with_its_speedup(played: str) -> None:
    assert re.search(r"best so far 1\.2\dx, 40\.\d ms per step: buckets=4", plain(played))


def test_the_confirmation_is_shown_as_such(played: str) -> None:
    text = plain(played)
    assert "confirming, round 2: trial 8: default" in text
    assert re.search(r"confirmed so far 1\.3\dx \(90 % interval [^)]*, 2 rounds\): ", text)


def test_the_time_left_is_estimated(played: str) -> None:
    assert re.search(r"about \d+ s left", plain(played))


def test_the_summary_stays_at_the_end(played: str) -> None:
    shown_last = plain(played[played.rindex("\x1b[1A") :])
    assert re.search(r"12 trials in \d+ s; all 20 trials were used", shown_last)
    assert "exploring" not in shown_last


def test_the_cursor_comes_back_after_the_end_and_after_ctrl_c(
    terminal: Terminal, author: Any
) -> None:
    with (
        contextlib.suppress(KeyboardInterrupt),
        contextlib.closing(progress_listener(terminal.stream)) as listener,
    ):
        listener.on_study_start(author.study, resumed=False)
        listener.on_trial_start(author.study, Trial(0, "default", Strategy()))
        raise KeyboardInterrupt
    output = terminal.output()
    assert HIDE_CURSOR in output
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)


def test_the_cursor_comes_back_when_nobody_closes_the_display(terminal: Terminal) -> None:
    program = (
        "import sys\n"
        "from types import SimpleNamespace as N\n"
        "from hvd_autosync.reporting.progress import progress_listener\n"
        "study = N(settings=N(trials=20), history=[], study_id='0' * 12)\n"
        "progress_listener().on_study_start(study, resumed=False)\n"
        "sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], stderr=terminal.stream, timeout=280)
    output = terminal.output()
    assert done.returncode == 3
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)


def test_standard_output_is_left_alone(
    terminal: Terminal, author: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    listener = progress_listener(terminal.stream)
    listener.on_study_start(author.study, resumed=False)
    print("the job's own line", flush=True)
    listener.close()
    assert capfd.readouterr().out == "the job's own line\n"
    assert "own line" not in terminal.output()


def test_a_running_trial_is_redrawn_once_a_second_at_most(
    terminal: Terminal, author: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    author.explore()
    display = TerminalProgress(terminal.stream)
    display.on_study_start(author.study, resumed=True)
    trial = Trial(6, "model", Strategy({"cycle_time_ms": 2.0}))
    display.on_trial_start(author.study, trial)
    redraws = []
    monkeypatch.setattr(display._live, "update", lambda *a, **k: redraws.append(a))
    now = time.monotonic()
    for tenth in range(100):
        monkeypatch.setattr(time, "monotonic", lambda at=tenth: now + at / 10)  # type: ignore[misc]
        progress = TrialProgress("measuring", tenth // 2, 50, tenth / 10)
        display.on_trial_progress(author.study, trial, progress)
    display.close()
    assert 9 <= len(redraws) <= 11


def test_the_table_has_the_default_the_best_and_the_last(author: Any) -> None:
    from rich.console import Console

    from hvd_autosync.reporting.tuning_progress import TuningProgress

    author.explore()
    for number in range(8):
        author.trial("model", {"cycle_time_ms": 30.0 + number}, mean_s=0.06)
    standing = TuningProgress()
    standing.start(author.study)
    console = Console(width=120, markup=False)
    with console.capture() as captured:
        console.print(trials_so_far(standing.ended))
    numbers = [int(line.split()[0]) for line in captured.get().splitlines()[1:]]
    assert numbers == [0, 1, 4, 5, 10, 11, 12, 13]


def test_a_second_study_is_drawn_below_the_first_without_its_trials(
    terminal: Terminal, author: Any, new_author: Callable[..., Any]
) -> None:
    display = TerminalProgress(terminal.stream)
    author.play(display)
    second = new_author().study
    display.on_study_start(second, resumed=False)
    display.on_links_progress(second, TrialProgress("measuring", 0, 0, 3.0))
    display.close()
    output = terminal.output()
    between, drawn, after = output[output.rindex("all 20 trials") :].partition("measuring links")
    assert drawn, "at once"
    assert "\x1b[1A" not in between, "the summary of the first study stays"
    assert "sobol" not in plain(after)
