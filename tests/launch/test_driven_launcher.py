"""A launcher that our driver has started."""

from __future__ import annotations

import os
import subprocess
import sys

_INTERFACES = """
from types import SimpleNamespace
from horovod.runner import launch
from hvd_autosync.launch.driven_launcher import order_interfaces

def found(settings, hosts, remote_hosts=None, fn_cache=None):
    return {"ib0", "eth0", "eth1"} if hosts else None  # nothing under LSF

launch.driver_service.get_common_interfaces = found
order_interfaces()
print(launch.driver_service.get_common_interfaces(None, ["a"], fn_cache=None))
print(launch.driver_service.get_common_interfaces(None, []))
"""


_OUTPUT = """
from horovod.runner.common.util import safe_shell_exec
from hvd_autosync.launch.driven_launcher import pass_on_all_bytes

pass_on_all_bytes()
script = r"printf 'r\\351ussi\\n'; printf '\\303\\251t\\303\\251\\n'"
safe_shell_exec.execute(script, index=0)
"""


def test_a_byte_that_is_no_text_does_not_end_the_output_of_its_rank() -> None:
    shown = subprocess.run(
        [sys.executable, "-c", _OUTPUT],
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    assert shown.stdout.splitlines() == ["[0]<stdout>:r\ufffdussi", "[0]<stdout>:\xe9t\xe9"]


def test_the_interfaces_have_one_order_in_all_processes() -> None:
    for seed in ("1", "2", "3"):
        shown = subprocess.run(
            [sys.executable, "-c", _INTERFACES],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown.stdout.splitlines() == ["['eth0', 'eth1', 'ib0']", "[]"]
