"""Launches that the system refuses."""

import sys
import uuid
from collections.abc import Callable

import pytest

from hvd_autosync.errors import AutosyncError
from hvd_autosync.launch.cold import ColdRunner
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.search_space import Host, Strategy, TrialSpec
from hvd_autosync.training import run_training

JOB = Job(("-np", "1", "--gloo"), (sys.executable, "-c", ""), (Host("localhost", 1),), "gloo")


def trial() -> None:
    ColdRunner(JOB).run(TrialSpec("t", Strategy()), Limits(), lambda progress: None)


@pytest.mark.parametrize("start", [trial, lambda: run_training(JOB, Strategy())])
def test_an_environment_that_is_too_large_is_said(
    start: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LARGE", uuid.uuid4().hex * 5000)
    with pytest.raises(AutosyncError, match="cannot be launched: .*too long") as caught:
        start()
    assert "Unset large variables" in caught.value.hint
