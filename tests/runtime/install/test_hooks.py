"""The way into a worker, each in a fresh interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest

INSTALL = """
import sys
from hvd_autosync.runtime.install.hooks import install
from hvd_autosync.search_space import Strategy, TrialSpec
def start(measured_steps=10, **strategy):
    install(TrialSpec("t", Strategy(strategy), measured_steps=measured_steps))
"""


def test_installing_imports_no_framework(run_python: Callable[[str], str]) -> None:
    code = INSTALL + "start(); print('torch' in sys.modules, 'horovod' in sys.modules)"
    assert run_python(code).split() == ["False", "False"]


def test_package_is_light_and_names_its_contents(run_python: Callable[[str], str]) -> None:
    code = (
        "import sys, hvd_autosync.runtime as runtime\n"
        "runtime.mark_step()\n"
        "print('torch' in sys.modules, hasattr(runtime, 'nothing'))\n"
        "print(all(getattr(runtime, name) for name in runtime.__all__))"
    )
    assert run_python(code).split() == ["False", "False", "True"]


def test_a_trial_is_known_from_the_real_training(run_python: Callable[[str], str]) -> None:
    code = INSTALL + "import hvd_autosync\nprint(hvd_autosync.in_trial())\n"
    code += "start()\nprint(hvd_autosync.in_trial())\nstart(0)\nprint(hvd_autosync.in_trial())"
    assert run_python(code).split() == ["False", "True", "False"]


@pytest.mark.parametrize(
    "statement",
    [
        "import horovod.torch as hvd",
        "from horovod import torch as hvd",
        "from horovod.torch import optimizer as hvd",
        "import importlib; hvd = importlib.import_module('horovod.torch')",
        "import horovod.torch as hvd; import importlib; hvd = importlib.reload(hvd)",
    ],
)
def test_every_import_gets_our_optimizer(run_python: Callable[[str], str], statement: str) -> None:
    code = INSTALL + f"start()\n{statement}\nfrom hvd_autosync.runtime import DistributedOptimizer"
    code += "\nprint(hvd.DistributedOptimizer is DistributedOptimizer)"
    assert run_python(code).split() == ["True"]


LIVE = """
import os, subprocess
os.environ |= {"HVD_AUTOSYNC_LIVE": "1", "HOROVOD_RANK": "0"}
from hvd_autosync.runtime.install.hooks import install_live
install_live()
run = subprocess.Popen
subprocess.Popen = lambda words, **given: run(["true"], **given)
"""


@pytest.mark.parametrize("begin", [INSTALL + "start()\n", LIVE], ids=["a trial", "live"])
def test_our_module_may_be_the_first_that_imports_horovod(
    run_python: Callable[[str], str], begin: str
) -> None:
    """What acts at that import imports modules of ours in its turn."""
    code = begin + "import hvd_autosync.torch as hvd\nprint(hvd.DistributedOptimizer.__module__)"
    assert run_python(code).split()[0] == "hvd_autosync.torch"


def test_modules_of_horovods_are_not_there_twice(run_python: Callable[[str], str]) -> None:
    code = "import hvd_autosync.torch as hvd\nprint(hasattr(hvd, '__path__'), hvd.mpi_ops.__name__)"
    assert run_python(code).split() == ["False", "horovod.torch.mpi_ops"]


def test_horovod_that_was_imported_before(run_python: Callable[[str], str]) -> None:
    code = "import horovod.torch as hvd\n" + INSTALL + "start()\n"
    code += "print(hvd.DistributedOptimizer.__code__.co_filename)"
    assert run_python(code).strip().endswith("runtime/optimizer/optimizer.py")


def test_finding_without_importing_changes_nothing(run_python: Callable[[str], str]) -> None:
    code = INSTALL + "start()\nimport importlib.util\n"
    code += "print(importlib.util.find_spec('horovod.torch').name, 'horovod.torch' in sys.modules)"
    assert run_python(code).split() == ["horovod.torch", "False"]


def test_training_without_a_plan_is_untouched(run_python: Callable[[str], str]) -> None:
    code = INSTALL + "before = list(sys.meta_path); start(0, cycle_time_ms=5.0)\n"
    code += "print(sys.meta_path == before)"
    assert run_python(code).split() == ["True"]


def test_training_with_a_plan_measures_nothing(run_python: Callable[[str], str]) -> None:
    code = INSTALL + (
        "start(0, buckets=4)\n"
        "import torch; backward = torch.autograd.backward\n"
        "import horovod.torch as hvd\n"
        "from hvd_autosync.runtime import DistributedOptimizer, current\n"
        "plan = current.sync_plan.exchange\n"
        "print(hvd.DistributedOptimizer is DistributedOptimizer, plan.buckets)\n"
        "print(current.run is None and torch.autograd.backward is backward)\n"
    )
    assert run_python(code).splitlines() == ["True 4", "True"]


@pytest.mark.parametrize(("text", "on"), [("1", True), ("off", False), ("False", False)])
def test_live_tuning_is_a_switch(run_python: Callable[[str], str], text: str, on: bool) -> None:
    code = (
        "import os, sys\n"
        f"os.environ |= {{'HVD_AUTOSYNC_LIVE': {text!r}, 'HOROVOD_RANK': '0'}}\n"
        "from hvd_autosync.runtime.install import hooks\n"
        "hooks.install_live = lambda: print('live')\n"
        "import hvd_autosync.bootstrap\n"
        "from hvd_autosync.runtime.install import live_activation\n"
        "live_activation.Helper.start = lambda folder: print('helper')\n"
        "live_activation.activate_live('')\n"
    )
    assert run_python(code).split() == (["live", "helper"] if on else [])


def test_an_unknown_level_of_the_log_starts_no_helper(run_python: Callable[[str], str]) -> None:
    """The other ranks go on as where the helper cannot be started."""
    code = (
        "import os, sys\n"
        "sys.stderr = sys.stdout\n"
        "os.environ |= {'HVD_AUTOSYNC_LIVE': '1', 'HOROVOD_RANK': '0', 'HVD_AUTOSYNC_LOG': 'x'}\n"
        "from hvd_autosync.runtime.install import live_activation\n"
        "live_activation.Helper.start = lambda folder: print('helper')\n"
        "live_activation.activate_live('')\n"
    )
    assert run_python(code).splitlines() == [
        "hvd-autosync: this training is not tuned, as the process that tunes cannot be started: "
        "HVD_AUTOSYNC_LOG is 'x'; the levels are debug, info, warning"
    ]


@pytest.mark.parametrize("of_the_flag", ["", "/usr"])
def test_the_process_that_tunes_works_where_the_job_was_started(
    run_python: Callable[[str], str], of_the_flag: str
) -> None:
    code = (
        "import os, subprocess\n"
        "os.chdir('/tmp')\n"
        "os.environ |= {'HVD_AUTOSYNC_LIVE': '1', 'HOROVOD_RANK': '0'}\n"
        f"os.environ |= {{'HVD_AUTOSYNC_FOLDER': {of_the_flag!r}}} if {of_the_flag!r} else {{}}\n"
        "from hvd_autosync.runtime.install.hooks import install_live\n"
        "install_live()\n"
        "os.chdir('/')\n"
        "run = subprocess.Popen\n"
        "def ended(words, **given):\n"
        "    print(given['cwd'])\n"
        "    return run(['true'], **given)\n"
        "subprocess.Popen = ended\n"
        "import horovod.torch\n"
    )
    assert run_python(code).split() == [of_the_flag or "/tmp"]


def test_start_loads_no_driver(run_python: Callable[[str], str]) -> None:
    code = (
        "import sys, torch, horovod.torch\n" + INSTALL + "start()\n"
        "heavy = {'botorch', 'gpytorch', 'pandas', 'sqlalchemy', 'rich', 'typer'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert run_python(code).strip() == "[]"
