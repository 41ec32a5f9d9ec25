"""The helper process where it cannot be started."""

from __future__ import annotations

import subprocess
import threading
from typing import Any

import pytest

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
