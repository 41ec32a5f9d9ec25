"""Figures of a study's course: step time per trial, spread of steps, priors used."""

from __future__ import annotations

import math

import numpy as np
import plotly.graph_objects as go

from hvd_autosync.figures.evidence import Evidence, step_ms
from hvd_autosync.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    KINDS,
    MEANINGS,
    ORANGE,
    PINK,
    RED,
    SKY,
    dressed,
    log_axis,
    nothing,
    wrapped,
)
from hvd_autosync.reporting.explain_priors import prior_uses
from hvd_autosync.reporting.words import LEVEL, STANDARD_ERRORS
from hvd_autosync.study.stage_budget import explored
from hvd_autosync.traces import TrialRecord

#: Colours of the strategies that are compared with the default.
_OTHERS = (GREEN, BLUE, ORANGE, PINK, RED)


def convergence(evidence: Evidence) -> go.Figure:
    """Step time of each trial, and of the fastest so far."""
    title = "Step time, trial by trial"
    caption = (
        "Look for a line that has been flat for a while: then further trials are unlikely to gain. "
        f"Crosses are failed trials, bars are {LEVEL} intervals. Confirmation measures the best "
        "and the default again, in turn."
    )
    told = [trial for trial in evidence.trials if trial.result is not None]
    if not any(math.isfinite(step_ms(trial)) for trial in told):
        return nothing(title, caption, "No trial has been measured yet.")
    figure = go.Figure()
    for kind in dict.fromkeys(trial.kind for trial in told):
        own = [trial for trial in told if trial.kind == kind and math.isfinite(step_ms(trial))]
        if own:
            figure.add_trace(_points(evidence, own, kind))
    failed = [trial for trial in told if not math.isfinite(step_ms(trial))]
    highest = max(step_ms(trial) for trial in told if math.isfinite(step_ms(trial)))
    if failed:
        figure.add_trace(
            go.Scatter(
                x=[t.number for t in failed],
                y=[highest] * len(failed),
                mode="markers",
                marker={"symbol": "x", "color": RED, "size": 9},
                name="failed",
                text=[wrapped(t.result.reason) for t in failed if t.result],
                hovertemplate="trial %{x} failed: %{text}<extra></extra>",
            )
        )
    space = evidence.study.space
    exploring = [
        trial
        for trial in explored(told)
        if math.isfinite(step_ms(trial)) and not (space and space.excludes(trial.strategy))
    ]
    fastest = np.minimum.accumulate([step_ms(trial) for trial in exploring])
    figure.add_trace(
        go.Scatter(
            x=[t.number for t in exploring],
            y=fastest,
            mode="lines",
            name="fastest so far",
            line={"color": BLUE, "shape": "hv", "width": 2},
            hoverinfo="skip",
        )
    )
    if math.isfinite(evidence.default_s):  # a line across would lie elsewhere on a log axis
        figure.add_trace(
            go.Scatter(
                x=[told[0].number, told[-1].number],
                y=[1e3 * evidence.default_s] * 2,
                mode="lines",
                name="the default's trial",
                hoverinfo="skip",
                line={"color": BLACK, "dash": "dot", "width": 1},
            )
        )
    figure.update_xaxes(title="trial", rangemode="tozero")
    figure.update_yaxes(title="step time, ms", **log_axis(step_ms(trial) for trial in told))
    return dressed(figure, title, caption)


def _points(evidence: Evidence, trials: list[TrialRecord], kind: str) -> go.Scatter:
    times = [t.result.step_time for t in trials if t.result is not None]
    return go.Scatter(
        x=[t.number for t in trials],
        y=[step_ms(t) for t in trials],
        mode="markers",
        name=MEANINGS.get(kind, kind),
        marker={"color": KINDS.get(kind, SKY), "size": 8},
        error_y={
            "array": [1e3 * STANDARD_ERRORS * t.standard_error_s for t in times if t is not None],
            "thickness": 1,
            "width": 0,
        },
        text=[wrapped(_name(evidence, trial)) for trial in trials],
        hovertemplate="trial %{x}: %{y:.4g} ms<br>%{text}<extra></extra>",
    )


def _name(evidence: Evidence, trial: TrialRecord) -> str:
    if evidence.study.space is None:
        return ", ".join(f"{name} = {value}" for name, value in trial.strategy.items())
    return evidence.name(evidence.space.complete(trial.strategy))


def step_times(evidence: Evidence) -> go.Figure:
    """Distribution of single steps, of the default and of the confirmed or fastest strategies."""
    title = "Distribution of single steps"
    caption = (
        "Look whether the boxes overlap: a gain smaller than the spread of the steps may be real, "
        "but is hard to notice. Each box is one trial; the line in it is the median."
    )
    measured = [trial for trial in evidence.trials if math.isfinite(step_ms(trial))]
    shown = [trial for trial in measured if trial.kind == "confirm"]
    if len(shown) < 2:  # there is nothing to compare
        shown = [*measured[:1], *sorted(measured[1:], key=step_ms)[:5]]
    if not shown:
        return nothing(title, caption, "No trial has been measured yet.")
    figure = go.Figure()
    default = evidence.study.space.default if evidence.study.space else shown[0].strategy
    colours: dict[str, str] = {}
    for trial in shown:
        assert trial.result is not None, "it was measured"
        strategy = evidence.study.space.complete(trial.strategy) if evidence.study.space else None
        is_default = strategy == default
        name = "the default" if is_default else wrapped(_name(evidence, trial), 40)
        new = name not in colours
        if new:
            place = len(colours.keys() - {"the default"}) % len(_OTHERS)
            colours[name] = BLACK if is_default else _OTHERS[place]
        figure.add_trace(
            go.Box(
                x=[f"trial {trial.number}"] * len(trial.result.measured_durations()),
                y=1e3 * trial.result.measured_durations(),
                name=name,
                legendgroup=name,
                showlegend=new,
                boxpoints="outliers",
                marker={"color": colours[name], "size": 4},
            )
        )
    figure.update_yaxes(title="step time, ms")
    return dressed(figure, title, caption)


def transfer(evidence: Evidence) -> go.Figure:
    """Return the priors used in each trial: the cost model, related studies."""
    title = "Priors that the learner used"
    caption = (
        "Look for rows that end early: a prior that the first trials contradict is dropped. "
        "The number in brackets is a study's similarity to this one, from 0 to 1."
    )
    uses = prior_uses(evidence.trials)
    if not uses:
        return nothing(title, caption, "No prior was used: the learner used the trials only.")
    figure = go.Figure()
    asked = [trial.number for trial in evidence.trials if trial.kind == "model"]
    for use in uses:
        figure.add_trace(
            go.Scatter(
                x=asked,
                y=[use.label] * len(asked),
                mode="markers",
                showlegend=False,
                marker={
                    "symbol": "square",
                    "size": 12,
                    "color": [BLUE if number in use.used_in else "#dddddd" for number in asked],
                },
                text=["used" if number in use.used_in else "not used" for number in asked],
                hovertemplate="%{y}, trial %{x}: %{text}<extra></extra>",
            )
        )
    figure.update_xaxes(title="trial")
    figure.update_yaxes(autorange="reversed")
    return dressed(figure, title, caption, height=160 + 30 * len(uses))
