"""Message endpoints in jobs that end; ``workers/cases_messages.py`` has the other cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.cluster
def test_a_killed_rank_is_named(launch: Callable[..., Any]) -> None:
    job = launch("messages_killed.py")
    assert job.status != 0
    assert "raised: rank 1 is gone: its connection broke" in job.output
