from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest

from hvd_autosync.cost import Coefficients, CostModel, calibrate
from hvd_autosync.search_space import ModelProfile, Resources

STRATEGIES = [
    {
        "cycle_time_ms": cycle,
        "buckets": buckets,
        "embedding_exchange": exchange,
        "fusion_threshold_bytes": fusion,
        "large_codec": codec,
    }
    for cycle in (0.2, 20.0)
    for buckets in (0, 3)
    for exchange in ("allreduce", "rows")
    for fusion in (0, 1 << 26)
    for codec in ("none", "int8")
]


def test_it_finds_what_made_the_times(model: ModelProfile, slow_network: Resources) -> None:
    cost = CostModel(model, slow_network)
    true = Coefficients(latency=0.8, byte=-0.2, host=0.5, compute=0.3, rest=0.4)
    noise = np.exp(0.02 * np.random.default_rng(1).standard_normal(len(STRATEGIES)))
    found = calibrate(cost, STRATEGIES, cost.predict(STRATEGIES, true) * noise)
    assert 0.02 < found.misfit < 0.05
    predicted = cost.predict(STRATEGIES, found.coefficients)
    assert predicted == pytest.approx(cost.predict(STRATEGIES, true), rel=0.05)
    assert found.coefficients.byte == pytest.approx(true.byte, abs=0.05)


def test_without_trials_the_posterior_is_the_prior(
    model: ModelProfile, slow_network: Resources
) -> None:
    found = calibrate(CostModel(model, slow_network), [], [])
    assert found.coefficients == Coefficients()
    assert np.std([d.rest for d in found.draws(500, 0)]) == pytest.approx(1.0, rel=0.1)


def test_one_trial_narrows_what_it_tells(model: ModelProfile, slow_network: Resources) -> None:
    cost = CostModel(model, slow_network)
    before, after = calibrate(cost, [], []), calibrate(cost, [{}], cost.predict([{}]))
    assert after.covariance[1, 1] < 0.5 * before.covariance[1, 1]
    assert astuple(after.coefficients) == pytest.approx([0.0] * 6, abs=1e-6)
    assert after.misfit > 0.08  # one trial that six factors fit says little


@pytest.mark.parametrize("step_s", [1e-9, 1e9])
def test_absurd_times_do_no_harm(
    step_s: float, model: ModelProfile, slow_network: Resources
) -> None:
    found = calibrate(CostModel(model, slow_network), [{}, {}], [step_s, step_s])
    assert np.isfinite(astuple(found.coefficients)).all() and np.isfinite(found.misfit)
    assert np.isfinite(found.covariance).all() and found.draws(3, 0)
