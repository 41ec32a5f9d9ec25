"""Draws ``docs/transfer.svg``: a target after two trials, with and without its source's covariance.

python tools/draw_transfer.py
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np

from hvd_autosync.figures.style import BLACK, BLUE, ORANGE
from hvd_autosync.learner import Observation, fit
from hvd_autosync.learner.features import Features
from hvd_autosync.learner.multi_task_gp import MultiTaskGP
from hvd_autosync.learner.outcome_transform import StepTimes
from hvd_autosync.learner.points import encode_all
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.learner.surrogate import Surrogate
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.search_space.knobs import float_knob

matplotlib.use("agg")
from matplotlib import pyplot as plt

_PICTURE = Path(__file__).parents[1] / "docs" / "transfer.svg"
_SPACE = SearchSpace((float_knob("cycle_time_ms", 0.1, 100.0, 1.0, help="", scale="log"),))
#: Nothing above this was measured by the source, ms.
_MEASURED_BELOW = 4.0


def step_s(cycle_time_ms: float) -> float:
    """A step time that is best near 30 ms, where the source was never measured."""
    position = math.log10(cycle_time_ms)
    return 0.1 * math.exp(0.35 * math.cos(1.9 * position - 0.6) + 0.05 * position)


def measured(cycle_times_ms: list[float], factor: float) -> list[Observation]:
    """Trials of a task that is slower than the other by ``factor``."""
    return [
        Observation(Strategy({"cycle_time_ms": each}), factor * step_s(each), 0.001)
        for each in cycle_times_ms
    ]


def main() -> None:
    """Write the picture."""
    trials = measured([1.0, 0.3], 1.0)
    known = measured([float(t) for t in np.geomspace(0.1, _MEASURED_BELOW, 14)], 2.0)
    source = Source("source", None, _SPACE, tuple(known), 0.9)
    exact = fit(Problem(_SPACE, sources=(source,)), trials)
    forgetful = _at_means(exact, trials)
    times = np.geomspace(0.1, 100.0, 200)
    points = encode_all(_SPACE, [{"cycle_time_ms": float(each)} for each in times])
    figure, panels = plt.subplots(1, 2, figsize=(9.0, 3.2), sharey=True, layout="constrained")
    for axes, model, title in (
        (panels[0], forgetful, "source at its posterior mean"),
        (panels[1], exact, "source with its posterior covariance"),
    ):
        mean, covariance = model.joint_at(points)
        width = 1.645 * np.sqrt(np.diagonal(covariance))
        low, high = (1000 * np.exp(mean + sign * width) for sign in (-1, 1))
        axes.fill_between(times, low, high, color=BLUE, alpha=0.2, lw=0, label="90 % interval")
        axes.plot(times, 1000 * np.exp(mean), color=BLUE, label="posterior of the target")
        axes.plot(times, [1000 * step_s(t) for t in times], "--", color=BLACK, label="truth")
        axes.plot(
            [float(o.strategy["cycle_time_ms"]) for o in trials],
            [1000 * (o.step_s or 0.0) for o in trials],
            "o",
            color=BLACK,
            label="trials of the target",
        )
        axes.axvspan(_MEASURED_BELOW, 100.0, color=ORANGE, alpha=0.12, lw=0)
        axes.text(
            _MEASURED_BELOW * 1.15,
            0.92,
            "source not measured",
            transform=(axes.get_xaxis_transform()),
        )
        axes.set(title=title, xscale="log", xlabel="cycle_time_ms", xlim=(0.1, 100.0))
    panels[0].set_ylabel("step, ms")
    panels[0].legend(frameon=False, fontsize="small")
    figure.savefig(_PICTURE, metadata={"Date": None})


def _at_means(exact: Surrogate, trials: list[Observation]) -> Surrogate:
    """The same model with the same hyperparameters, as sure of the source everywhere."""
    priors = [replace(prior, source=None) for prior in exact.priors]
    points = encode_all(_SPACE, [seen.strategy for seen in trials])
    transform = exact.model.outcome_transform
    times = StepTimes(
        np.array([seen.log_step for seen in trials]),
        np.array([seen.log_variance for seen in trials]),
        transform.center,
        transform.scale,
    )
    model = MultiTaskGP(Features.of(_SPACE), priors, points, times)
    model.load_state_dict(dict(exact.model.named_parameters()), strict=False)
    return Surrogate(model.eval(), {})


if __name__ == "__main__":
    main()
