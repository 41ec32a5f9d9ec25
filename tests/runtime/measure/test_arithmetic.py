"""What decides about the bits of a product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hvd_autosync.runtime.measure.arithmetic import arithmetic

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("MKL_CBWR", "COMPATIBLE"), ("ONEDNN_MAX_CPU_ISA", "AVX2"), ("DNNL_MAX_CPU_ISA", "AVX2")],
)
def test_a_library_that_was_told_to_multiply_otherwise_is_another(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.delenv(variable, raising=False)
    before = arithmetic(CPU)
    assert arithmetic(CPU) == before
    monkeypatch.setenv(variable, value)
    assert arithmetic(CPU) != before


#: In a process of its own: what a script has set stays.
_PRECISIONS = """
import torch
from hvd_autosync.runtime.measure.arithmetic import arithmetic
found = [arithmetic(torch.device("cpu"))]
for each in (torch.backends.mkldnn.matmul, torch.backends.cuda.matmul, torch.backends):
    each.fp32_precision = "tf32"
    found.append(arithmetic(torch.device("cpu")))
print(len({tuple(each) for each in found}))
"""


@pytest.mark.skipif(
    not hasattr(torch.backends, "fp32_precision"), reason="this torch has one precision for all"
)
def test_a_precision_of_products_counts(run_python: Callable[[str], str]) -> None:
    """Torch's getter for all backends raises where a script has set that of one."""
    assert run_python(_PRECISIONS) == "4\n"


def test_so_are_other_threads() -> None:
    """A sum of several threads is one in another order."""
    before, threads = arithmetic(CPU), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert arithmetic(CPU) != before
    finally:
        torch.set_num_threads(threads)
