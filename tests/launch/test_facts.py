"""What a driver knows of Horovod is not found out again by the launchers that it starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hvd_autosync.launch import facts
from hvd_autosync.launch.command import launch
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import HorovodBuild, Host, Strategy
from hvd_autosync.util.variables import CONTROLLERS_VARIABLE

#: As the script ``horovodrun`` does: which controllers a launcher has to look for.
LAUNCHER = f"""
import os
from horovod.common import util
from horovod.runner import launch
looked = []
util._check_extension_lambda = lambda name, *_: looked.append(name) or True
found = [launch.gloo_built(verbose=False), launch.mpi_built()]
print(found, len(looked), "{CONTROLLERS_VARIABLE}" in os.environ)
"""


@pytest.mark.parametrize(
    ("known", "ours", "looks"), [("gloo mpi", True, 0), ("gloo", True, 1), ("gloo mpi", False, 2)]
)
def test_a_launcher_looks_only_for_what_its_driver_does_not_know(
    known: str, ours: bool, looks: int
) -> None:
    variables = {CONTROLLERS_VARIABLE: known}
    if ours:
        variables["HVD_AUTOSYNC_DRIVER"] = str(os.getpid())
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, "horovodrun"],
        env=os.environ | variables,
        text=True,
        capture_output=True,
    )
    assert done.stdout == f"[True, True] {looks} False\n", done.stderr


@pytest.mark.parametrize(("asked", "told"), [(False, None), (True, "gloo")])
def test_a_driver_tells_what_it_has_found(
    monkeypatch: pytest.MonkeyPatch, asked: bool, told: str | None
) -> None:
    @facts.cache
    def build() -> HorovodBuild:
        return HorovodBuild("0.28.1", gloo=True, mpi=False, nccl=False)

    monkeypatch.setattr(facts, "horovod_build", build)
    if asked:
        build()
    code = f"import os; print(os.environ.get('{CONTROLLERS_VARIABLE}'))"
    monkeypatch.setattr(
        "hvd_autosync.launch.command.launcher_command", lambda *_: [sys.executable, "-c", code]
    )
    job = Job((), ("true",), (Host("localhost", 2),), "gloo")
    started = launch(job, Strategy(), os.environ, stdout=subprocess.PIPE)
    assert started.communicate()[0].decode().strip() == str(told)
