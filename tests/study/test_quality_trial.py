"""What the losses of one quality trial say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvd_autosync.search_space import Strategy
from hvd_autosync.study.quality import QualityCheck
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
    first = trials(0.1, -0.5)[0]
    assert fall_of(first.losses).mean > 0.2
    assert fall_of(first.averages) == fall_of(first.losses[::4])
    assert fall_of(first.averages).mean < 0
    assert enough_steps(DEFAULT, trials(0.1, -0.5), STEPS, spent=False) > STEPS
    assert enough_steps(DEFAULT, trials(-0.5, 0.1), STEPS, spent=False) == STEPS


def test_without_an_average_all_losses_count() -> None:
    whole = replace(trials(-0.5, -0.5)[0], in_round=frozenset(range(STEPS)))
    assert whole.averages == whole.losses


@pytest.mark.parametrize(("average", "within", "judged"), [(0.1, -0.5, False), (-0.5, 0.1, True)])
def test_candidates_are_judged_where_the_averages_loss_has_fallen(
    average: float, within: float, judged: bool
) -> None:
    candidate = Strategy({"codec": "fp16"})
    check = QualityCheck(
        DEFAULT,
        [candidate],
        trials(average, within),
        lambda *_: candidate,
        steps=STEPS,
        spent="the minutes were used",  # or longer trials would be asked for first
    )
    (verdict,) = check.verdicts()
    assert ("has not fallen" in verdict.reason) != judged
