"""What the losses of one quality trial say."""

from __future__ import annotations

import numpy as np

from hvd_autosync.search_space import Strategy
from hvd_autosync.study.quality_trial import FIRST_SEEDS, QualityTrial, enough_steps, fall_of

DEFAULT, STEPS = Strategy(), 200
#: As of a default with rounds of four local steps.
IN_ROUND = frozenset(step for step in range(STEPS) if step % 4)


def losses(average: float, within: float, seed: int) -> tuple[float, ...]:
    """Losses from 1 on, which change by so much: those of averages, and those within rounds."""
    noise = np.random.default_rng(seed).normal(0, 0.01, STEPS)
    change = np.array([within if step in IN_ROUND else average for step in range(STEPS)])
    return tuple((1.0 + change * np.arange(STEPS) / STEPS + noise).tolist())


def trials(average: float, within: float) -> list[QualityTrial]:
    return [
        QualityTrial(
            DEFAULT, seed, STEPS, losses(average, within, seed), local_steps=True, in_round=IN_ROUND
        )
        for seed in range(1, FIRST_SEEDS + 1)
    ]


def test_a_decrease_within_rounds_is_none_of_the_model() -> None:
    seen = losses(0.1, -0.5, 1)
    assert fall_of(seen).mean > 0.2
    assert fall_of(seen, IN_ROUND) == fall_of(seen[::4])
    assert fall_of(seen, IN_ROUND).mean < 0
    assert enough_steps(DEFAULT, trials(0.1, -0.5), STEPS, spent=False) > STEPS
    assert enough_steps(DEFAULT, trials(-0.5, 0.1), STEPS, spent=False) == STEPS


def test_without_an_average_all_losses_count() -> None:
    seen = losses(-0.5, -0.5, 1)
    assert fall_of(seen, range(STEPS)) == fall_of(seen)
