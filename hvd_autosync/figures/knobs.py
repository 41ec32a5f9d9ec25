"""Figures of the effects of knobs, estimated from the trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from hvd_autosync.errors import SpaceError
from hvd_autosync.figures.evidence import Evidence
from hvd_autosync.figures.style import BLACK, BLUE, GREEN, RED, SCALE, dressed, log_axis, nothing
from hvd_autosync.learner.points import can_vary, encode_all
from hvd_autosync.reporting.words import LEVEL, STANDARD_ERRORS
from hvd_autosync.search_space import CategoricalKnob, Knob, Strategy, Value
from hvd_autosync.search_space.restrictions import condition_text
from hvd_autosync.util.amounts import amount

if TYPE_CHECKING:
    from hvd_autosync.learner.surrogate import Surrogate

#: Least number of measured trials for a model.
_FEWEST = 3
_GRID, _CONTOUR = 41, 25


def importance(evidence: Evidence) -> go.Figure:
    """Importance of each knob over the whole space."""
    title = "Importance of knobs"
    caption = (
        "Look for the few long bars: the other knobs matter little. A bar is the share of the "
        "variance of step times that remains when all other knobs are known; interactions count "
        "for each knob that takes part. Knobs that no trial has varied are not shown."
    )
    if reason := _too_little(evidence):
        return nothing(title, caption, reason)
    from hvd_autosync.learner import knob_importance

    assert evidence.problem is not None, "the space is known"
    shares = knob_importance(evidence.problem, evidence.observations)
    tried = [o.strategy for o in evidence.observations if o.measured]
    names = [
        name
        for name in shares
        if can_vary(evidence.space[name]) and len({each.get(name) for each in tried}) > 1
    ]
    figure = go.Figure(
        go.Bar(
            x=[shares[name] for name in names],
            y=names,
            orientation="h",
            marker={"color": BLUE},
            text=[f"{shares[name]:.0%}" for name in names],
            textposition="outside",
            cliponaxis=False,
            customdata=[evidence.space[name].help for name in names],
            hovertemplate="%{y}: %{x:.1%}<br>%{customdata}<extra></extra>",
        )
    )
    figure.update_xaxes(title="share of the variance", tickformat=".0%", range=[0, 1.1])
    figure.update_yaxes(autorange="reversed", automargin=True)
    return dressed(figure, title, caption, height=130 + 26 * len(names))


def parallel(evidence: Evidence) -> go.Figure:
    """Return all trials as lines through their values of all knobs, coloured by step time."""
    title = "Measured strategies"
    caption = (
        "Look where the dark lines, the fast strategies, meet on an axis: that knob matters. Drag "
        "along an axis to show only some of its values."
    )
    if reason := _too_little(evidence):
        return nothing(title, caption, reason)
    measured = [seen for seen in evidence.observations if seen.measured]
    log_ms = [math.log10(1e3 * math.exp(seen.log_step)) for seen in measured]
    knobs = [knob for knob in evidence.space.knobs if can_vary(knob)]
    knobs = [knob for knob in knobs if len({seen.strategy.get(knob.name) for seen in measured}) > 1]
    figure = go.Figure(
        go.Parcoords(
            line={
                "color": log_ms,
                "colorscale": SCALE,
                "showscale": True,
                "colorbar": _bar(min(log_ms), max(log_ms)),
            },
            dimensions=[
                _axis(knob, [seen.strategy.get(knob.name, knob.default) for seen in measured])
                for knob in knobs
            ],
            labelangle=-20,
            labelside="top",
        )
    )
    figure = dressed(figure, title, caption, height=460)
    return figure.update_layout(margin={"l": 70, "r": 60, "t": 190, "b": 40})


def _bar(low: float, high: float) -> dict[str, Any]:
    """Return the colour bar for base-10 logarithms of milliseconds."""
    ticks = np.linspace(low, high, 5)
    return {"title": "ms", "tickvals": ticks, "ticktext": [f"{10**tick:.3g}" for tick in ticks]}


def _axis(knob: Knob, values: list[Value]) -> dict[str, Any]:
    if isinstance(knob, CategoricalKnob):
        places = [knob.choices.index(value) for value in values]
        names = [str(choice) for choice in knob.choices]
        return {
            "label": knob.name,
            "values": places,
            "range": [-0.3, len(names) - 0.7],
            "tickvals": list(range(len(names))),
            "ticktext": names,
        }
    at = np.linspace(0, 1, 5)
    return {
        "label": knob.name,
        "values": [knob.to_unit(value) for value in values],
        "range": [0, 1],
        "tickvals": at,
        "ticktext": [knob.format(knob.from_unit(position)) for position in at],
    }


def slice(evidence: Evidence, knob: str) -> go.Figure:
    """Step time along one knob, the others as in the best strategy."""
    title = f"Step time along {knob}"
    caption = (
        "Look for the lowest point of the band, and whether it is clearly below the ends. The band "
        f"is the model's {LEVEL} interval, with the other knobs as in the best strategy. Dots are "
        "trials, whose other knobs differ."
    )
    moved = _knob(evidence, knob)
    if reason := _too_little(evidence):
        return nothing(title, caption, reason)
    values = _values(moved, _GRID)
    best = evidence.best
    along = [evidence.space.complete(best.replacing(**{knob: value})) for value in values]
    if reason := _no_effect(moved, along):
        return nothing(title, caption, reason)
    mean, deviation = _model(evidence).predict(along)
    x = _shown(moved, values)
    center, low, high = (
        1e3 * np.exp(mean + side * STANDARD_ERRORS * deviation) for side in (0, -1, 1)
    )
    figure = go.Figure()
    if isinstance(moved, CategoricalKnob):
        figure.add_trace(
            go.Scatter(
                x=x,
                y=center,
                mode="markers",
                name="expected",
                marker={"color": BLUE, "symbol": "line-ew-open", "size": 28},
                error_y={"array": high - center, "arrayminus": center - low, "color": BLUE},
            )
        )
    else:
        figure.add_trace(
            go.Scatter(
                x=[*x, *reversed(x)],
                y=[*high, *reversed(low)],
                fill="toself",
                fillcolor="rgba(0, 114, 178, 0.15)",
                line={"width": 0},
                hoverinfo="skip",
                name=f"{LEVEL} interval",
            )
        )
        figure.add_trace(go.Scatter(x=x, y=center, line={"color": BLUE}, name="expected"))
    seen = [o for o in evidence.observations if o.measured and knob in o.strategy]
    seen_ms = [1e3 * math.exp(o.log_step) for o in seen]
    figure.add_trace(
        go.Scatter(
            x=_shown(moved, [o.strategy[knob] for o in seen]),
            y=seen_ms,
            mode="markers",
            name="trials",
            marker={"color": BLACK, "size": 5, "opacity": 0.5},
        )
    )
    chosen = _shown(moved, [best.get(knob, moved.default)])
    figure.add_trace(
        go.Scatter(
            x=chosen,
            y=[min(low)],
            mode="markers",
            name="the best strategy's value",
            marker={"color": GREEN, "symbol": "star", "size": 12},
        )
    )
    figure.update_xaxes(**_scale(moved))
    figure.update_yaxes(title="step time, ms", **log_axis([*low, *high, *seen_ms]))
    return dressed(figure, title, caption)


def contour(evidence: Evidence, a: str, b: str) -> go.Figure:
    """Expected step time over two knobs, the others as in the best strategy."""
    title = f"Step time over {a} and {b}"
    caption = (
        "Look whether the dark valley is slanted: then the two knobs must be chosen together. The "
        "colour is the model's mean, the star the best strategy; dots are trials."
    )
    across, up = _knob(evidence, a), _knob(evidence, b)
    if a == b:
        raise SpaceError(f"both knobs are {a}", hint="Name two different knobs.")
    if reason := _too_little(evidence):
        return nothing(title, caption, reason)
    best = evidence.best
    xs, ys = _values(across, _CONTOUR), _values(up, _CONTOUR)
    grid = [evidence.space.complete(best.replacing(**{a: x, b: y})) for y in ys for x in xs]
    if reason := _no_effect(across, grid) or _no_effect(up, grid):
        return nothing(title, caption, reason)
    mean = _model(evidence).mean_at(encode_all(evidence.space, grid)).reshape(len(ys), len(xs))
    log_ms = (mean + math.log(1e3)) / math.log(10)
    figure = go.Figure(
        go.Heatmap(
            x=_shown(across, xs),
            y=_shown(up, ys),
            z=log_ms,
            customdata=10**log_ms,
            colorscale=SCALE,
            colorbar=_bar(log_ms.min(), log_ms.max()),
            hovertemplate=f"{a} %{{x}}<br>{b} %{{y}}<br>%{{customdata:.4g}} ms<extra></extra>",
        )
    )
    seen = [o.strategy for o in evidence.observations if o.measured]
    for strategies, symbol, color, size, name in (
        (seen, "circle", "white", 6, "trials"),
        ([best], "star", RED, 14, "the best strategy"),
    ):
        figure.add_trace(
            go.Scatter(
                x=_shown(across, [s.get(a, across.default) for s in strategies]),
                y=_shown(up, [s.get(b, up.default) for s in strategies]),
                mode="markers",
                name=name,
                marker={
                    "symbol": symbol,
                    "color": color,
                    "size": size,
                    "line": {"color": BLACK, "width": 1},
                },
            )
        )
    for update, knob in ((figure.update_xaxes, across), (figure.update_yaxes, up)):
        update(**_scale(knob))
    return dressed(figure, title, caption, height=480)


def _too_little(evidence: Evidence) -> str:
    """Return the reason why no model can be fitted; empty if one can."""
    measured = sum(seen.measured for seen in evidence.observations)
    if measured < _FEWEST:
        return f"{amount(measured, 'measured trial')} of the {_FEWEST} that are needed."
    return "" if evidence.space.dimension else "This job has no knob to tune."


def _no_effect(knob: Knob, strategies: Sequence[Strategy]) -> str:
    """Return why a knob has no effect in any of ``strategies``; empty if it has one."""
    if knob.condition is None or any(knob.name in each for each in strategies):
        return ""
    when = condition_text(knob.condition)
    return f"{knob.name} has an effect only while {when}, which is not so in the best strategy."


def _model(evidence: Evidence) -> Surrogate:
    from hvd_autosync.learner import fit

    assert evidence.problem is not None, "the space is known"
    return fit(evidence.problem, evidence.observations)


def _knob(evidence: Evidence, name: str) -> Knob:
    """Return the searched knob with that name.

    Raises:
        SpaceError: No searched knob has that name.
    """
    names = [knob.name for knob in evidence.space.knobs]
    if name not in names:
        raise SpaceError(
            f"knob {name!r} was not searched in this study",
            hint=f"Searched knobs are {', '.join(names)}.",
        )
    return evidence.space[name]


def _values(knob: Knob, count: int) -> list[Value]:
    """Return all choices of a knob, or up to ``count`` values over its range, in rising order."""
    if isinstance(knob, CategoricalKnob):
        return list(knob.choices)
    return list(dict.fromkeys(knob.from_unit(float(at)) for at in np.linspace(0, 1, count)))


def _shown(knob: Knob, values: Sequence[Value]) -> list[Value]:
    """Values of a knob as axis positions: names of choices, numbers, MiB for bytes."""
    if isinstance(knob, CategoricalKnob):
        return [knob.format(value) for value in values]
    return [float(value) / 2**20 if knob.unit == "B" else value for value in values]


def _scale(knob: Knob) -> dict[str, Any]:
    """Options of the axis of a knob."""
    unit = "MiB" if knob.unit == "B" else knob.unit
    title = f"{knob.name}, {unit}" if unit else knob.name
    if isinstance(knob, CategoricalKnob):
        return {"title": title, "type": "category"}
    if knob.scale == "log" and knob.low > 0:
        return {"title": title, **log_axis([float(p) for p in _shown(knob, [knob.low, knob.high])])}
    return {"title": title}
