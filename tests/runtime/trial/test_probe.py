from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_autosync.runtime.trial import probe
from hvd_autosync.runtime.trial.probe import fit_link

SIZES = [2**12, 2**15, 2**18, 2**20, 2**23]


@pytest.mark.parametrize("latency_s, bandwidth", [(1e-3, 1e9), (2e-5, 1e10), (5e-2, 1e7)])
def test_exact_times_give_the_link(latency_s: float, bandwidth: float) -> None:
    link = fit_link(2, {size: latency_s + size / bandwidth for size in SIZES})
    assert link.latency_s == pytest.approx(latency_s)
    assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth)


def test_sizes_between_the_ends_do_not_turn_the_line() -> None:
    times = {size: 1e-3 + size / 1e7 for size in SIZES}
    times[2**15] *= 0.5
    times[2**20] *= 1.5
    link = fit_link(2, times)
    assert link.latency_s == pytest.approx(1e-3)
    assert link.bandwidth_bytes_per_s == pytest.approx(1e7)


def test_times_that_fit_no_link() -> None:
    falling = fit_link(2, {4096: 2e-3, 32768: 1e-3})
    assert falling.bandwidth_bytes_per_s == pytest.approx(32768 / 1e-3)
    assert 0 <= falling.latency_s <= 2e-3
    steep = fit_link(2, {4096: 1e-6, 8192: 1e-3, 16384: 1e-1})
    assert steep.latency_s == 0
    assert steep.bandwidth_bytes_per_s > 0


def test_a_disturbed_largest_message_does_not_slow_the_link() -> None:
    times = {size: 1e-3 + size / 1e7 for size in SIZES}
    times[SIZES[-1]] *= 1.5
    assert fit_link(2, times).bandwidth_bytes_per_s == pytest.approx(1e7, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_messages_have_their_size_whatever_type_is_the_default(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: set[int] = set()

    def reduce(buffer: torch.Tensor, _: Any) -> float:
        sent.add(count_bytes := buffer.numel() * buffer.element_size())
        return 1e-3 + 1e-9 * count_bytes

    monkeypatch.setattr(probe, "_reduce", reduce)
    monkeypatch.setattr(probe, "_most", lambda value, _: value)
    default = torch.zeros(0).dtype
    torch.set_default_dtype(dtype)
    try:
        probe.measure_link(torch.device("cpu"), SimpleNamespace(size=lambda: 2))  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(default)
    assert sent == set(probe._SIZES)
