"""Detects code that reads parameters without Python's knowledge.

Code compiled by ``torch.compile`` reads parameters of modules without calling their methods;
modules of ``torch.jit`` hold them in C++.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

#: Reasons, for messages.
COMPILED = "torch.compile compiles code of this script"
_SCRIPTED = "torch.jit makes a module"


def anything_compiled() -> bool:
    """Whether ``torch.compile`` has compiled anything in this process."""
    from torch._dynamo import convert_frame

    return bool(convert_frame.FRAME_COUNTER)


@functools.cache
def before_compiling(call: Callable[[str], None]) -> None:
    """Call ``call`` with the reason, from now on, before code is compiled or a module scripted.

    Args:
        call: May be called several times.
    """
    from torch._dynamo.callback import callback_handler

    # Callbacks registered there would be dropped by torch._dynamo.reset().
    begin = callback_handler.run_start_callbacks
    scripted: Any = vars(torch.jit)["RecursiveScriptModule"]
    script = scripted.__init__

    def begin_compiling(*args: Any) -> None:
        call(COMPILED)
        begin(*args)

    @functools.wraps(script)
    def begin_script(self: Any, *args: Any) -> None:
        call(_SCRIPTED)
        script(self, *args)

    vars(callback_handler)["run_start_callbacks"] = begin_compiling
    scripted.__init__ = begin_script
