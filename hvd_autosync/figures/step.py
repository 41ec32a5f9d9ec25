"""Figure of the timeline of one step."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from hvd_autosync.cost import CostModel, calibrate
from hvd_autosync.cost.step_timeline import StepTimeline, step_timeline
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.figures.evidence import Evidence, step_ms
from hvd_autosync.figures.style import BLACK, GREEN, ORANGE, RED, SKY, dressed, nothing

_COMPUTE, _WIRE, _EXPOSED = "computation", "hidden communication", "exposed communication"
#: Largest number of messages that are drawn with their names.
_NAMED = 24


def timeline(evidence: Evidence, number: int) -> go.Figure:
    """Timeline of one step of a trial: forward, backward, messages, exposed communication."""
    trial = evidence.trial(number)
    title = f"One step of trial {number}"
    caption = (
        "Look at the red part, the exposed communication: a better strategy makes it shorter, and "
        "the green line, the measured step, moves left. Forward, backward and the arrival of "
        "gradients were measured in the first trial; the messages are predicted by the cost model, "
        "fitted to all trials."
    )
    task = evidence.study.task
    try:
        if task is None:
            return nothing(title, caption, "The model has not been profiled yet.")
        model = CostModel(task.model, task.resources)
    except ConfigurationError as error:
        return nothing(title, caption, f"The cost model cannot predict this: {error}.")
    fixed = dict(evidence.space.fixed)
    seen = [({**fixed, **o.strategy}, o.step_s) for o in evidence.observations if o.measured]
    fitted = calibrate(model, [s for s, _ in seen], [s for _, s in seen if s is not None])
    strategy = {**fixed, **evidence.space.complete(trial.strategy)}
    found = step_timeline(model, strategy, fitted.coefficients)
    figure = _drawn(found)
    measured = step_ms(trial)
    if math.isfinite(measured):
        figure.add_vline(
            x=measured,
            line={"color": GREEN, "width": 2},
            annotation={"text": f"measured: {measured:.1f} ms"},
        )
    figure.update_xaxes(title="ms from the start of the step", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", automargin=True)
    rows = len({row for bar in figure.data for row in bar.y})
    name = evidence.name(evidence.space.complete(trial.strategy))
    return dressed(figure, title, f"{caption} Strategy: {name}.", height=230 + 20 * rows)


def _drawn(found: StepTimeline) -> go.Figure:
    """Bars from top to bottom: forward, backward, then the messages in the order of sending."""
    figure = go.Figure()
    bars = [
        ("forward", 0.0, found.forward_s, "forward"),
        ("backward", found.forward_s, found.backward_s, "backward"),
    ]
    _bars(figure, _COMPUTE, SKY, bars)
    hidden, exposed = [], []
    many = len(found.messages) > _NAMED
    for index, each in enumerate(found.messages):
        row = "messages" if many else f"{index + 1}  {each.name[-32:]}"
        size, ready = each.size_bytes / 2**20, 1e3 * each.ready_s
        text = f"{each.name}, {size:.3g} MiB, ready at {ready:.2f} ms"
        middle = min(max(found.backward_s, each.begin_s), each.end_s)
        if middle > each.begin_s:
            hidden.append((row, each.begin_s, middle, text))
        if each.end_s > middle:
            exposed.append((row, middle, each.end_s, text))
    _bars(figure, _WIRE, ORANGE, hidden)
    _bars(figure, _EXPOSED, RED, exposed)
    figure.add_vline(x=1e3 * found.backward_s, line={"color": BLACK, "width": 1, "dash": "dot"})
    if found.local > 1:
        figure.add_annotation(
            text=f"averaging of parameters, once in {found.local} steps",
            showarrow=False,
            x=1e3 * found.backward_s,
            xanchor="left",
            y=1.02,
            yref="paper",
            yanchor="bottom",
        )
    return figure


def _bars(
    figure: go.Figure, name: str, color: str, bars: list[tuple[str, float, float, str]]
) -> None:
    figure.add_trace(
        go.Bar(
            y=[row for row, *_ in bars],
            base=[1e3 * begin for _, begin, _, _ in bars],
            x=[1e3 * (end - begin) for _, begin, end, _ in bars],
            orientation="h",
            name=name,
            marker={"color": color},
            text=[text for *_, text in bars],
            textposition="none",
            hovertemplate="%{text}<br>%{base:.2f} ms and %{x:.2f} ms more<extra></extra>",
        )
    )
    figure.update_layout(barmode="overlay")
