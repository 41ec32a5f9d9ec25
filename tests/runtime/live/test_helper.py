"""The helper process: how it is started, and where it cannot be."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hvd_autosync.runtime.live import helper as helper_module
from hvd_autosync.runtime.live.helper import Helper


def test_without_a_thread_there_is_no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Recorded(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **keywords: Any) -> None:
            super().__init__(*args, **keywords)
            started.append(self)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match="can't start new thread"):
        Helper.start("")
    (process,) = started
    assert process.returncode, "it has been ended"


@pytest.fixture
def one_core() -> Iterator[None]:
    """This process has one core, as a rank that its launcher has bound."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """The process of a helper that waits for the training."""
    monkeypatch.setattr(helper_module, "run_main", lambda _: ["cat"])
    started = Helper.start("")
    yield started._process
    started.close()


def test_where_memory_is_short_the_helper_ends_and_no_rank(helper: subprocess.Popen[bytes]) -> None:
    assert Path(f"/proc/{helper.pid}/oom_score_adj").read_text() == "1000\n"


@pytest.mark.skipif(len(os.sched_getaffinity(os.getppid())) < 2, reason="it needs two cores")
def test_the_helper_runs_where_the_launcher_may(
    one_core: None, helper: subprocess.Popen[bytes]
) -> None:
    """And takes a rank that is bound to a core no time."""
    assert os.sched_getaffinity(helper.pid) == os.sched_getaffinity(os.getppid())
