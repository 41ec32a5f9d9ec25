from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hvd_autosync.engine.study_options import load_restrictions
from hvd_autosync.reporting.space import (
    RESTRICTIONS_HELP,
    applies_when,
    catalogue_table,
    domain_text,
    space_table,
)
from hvd_autosync.search_space import CATALOGUE, catalogue_knob


def rendered(table: Table) -> str:
    console = Console(width=140, markup=False)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_every_knob_of_the_catalogue_says_when_it_applies() -> None:
    assert all(len(applies_when(knob.name)) > 4 for knob in CATALOGUE)


def test_the_catalogue_has_domain_default_and_exactness() -> None:
    text = rendered(catalogue_table())
    row = text[text.index("cycle_time_ms") :]
    assert "0.1 ms to 100 ms" in row and "default 1 ms" in row
    assert "lossy, group codec" in text and "applies: --autosync-allow codec" in text
    assert all(knob.name in text for knob in CATALOGUE)


def test_a_space_has_its_own_domains_conditions_and_held_knobs(author: Any) -> None:
    text = rendered(space_table(author.space, "The space"))
    assert text.startswith("The space")
    assert "0 to 20" in text  # tensor groups: no more than tensors
    assert "only while buckets is 1 to 20" in text
    assert "fixed at 1024" in text and "set by your options or environment" in text


def test_a_knob_with_one_value_left_says_so() -> None:
    knob = catalogue_knob("cycle_time_ms")
    assert domain_text(knob.restrict(2.0, 2.0)) == "only 2 ms"  # type: ignore[call-arg,arg-type]


def test_the_printed_restrictions_can_be_used(tmp_path: Path) -> None:
    lines = RESTRICTIONS_HELP.splitlines()
    file = tmp_path / "space.toml"
    file.write_text("\n".join(line.strip() for line in lines if line.startswith("  ")))
    document = load_restrictions(str(file))
    assert set(document["knobs"]) == {"cycle_time_ms", "fusion_threshold_bytes", "controller"}
