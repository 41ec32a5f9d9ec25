"""Figure of lossy strategies: speed against loss."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from hvd_autosync.figures.evidence import Evidence
from hvd_autosync.figures.style import BLACK, BLUE, GREEN, RED, SKY, dressed, nothing, wrapped
from hvd_autosync.reporting.explain_quality import WORDS, trade_offs
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.traces import StudyStatus


def pareto(evidence: Evidence) -> go.Figure:
    """Speed against loss, of the lossy strategies that were judged."""
    title = "Speed against loss"
    caption = (
        "Look along the line to the right: for each strategy on it, no other one is both as fast "
        "and as good. Strategies above the grey band exceed the tolerance. Those in the band are "
        "refused, too, unless they were shown to be as good."
    )
    conclusion = evidence.conclusion
    if conclusion is None or not conclusion.verdicts:
        if evidence.study.space is None or not evidence.space.has_lossy:
            reason = (
                "No lossy strategy was judged: exact strategies train the same model. "
                "Lossy ones are tried with --autosync-allow codec,schedule."
            )
        elif evidence.study.status is StudyStatus.RUNNING:
            reason = "Verdicts are shown once the study has ended."
        else:
            reason = "No lossy strategy was judged."
        return nothing(title, caption, reason)
    offers = [
        each
        for each in trade_offs(evidence.space, evidence.trials, conclusion)
        if math.isfinite(each.speedup) and math.isfinite(each.verdict.loss)
    ]
    figure = go.Figure()
    allowed = max((each.verdict.allowed for each in offers), default=0.0)
    figure.add_hrect(
        y0=-allowed,
        y1=allowed,
        fillcolor=BLACK,
        opacity=0.08,
        line_width=0,
        annotation={"text": "tolerance", "xanchor": "left"},
        annotation_position="bottom left",
    )
    on_front = [each for each in offers if each.on_front]
    front = [(each.speedup, each.verdict.gap) for each in on_front]
    admitted = [
        each.speedup >= 1 and each.verdict.gap <= 0
        for each in on_front
        if each.verdict.outcome is Outcome.ADMITTED
    ]
    if not any(admitted):
        front.append((1.0, 0.0))  # nothing is as fast as the default and was shown to be as good
    front.sort()
    figure.add_trace(
        go.Scatter(
            x=[x for x, _ in front],
            y=[y for _, y in front],
            mode="lines",
            name="Pareto front",
            line={"color": BLUE, "width": 1, "dash": "dot"},
            hoverinfo="skip",
        )
    )
    figure.add_trace(_dots("the default", [(1.0, 0.0)], [""], BLACK, "circle"))
    for outcome, color, symbol in (
        (Outcome.ADMITTED, GREEN, "circle"),
        (Outcome.WORSE, RED, "x"),
        (Outcome.NOT_SHOWN, SKY, "diamond-open"),
    ):
        own = [each for each in offers if each.verdict.outcome is outcome]
        if own:
            points = [(each.speedup, each.verdict.gap) for each in own]
            texts = [
                f"{wrapped(evidence.name(each.verdict.strategy))}<br>"
                f"<i>{wrapped(each.verdict.reason)}</i>"
                for each in own
            ]
            figure.add_trace(_dots(WORDS[outcome], points, texts, color, symbol))
    figure.update_xaxes(title="steps per second, times the default's")
    figure.update_yaxes(title="loss above the default's")
    return dressed(figure, title, caption)


def _dots(
    name: str, points: list[tuple[float, float]], texts: list[str], color: str, symbol: str
) -> go.Scatter:
    return go.Scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode="markers",
        name=name,
        text=texts,
        marker={"color": color, "symbol": symbol, "size": 10},
        hovertemplate="%{x:.2f}x, loss %{y:+.3g}<br>%{text}<extra></extra>",
    )
