from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvd_autosync import traces

_ROOT = Path(__file__).parents[2]


def test_every_public_name_is_there() -> None:
    for name in traces.__all__:
        assert getattr(traces, name).__module__.startswith("hvd_autosync.traces.")
    with pytest.raises(AttributeError, match="no_such_name"):
        traces.no_such_name  # noqa: B018


def test_traces_do_not_load_heavy_libraries() -> None:
    script = (
        "import sys, hvd_autosync.traces as t; t.TraceStore('sqlite://');"
        "print([m for m in ('pandas', 'torch', 'botorch') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
