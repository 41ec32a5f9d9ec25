"""Where the runtime's own tensors are."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2] / "hvd_autosync" / "runtime"
#: Functions of torch whose tensors are on the default device, unless it is named.
FACTORIES = {"arange", "empty", "full", "linspace", "ones", "rand", "randint", "randn", "randperm"}
FACTORIES |= {"scalar_tensor", "tensor", "zeros"}


@pytest.mark.parametrize("path", sorted(RUNTIME.rglob("*.py")), ids=lambda path: path.stem)
def test_no_tensor_is_where_the_script_wants_its_own(path: Path) -> None:
    """Scripts may call ``torch.set_default_device("cuda")``; Horovod wants splits on the host."""
    unnamed = [
        node.lineno
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and (node.func.value.id, node.func.attr) in {("torch", name) for name in FACTORIES}
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]
    assert unnamed == []
