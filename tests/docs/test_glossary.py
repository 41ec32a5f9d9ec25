"""The glossary: its words are defined once, its places exist, and retired words are gone."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "glossary.md"
#: Files that must name retired words: the page itself, history, and readers of old records.
EXEMPT = {
    "CHANGELOG.md",
    "benchmarks/learners.py",
    "docs/glossary.md",
    "hvd_autosync/traces/aliases.py",
    "tests/docs/test_glossary.py",
    "tests/traces/test_validity.py",
    "tests/traces/test_rows.py",
}
#: Recorded results keep the words of their time.
RESULTS = ("benchmarks/results/", "benchmarks/traces/")
TEXTS = (".cfg", ".html", ".ini", ".ipynb", ".jinja", ".js", ".md", ".py", ".toml", ".yaml", ".yml")


def table(heading: str) -> list[list[str]]:
    """Cells of the rows of the table below a heading."""
    section = PAGE.read_text(encoding="utf-8").partition(f"{heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def retired_words() -> list[str]:
    return [word for row in table("## Retired words") for word in re.findall(r"`(\w+)`", row[0])]


def texts() -> Iterator[tuple[str, str]]:
    """Name and text of each file that people or programs read."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.splitlines():
        known = name.endswith(TEXTS) or name == "Makefile"
        if known and name not in EXEMPT and not name.startswith(RESULTS):
            path = ROOT / name
            if path.is_file():
                yield name, path.read_text(encoding="utf-8")


def found(words: list[str], text: str) -> Iterator[tuple[int, str]]:
    """Line and word of each retired word, also as a part of ``snake_case`` and ``CamelCase``."""
    pattern = re.compile(rf"(?<![a-z])(?:{'|'.join(words)})(?![a-z])")
    for number, line in enumerate(text.splitlines(), 1):
        split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", line).lower()
        for match in pattern.finditer(split):
            yield number, match.group()


def test_no_retired_word_is_left() -> None:
    words = retired_words()
    assert len(words) > 40
    left = [
        f"{name}:{number}: {word}" for name, text in texts() for number, word in found(words, text)
    ]
    assert not left, "\n".join(left)


def test_a_retired_word_is_found_within_identifiers() -> None:
    text = "rest\nclass CostExpert:\n    prior_EXPERTS = 1\nexpertise"
    assert list(found(["expert", "experts"], text)) == [(2, "expert"), (3, "experts")]


def test_terms_are_in_order_and_their_places_exist() -> None:
    rows = table("# Glossary")
    terms = [row[0] for row in rows]
    assert len(terms) > 90
    assert terms == sorted(set(terms), key=lambda term: term.casefold().replace("-", " "))
    for term, _, place in rows:
        for path in re.findall(r"`([\w./-]+\.(?:py|md)|[\w./-]+/)`", place):
            if not path.startswith("horovod/"):
                assert (ROOT / "hvd_autosync" / path).exists(), f"{term}: {path}"
