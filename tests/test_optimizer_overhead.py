"""``benchmarks/optimizer_overhead.py`` measures nothing without other ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import optimizer_overhead


def test_a_single_rank_is_refused_with_the_line_that_starts_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured() -> None:
        pytest.fail("it measures a single rank")

    monkeypatch.setattr(sys, "argv", ["optimizer_overhead.py"])
    monkeypatch.setattr(optimizer_overhead.hvd, "init", lambda: None)
    monkeypatch.setattr(optimizer_overhead.hvd, "size", lambda: 1)
    monkeypatch.setattr(optimizer_overhead, "start_measuring", measured)
    with pytest.raises(SystemExit, match="2"):
        optimizer_overhead.main()
    assert f"run it as {optimizer_overhead.USAGE}" in capsys.readouterr().err
