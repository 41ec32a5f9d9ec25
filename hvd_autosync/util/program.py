"""How our own processes are started: none of them imports from the working directory.

``python -m`` and ``python -c`` put that directory first on ``sys.path``. What lies there is the
user's, or whoever's may write there: a ``selectors.py`` would run instead of the library's.
"""

from __future__ import annotations

import sys

#: Only where nobody asked for it does the first entry stand for the working directory: ``-P`` and
#: ``-I`` leave it out, and what PYTHONPATH names is absolute by now.
_LEAVE_OUT = "import sys; sys.path[:1] == [''] and sys.path.pop(0)"


def run_code(code: str, *arguments: str) -> list[str]:
    """The command of a Python that runs ``code``, one line, without the working directory."""
    return [sys.executable, "-c", f"{_LEAVE_OUT}; {code}", *arguments]


def run_main(module: str, *arguments: str) -> list[str]:
    """The command of a Python that calls ``main()`` of one of our modules."""
    return run_code(f"from {module} import main; main()", *arguments)
