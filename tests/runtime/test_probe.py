from __future__ import annotations

import numpy as np
import pytest

from hvd_autosync.runtime.probe import fit_link

SIZES = [2**12, 2**15, 2**18, 2**20, 2**23]


@pytest.mark.parametrize("latency_s, bandwidth", [(1e-3, 1e9), (2e-5, 1e10), (5e-2, 1e7)])
def test_exact_times_give_the_link(latency_s: float, bandwidth: float) -> None:
    link = fit_link(2, {size: latency_s + size / bandwidth for size in SIZES})
    assert link.latency_s == pytest.approx(latency_s)
    assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth)


@pytest.mark.parametrize("seed", range(10))
def test_noise_moves_both_a_little(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(1, 0.05, len(SIZES))
    link = fit_link(2, {s: (1e-3 + s / 1e9) * e for s, e in zip(SIZES, noise, strict=True)})
    assert link.latency_s == pytest.approx(1e-3, rel=0.25)
    assert link.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.25)


def test_times_that_fit_no_link() -> None:
    falling = fit_link(2, {4096: 2e-3, 32768: 1e-3})
    assert 0 <= falling.latency_s <= 1e-3
    assert falling.bandwidth_bytes_per_s == pytest.approx(32768 / 2e-3)
    steep = fit_link(2, {4096: 1e-6, 8192: 1e-3, 16384: 1e-1})
    assert steep.latency_s == 0
    assert steep.bandwidth_bytes_per_s > 0
