"""The HTML page of a study: result, figures, task, every trial, how to reproduce it.

The page contains Plotly's library (about 5 MB) and needs no network.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table

from hvd_autosync.api.results import Study
from hvd_autosync.errors import ConfigurationError, StudyError
from hvd_autosync.reporting.explanation import Section, Verbatim, explain
from hvd_autosync.reporting.listing import trials_table
from hvd_autosync.reporting.markdown import plain, table_rows

if TYPE_CHECKING:
    import plotly.graph_objects as go

#: Titles of the sections before the figures.
_FIRST = ("", "Result", "Quality of lossy strategies")
#: Largest number of changed knobs with a figure of their own, the most important ones first.
_SLICES = 3


def page(study: Study, store_option: str | None = "") -> str:
    """Return the page as HTML.

    Args:
        study: The study.
        store_option: As of :func:`hvd_autosync.reporting.explanation.explain`.

    Raises:
        ConfigurationError: Plotly or Jinja is not installed.
        StudyError: The study has no trials.
    """
    try:
        import jinja2
        import plotly.offline
    except ImportError as missing:
        raise ConfigurationError(
            f"the page needs {missing.name}, which is not installed",
            hint="Install it: pip install 'hvd-autosync[notebook]'; or use --format md.",
        ) from None
    sections = list(explain(study.store, study.study_id, store_option))
    first = [section for section in sections if section.title in _FIRST]
    rest = [section for section in sections if section.title not in _FIRST]
    rest.append(Section("Versions", tuple(f"{k} {v}" for k, v in study.record.versions.items())))
    rest.append(Section("Every trial", (trials_table(study.record, study.history),)))
    template = resources.files("hvd_autosync.commands").joinpath("page.html.jinja").read_text()
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(template).render(
        title=f"hvd-autosync: study {study.study_id}",
        first=[_section(each) for each in first],
        figures=[_figure(number, each) for number, each in enumerate(_figures(study))],
        rest=[_section(each) for each in rest],
        library=plotly.offline.get_plotlyjs(),
    )


def _figures(study: Study) -> Iterator[go.Figure]:
    """Yield the figures that have data."""
    plot, space = study.plot, study.record.space
    figures = [plot.convergence(), plot.step_times()]
    if space is not None:
        importance = plot.importance()
        figures += [plot.pareto(), importance]
        best, default = study.best.strategy, space.default
        ranked = importance.data[0].y if importance.data else ()
        changed = [name for name in ranked if name in best and best[name] != default.get(name)]
        figures += [plot.slice(name) for name in changed[:_SLICES]]
        figures += [plot.parallel(), plot.transfer(), plot.timeline(0)]
        under_best = [
            trial.number
            for trial in study.history
            if trial.result and space.complete(trial.strategy) == best != default
        ]
        figures += [plot.timeline(number) for number in under_best[-1:]]
    yield from (figure for figure in figures if figure.data)


def _figure(number: int, figure: go.Figure) -> dict[str, str]:
    """Title, caption and HTML of a figure; the page shows the title and the caption itself."""
    meta = figure.layout.meta
    figure.update_layout(title=None, margin={"t": 24 if not figure.layout.margin.t > 150 else 110})
    content = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=f"figure{number}",
        config={"displaylogo": False, "responsive": True},
    )
    return {"title": meta["title"], "caption": meta["caption"], "content": content}


def _section(section: Section) -> dict[str, Any]:
    return {"title": section.title, "blocks": [_block(each) for each in section.content]}


def _block(content: RenderableType) -> dict[str, Any]:
    """Return a block of a section for the template, which distinguishes blocks by their kind."""
    if isinstance(content, Verbatim):
        return {"kind": "copy", "text": content.plain.rstrip()}
    if isinstance(content, Table):
        names, rows = table_rows(content)
        caption = plain(content.caption) if content.caption else ""
        return {"kind": "table", "names": names, "rows": rows, "caption": caption}
    kind = "below" if isinstance(content, Padding) else "text"
    return {"kind": kind, "text": plain(content)}


def summary(study: Study) -> dict[str, Any]:
    """Return a study as plain JSON: the record, the best strategy, and one entry per trial.

    Raises:
        StudyError: The study has no trials.
    """
    if not study.history:
        raise StudyError(
            f"study {study.study_id} has no trials", hint="Wait for the first one to end."
        )
    from hvd_autosync.traces.frames import frame_rows  # pandas is slow to import

    best = None
    if study.record.space is not None:
        found = study.best
        numbers = {
            "step_s": found.step_s,
            "speedup": found.speedup,
            "low": found.low,
            "high": found.high,
        }
        best = {
            "strategy": dict(found.strategy),
            "confirmed": found.confirmed,
            **{name: value if value == value else None for name, value in numbers.items()},
        }
    return {"study": study.record.to_json(), "best": best, "trials": frame_rows(study.trials)}
