"""Mailboxes in jobs that end; what they do meanwhile is in ``workers/cases_mail.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.cluster
def test_a_killed_rank_is_named(launch: Callable[..., Any]) -> None:
    job = launch("mail_killed.py")
    assert job.status != 0
    assert "told: rank 1 is gone: its connection broke" in job.output
