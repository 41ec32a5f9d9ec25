"""What is compiled is known before it is."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import torch
from hvd_autosync.runtime.exchange.compiling import anything_compiled, before_compiling

called = []
before_compiling(called.append)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
assert not called and not anything_compiled()
torch._dynamo.reset()  # forgets what is registered
compiled = torch.compile(model, backend="eager")
assert not called
compiled(torch.ones(1, 2))
assert called and "torch.compile" in called[0] and anything_compiled()
called.clear()
torch.jit.trace(model, torch.ones(1, 2))
assert called and "torch.jit" in called[0]
"""


def test_compilers_are_noticed() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
