"""The guard's band: what it remembers of a training, however long that is."""

from __future__ import annotations

import math
import pickle
import random
import statistics

import pytest

from hvd_autosync.runtime.guard import Band


def _of_all(means: list[float], mean: float) -> bool:
    """The rule of the class's docstring, over all means of former windows."""
    if len(means) < 4:
        return True
    changes = [b - a for a, b in zip(means, means[1:], strict=False)]
    noise = math.sqrt(statistics.fmean(change**2 for change in changes) / 2)
    beginning = max(means[:4])
    return mean <= beginning + max(6 * noise, 0.1 * abs(beginning))


@pytest.mark.parametrize("spread", [0.05, 0.5])
def test_a_band_judges_by_all_windows_so_far(spread: float) -> None:
    dice = random.Random(1)
    band, means, verdicts = Band(), [], set()
    for window in range(500):
        mean = dice.gauss(2.0, spread) + (dice.random() < 0.02) * 10 * spread
        expected = _of_all(means, mean)
        assert band.holds(mean, window) is expected, f"{mean} in window {window}"
        verdicts.add(expected)
        if expected:
            means.append(mean)
    assert verdicts == {True, False}


def test_a_band_does_not_grow_with_the_training() -> None:
    band = Band()
    sizes = []
    for _ in range(2):
        for window in range(5000):
            assert band.holds(2.0 + 0.01 * (window % 2), window)
            assert band.bears(2.0, 2.0)
        sizes.append(len(pickle.dumps(band)))
    assert sizes[1] - sizes[0] < 16, f"a band of {sizes} bytes after 5,000 and 10,000 windows"
