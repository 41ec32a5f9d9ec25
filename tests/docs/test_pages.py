"""Pages that repeat what the code declares: every knob, every option, with what holds."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from hvd_autosync import __version__
from hvd_autosync.engine.option_values import option_name
from hvd_autosync.engine.options import Options
from hvd_autosync.reporting.knob_page import cost_page, knob_page
from hvd_autosync.search_space import CATALOGUE, Knob
from hvd_autosync.search_space.catalogue import FAMILIES
from hvd_autosync.search_space.knobs import LOSSY_GROUPS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_knobs_is_made_from_their_declarations() -> None:
    page = (DOCS / "knobs.md").read_text(encoding="utf-8")
    assert page == knob_page(page, FAMILIES), "run python tools/write_knob_pages.py"


def test_the_terms_of_the_cost_model_are_those_of_the_declarations() -> None:
    page = (DOCS / "cost-model.md").read_text(encoding="utf-8")
    assert page == cost_page(page, FAMILIES), "run python tools/write_knob_pages.py"


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="end of table"):
        knob_page("# Knobs\n<!-- table: made by tools/write_knob_pages.py -->\n", FAMILIES)


@pytest.mark.parametrize("knob", CATALOGUE, ids=lambda knob: knob.name)
def test_every_knob_has_a_place_of_its_own_that_says_when_it_matters(knob: Knob) -> None:
    page = (DOCS / "knobs.md").read_text(encoding="utf-8")
    (section,) = re.findall(
        rf'^<span id="{knob.name}"></span>.*?(?=^## |^<span|^<!--|\Z)', page, re.M | re.S
    )
    assert f"`{knob.name}`" in section and len(section.split()) > 25


@pytest.mark.parametrize("option", [each.name for each in fields(Options)])
def test_the_guide_of_the_flag_has_every_option_with_its_default(option: str) -> None:
    page = (DOCS / "flag.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith(f"| `{option_name(option)}")]
    if option == "allow":
        assert {row.split("`")[1].split()[-1] for row in rows} == set(LOSSY_GROUPS)
        return
    (row,) = rows
    default = getattr(Options(), option)
    if isinstance(default, (int, float)) and not isinstance(default, bool):
        assert row.split("|")[2].strip() == f"{default:g}"
    elif isinstance(default, str):
        assert row.split("|")[2].strip() == f"`{default}`"
    else:
        assert default in (None, False)


def test_the_guide_of_the_flag_has_no_option_that_is_none() -> None:
    page = (DOCS / "flag.md").read_text(encoding="utf-8")
    known = {option_name(each.name) for each in fields(Options)}
    assert set(re.findall(r"--autosync-[a-z-]*[a-z]", page)) <= known


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md"]
)
def test_links_of_pages_beside_the_site_lead_somewhere(page: str) -> None:
    path = DOCS.parent / page
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_the_citation_names_the_papers_and_leaves_the_version_to_the_package() -> None:
    cited = yaml.safe_load((DOCS.parent / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0" and "version" not in cited
    assert [paper["year"] for paper in cited["references"]] == [2020, 2024, 2021]
    changes = (DOCS.parent / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {__version__} - " in changes
