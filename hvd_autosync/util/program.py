"""Commands of hvd_autosync's own processes, which do not import from the working directory.

``python -m`` and ``python -c`` put that directory first on ``sys.path``. A file there, such as a
``selectors.py``, would then run instead of the standard library's, whoever has written it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: Removes the entry that Python adds for the working directory. It is "": with ``-P`` and ``-I``
#: there is none, and entries of PYTHONPATH are absolute by then.
_LEAVE_OUT = "import sys; sys.path[:1] == [''] and sys.path.pop(0)"


def search_path() -> str:
    """Return PATH with this interpreter's folder, so that no environment must be activated."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def run_code(code: str, *arguments: str) -> list[str]:
    """Return the command that runs ``code``, one line, without the working directory."""
    return [sys.executable, "-c", f"{_LEAVE_OUT}; {code}", *arguments]


def run_main(module: str, *arguments: str) -> list[str]:
    """Return the command that calls ``main()`` of a module of hvd_autosync."""
    return run_code(f"from {module} import main; main()", *arguments)
