"""How long a job may be without Horovod while that is initialized again."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime.collectives.reinitialize import _limit_s, _Report


@pytest.mark.parametrize(
    ("init_s", "limit_s"), [((0.5, 300.0), 20.0), ((40.0, 45.0, 300.0), 120.0), ((0.0,), 20.0)]
)
def test_many_ranks_have_longer(init_s: tuple[float, ...], limit_s: float) -> None:
    assert _limit_s([_Report("", "", [], {}, each) for each in init_s]) == limit_s
