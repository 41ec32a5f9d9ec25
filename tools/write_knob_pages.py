"""Writes the parts of ``docs/`` that are made of the declarations of the knobs."""

from __future__ import annotations

from pathlib import Path

from hvd_autosync.reporting.knob_page import cost_page, knob_page
from hvd_autosync.search_space.catalogue import FAMILIES

_DOCS = Path(__file__).parents[1] / "docs"


def main() -> None:
    """Write the pages."""
    for name, make in (("knobs.md", knob_page), ("cost-model.md", cost_page)):
        path = _DOCS / name
        path.write_text(make(path.read_text(encoding="utf-8"), FAMILIES), encoding="utf-8")


if __name__ == "__main__":
    main()
