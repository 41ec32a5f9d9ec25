"""Detects code that reads parameters without Python's knowledge.

Code compiled by ``torch.compile`` reads parameters of modules without calling their methods;
modules of ``torch.jit`` hold them in C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hvd_autosync.util import patches

#: Reasons, for messages.
COMPILED = "torch.compile compiles code of this script"
_SCRIPTED = "torch.jit makes a module"


def anything_compiled() -> bool:
    """Return whether ``torch.compile`` has compiled anything in this process."""
    from torch._dynamo import convert_frame

    return bool(convert_frame.FRAME_COUNTER)


def before_compiling(call: Callable[[str], None]) -> None:
    """Call ``call`` with the reason, from now on, before code is compiled or a module scripted.

    One ``call`` in a process; callbacks that torch registers itself would be dropped by
    ``torch._dynamo.reset()``.

    Args:
        call: May be called several times.
    """

    def calling(begin: Callable[..., None], why: str) -> Callable[..., None]:
        @functools.wraps(begin)
        def call_first(*args: Any) -> None:
            call(why)
            begin(*args)

        return call_first

    patches.install(
        "compilers", lambda begin: calling(begin, COMPILED), lambda make: calling(make, _SCRIPTED)
    )
