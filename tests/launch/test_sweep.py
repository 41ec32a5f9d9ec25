"""Processes of a trial are found, whatever they are called."""

import os
import subprocess
import sys

from hvd_autosync.launch.sweep import processes_of

_CODE = """
import sys
with open("/proc/self/comm", "wb") as name:
    name.write(b"caf\\xe9")
print(flush=True)
sys.stdin.read()
"""


def test_a_process_may_have_any_name() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"HVD_AUTOSYNC_TRIAL_ID": "test-sweep"},
    )
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    assert processes_of("test-sweep") == [process.pid]
    process.communicate()
    assert processes_of("test-sweep") == []
