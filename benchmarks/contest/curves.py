"""Regret by trials as a picture: one panel per table, a line per contestant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes

from hvd_autosync.figures.style import BLACK, BLUE, GREEN, ORANGE, PINK, RED, SKY, YELLOW

matplotlib.use("agg")
from matplotlib import pyplot as plt

#: The regrets of one game, the default's first.
Game = Sequence[float]

_COLUMNS, _PANEL_INCHES = 3, (4.0, 2.7)
#: What an axis of logarithms shows for a regret of 0, in percent.
_LEAST = 0.5
#: Each axis reaches this at least, so that small differences look small.
_LOWEST_TOP = 30.0
#: Ours are drawn thick, and with the quartiles of the last of them.
_OURS = {"ours: gp": SKY, "ours: gp + cost": GREEN, "ours: gp + transfer": PINK, "ours": BLUE}
_PEERS = (BLACK, ORANGE, RED, YELLOW)
_DASHES = ("-", "--", ":")


def draw(games: Mapping[tuple[str, str], Sequence[Game]], path: str) -> None:
    """Write the picture of some games.

    Args:
        games: (contestant, table) -> its games.
        path: The file; its ending says the format: ``.svg``, ``.png`` or ``.pdf``.
    """
    contestants = list(dict.fromkeys(contestant for contestant, _ in games))
    tables = sorted({table for _, table in games})
    peers = [c for c in contestants if c not in _OURS]
    looks: dict[str, dict[str, Any]] = {
        c: {"color": color, "linewidth": 2.2, "zorder": 3 + rank}
        for rank, (c, color) in enumerate(_OURS.items())
    } | {
        c: {
            "color": _PEERS[i % len(_PEERS)],
            "linewidth": 1.0,
            "linestyle": _DASHES[i // len(_PEERS) % len(_DASHES)],
        }
        for i, c in enumerate(peers)
    }
    lines = -(-len(tables) // _COLUMNS)
    width, height = _PANEL_INCHES
    figure, panels = plt.subplots(
        lines, _COLUMNS, figsize=(_COLUMNS * width, lines * height + 0.8), squeeze=False
    )
    for panel in panels.flat[len(tables) :]:
        panel.set_axis_off()
    for table, panel in zip(tables, panels.flat, strict=False):
        for contestant in contestants:
            if many := games.get((contestant, table)):
                _line(panel, many, contestant, **looks[contestant])
        panel.set(title=table, yscale="log", xlabel="trials after the default")
        panel.set_ylim(_LEAST, max(panel.get_ylim()[1], _LOWEST_TOP))
        panel.yaxis.set_major_formatter("{x:g} %")
        panel.yaxis.set_minor_formatter("")
        panel.grid(True, alpha=0.3)
    panels[0][0].set_ylabel("regret of the best so far")
    named = {
        label: handle
        for panel in panels.flat
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.tight_layout(rect=(0, 0.8 / (lines * height + 0.8), 1, 1))
    figure.legend(named.values(), named.keys(), loc="lower center", ncols=5, frameon=False)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    plt.close(figure)


def _line(panel: Axes, many: Sequence[Game], contestant: str, **look: Any) -> None:
    """The median of some games and, of ours, between which values half of them lie."""
    trials = range(1, min(len(game) for game in many))
    percent = 100 * np.array([[game[trial] for trial in trials] for game in many])
    low, middle, high = np.quantile(percent.clip(min=_LEAST), (0.25, 0.5, 0.75), axis=0)
    panel.plot(trials, middle, label=contestant, **look)
    if contestant == "ours" and len(many) > 3:
        panel.fill_between(trials, low, high, color=look["color"], alpha=0.15, linewidth=0)
