"""The driver of a training that a notebook has started."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("horovod", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.commands import live_driver
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.training import RunOutcome
from hvd_autosync.launch.command import launcher_environment
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import Host, Strategy
from hvd_autosync.util.packed_text import pack
from hvd_autosync.util.variables import JOB_VARIABLE

JOB = Job(("-np", "2"), ("python", "train.py"), (Host("192.0.2.1", 2),))


@pytest.mark.parametrize("tuned", [True, False])
def test_ranks_get_no_option_that_they_do_not_need(
    tuned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address of a store may have a password, and Horovod shows variables of ranks."""
    started: list[tuple[str, Options, dict[str, str]]] = []

    def launched(job: Job, options: Options) -> int:
        started.append(("launched", options, launcher_environment(Strategy())))
        return 7

    def live(job: Job, options: Options, *, may_refuse: bool, folder: Path) -> RunOutcome:
        assert may_refuse and folder == tmp_path
        started.append(("live", options, launcher_environment(Strategy())))
        return RunOutcome(7)

    monkeypatch.setattr(live_driver, "tune_and_train", launched)
    monkeypatch.setattr(live_driver, "train_live", live)
    given: dict[str, Any] = {"STORE": "postgresql://u:secret@db/x", "TRIALS": "9", "SPACE": ""}
    for name, value in given.items():
        monkeypatch.setenv(f"HVD_AUTOSYNC_{name}", value)
    monkeypatch.setenv("HVD_AUTOSYNC_LOG", "error")
    monkeypatch.setenv(JOB_VARIABLE, pack(json.dumps(JOB.to_json())))
    assert live_driver._train(tmp_path, tuned=tuned) == 7
    ((how, options, environment),) = started
    assert how == options.mode == ("launched" if tuned else "live")
    assert options.reuse == ("only" if tuned else "auto"), "also where rank 0 is on another host"
    assert (options.store, options.trials) == (given["STORE"], 9)
    left = {name for name in environment if name.startswith("HVD_AUTOSYNC_")}
    assert left == {"HVD_AUTOSYNC_LOG"} and "secret" not in str(dict(os.environ))
