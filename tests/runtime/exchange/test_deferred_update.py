"""What deferred updates do at the end of a job; the rest is in ``cases_deferred_updates.py``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.cluster
@pytest.mark.slow
def test_a_script_that_shuts_horovod_down_loses_no_step(launch: Callable[..., Any]) -> None:
    """``hvd.shutdown()`` drops all operations before it ends Horovod."""
    job = launch("deferred_shutdown.py", measured_steps=1000)
    assert job.status == 0, job.output
