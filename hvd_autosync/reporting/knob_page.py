"""The parts of pages that are made of declarations of knobs.

In ``docs/knobs.md`` these are the table of all knobs and a section for each, in
``docs/cost-model.md`` the terms. ``tools/write_knob_pages.py`` writes them between marks of the
page; the text around them is written by hand.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

from hvd_autosync.engine.mode import choices_not_live
from hvd_autosync.reporting.space import domain_text
from hvd_autosync.search_space.horovod_settings import launch_knobs
from hvd_autosync.search_space.knob_spec import Family, KnobSpec, LauncherOption, Variable
from hvd_autosync.search_space.knobs import CategoricalKnob

_WIDTH = 120
_MARKS = "<!-- {part}: made by tools/write_knob_pages.py -->", "<!-- end of {part} -->"


def knob_page(page: str, families: Iterable[Family]) -> str:
    """Return ``page`` with new text between its marks.

    Raises:
        ValueError: The page does not have each mark once, in order.
    """
    families = tuple(families)
    page = _replaced(page, "table", knob_table(spec for each in families for spec in each.specs))
    return _replaced(page, "knobs", "\n\n".join(map(family_section, families)))


def cost_page(page: str, families: Iterable[Family]) -> str:
    """Return ``page`` with a new table of the terms of the cost model between its marks.

    Raises:
        ValueError: As of :func:`knob_page`.
    """
    knobs: dict[str, list[str]] = {}
    for spec in (spec for family in families for spec in family.specs):
        knobs.setdefault(spec.cost, []).append(f"`{spec.name}`")
    ignored = knobs.pop("", [])
    rows = [*sorted(knobs.items()), ("none: a prediction does not depend on them", ignored)]
    lines = [f"| {term} | {', '.join(names)} |" for term, names in rows]
    return _replaced(page, "terms", "\n".join(["| term | knobs |", "| --- | --- |", *lines]))


def knob_table(specs: Iterable[KnobSpec]) -> str:
    """Return a table with a row for each knob."""
    head = (
        "| knob | values | default | sort | sets | changed by live trials | when it is tuned |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    )
    return "\n".join([*head, *map(_row, specs)])


def family_section(family: Family) -> str:
    """Return the heading of a family, its introduction and a section for each of its knobs."""
    intro = [_filled(family.intro)] if family.intro else []
    sections = [
        f'<span id="{spec.name}"></span>\n' + _filled(f"**`{spec.name}`** {spec.doc}")
        for spec in family.specs
    ]
    return "\n\n".join([f"## {family.title}", *intro, *sections])


def sets_text(spec: KnobSpec) -> str:
    """Return what the knob sets: a variable, options of ``horovodrun``, or our optimizer."""
    if isinstance(spec.sets, Variable):
        return f"`{spec.sets.name}`"
    if isinstance(spec.sets, LauncherOption):
        assert isinstance(spec.knob, CategoricalKnob)
        return ", ".join(f"`--{choice}`" for choice in spec.knob.choices)
    return "our optimizer"


def _live_text(spec: KnobSpec) -> str:
    """Return whether trials in the steps of a training change the knob."""
    knob = spec.knob
    if not knob.exact or knob.name in launch_knobs(reinitializes=True):
        return "no"
    if knob.name in launch_knobs(reinitializes=False):
        return "by initializing again"
    again = sorted(choices_not_live(elastic=False, adds_levels=False).get(knob.name, ()))
    return f"yes; {', '.join(map(knob.format, again))} by initializing again" if again else "yes"


def _row(spec: KnobSpec) -> str:
    knob = spec.knob
    cells = (
        f"[`{knob.name}`](#{knob.name})",
        domain_text(knob),
        knob.format(knob.default),
        "exact" if knob.exact else f"lossy: `{knob.group}`",
        sets_text(spec),
        _live_text(spec),
        re.sub(r" \(docs/[a-z-]*\.md\)", "", spec.when),
    )
    return f"| {' | '.join(cells)} |"


def _filled(text: str) -> str:
    words = " ".join(text.split())
    return textwrap.fill(words, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _replaced(page: str, part: str, text: str) -> str:
    begin, end = (mark.format(part=part) for mark in _MARKS)
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the page lacks the marks {begin} and {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"
