"""The common style of figures: colours, fonts, and captions."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from hvd_autosync.util.printable import printable

#: The colours of Okabe and Ito, which can be told apart with colour vision deficiency.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (
    "#333333",
    "#e69f00",
    "#56b4e9",
    "#009e73",
    "#f0e442",
    "#0072b2",
    "#d55e00",
    "#cc79a7",
)
#: Colour of each kind of trial.
KINDS = {
    "default": BLACK,
    "sobol": SKY,
    "model": BLUE,
    "survey": SKY,
    "quality": PINK,
    "confirm": GREEN,
    "horovod-autotune": ORANGE,
}
#: The purpose of each kind of trial.
MEANINGS = {
    "default": "default strategy",
    "sobol": "spread over the space",
    "model": "the learner's choice",
    "survey": "survey",
    "quality": "judged by its loss",
    "confirm": "confirmation",
    "horovod-autotune": "Horovod's autotune",
}
#: Colour scale from fast (dark) to slow (light).
SCALE = "Viridis"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
_CAPTION_WIDTH = 110
#: The start of a tag, except for the tags that the figures use.
_FOREIGN_MARKUP = re.compile(r"<(?!/?(?:br|i|extra)/?>)")


def dressed(figure: go.Figure, title: str, caption: str, height: int = 420) -> go.Figure:
    """Add a title and a caption below it to ``figure``; ``layout.meta`` has both as text."""
    subtitle = "<br>".join(textwrap.wrap(caption, _CAPTION_WIDTH))
    lines = subtitle.count("<br>") + 1
    named = [t for t in figure.data if "showlegend" not in t or t.showlegend is not False]
    below = 96 if len(named) > 1 else 60
    figure.update_layout(
        template="plotly_white",
        title={
            "text": title,
            "x": 0.0,
            "xanchor": "left",
            "xref": "container",
            "pad": {"l": 12},
            "yref": "container",
            "y": 0.97,
            "yanchor": "top",
            "subtitle": {"text": subtitle, "font": {"size": 12, "color": "#555555"}},
        },
        font={"family": _FONT, "size": 13},
        margin={"l": 70, "r": 24, "t": 64 + 16 * lines, "b": below},
        height=height + 16 * lines,
        legend={
            "orientation": "h",
            "x": 0,
            "xanchor": "left",
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
        },
        meta={"title": title, "caption": caption},
    )
    parts = [trace.to_plotly_json() for trace in figure.data]
    return go.Figure(_harmless(parts), _harmless(figure.layout.to_plotly_json()))


def _harmless(value: object) -> object:
    """``value`` with printable texts and without links, because Plotly interprets some markup."""
    if isinstance(value, str):
        return printable(_FOREIGN_MARKUP.sub("&lt;", value))
    if isinstance(value, dict):
        return {name: _harmless(inside) for name, inside in value.items()}
    if isinstance(value, (list, tuple)):
        return [_harmless(inside) for inside in value]
    return value


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """Options of a logarithmic axis for ``values``, with ticks at 1, 2 and 5 per decade.

    Empty, hence a linear axis, if the values are so close that there would be hardly a tick.
    """
    finite = [value for value in values if 0 < value < math.inf]
    low, high = min(finite), max(finite)
    if high < 4 * low:
        return {}
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [first * 10.0**decade for decade in decades for first in (1, 2, 5)]
    margin = (high / low) ** 0.05
    return {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [f"{tick:g}" for tick in ticks],
        "range": [math.log10(low / margin), math.log10(high * margin)],
    }


def nothing(title: str, caption: str, reason: str) -> go.Figure:
    """Return a figure without data, with the reason as text."""
    figure = go.Figure()
    figure.add_annotation(
        text=reason,
        showarrow=False,
        x=0.5,
        y=0.5,
        xref="paper",
        yref="paper",
        font={"size": 14, "color": "#555555"},
    )
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return dressed(figure, title, caption, height=160)


def wrapped(text: str, width: int = 60) -> str:
    """``text`` broken into lines, for hover texts."""
    return "<br>".join(textwrap.wrap(text, width))
