"""``--autosync-mode live``: what is said of a training that has ended."""

from __future__ import annotations

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.commands import live_train
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.training import RunOutcome
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host

JOB = Job(("-np", "2"), ("true",), (Host("localhost", 2),))


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (RunOutcome(0, begun=False), True),
        (RunOutcome(0), False),
        (RunOutcome(1, begun=False, stopped=True), False),
    ],
)
def test_a_job_without_horovods_torch_is_told_so(
    ended: RunOutcome,
    told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(live_train, "run_live_training", lambda *_, **__: ended)
    assert live_train.train_live(JOB, Options(mode="live")) is ended
    assert ("rank 0 did not import horovod.torch" in capsys.readouterr().err) is told
