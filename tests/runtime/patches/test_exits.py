"""Where a script ends by itself, in fresh interpreters."""

from __future__ import annotations

from collections.abc import Callable

import pytest

WATCH = """
import os, sys
from hvd_autosync.runtime.patches.exits import call_at_exit
call_at_exit(lambda: print("ends", flush=True))
"""


@pytest.mark.parametrize(
    ("ending", "said"), [("pass", ["ends"]), ("sys.exit()", ["ends"]), ("os._exit(0)", ["ends"])]
)
def test_a_script_that_ends_by_itself(
    ending: str, said: list[str], run_python: Callable[[str], str]
) -> None:
    assert run_python(f"{WATCH}{ending}").split() == said


def test_a_status_says_that_it_has_failed(run_python: Callable[[str], str]) -> None:
    code = f"{WATCH}pid = os.fork()\nif not pid: os._exit(3)\n"
    code += "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\nos._exit(0)"
    assert run_python(code).split() == ["3", "ends"]


def test_what_fails_at_the_end_keeps_no_process(run_python: Callable[[str], str]) -> None:
    code = "import os\nfrom hvd_autosync.runtime.patches.exits import call_at_exit\n"
    assert run_python(f"{code}call_at_exit(lambda: 1 / 0)\nos._exit(0)") == ""
