"""What decides about the bits of a product."""

from __future__ import annotations

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


def test_so_are_other_threads() -> None:
    """A sum of several threads is one in another order."""
    before, threads = arithmetic(CPU), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert arithmetic(CPU) != before
    finally:
        torch.set_num_threads(threads)
