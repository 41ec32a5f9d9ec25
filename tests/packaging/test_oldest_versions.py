"""The constraints of ``make test-oldest``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

TOOLS = Path(__file__).parents[2] / "tools"


def test_each_library_has_the_lowest_version_that_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import oldest_versions

    needed = [Requirement(line) for line in oldest_versions.oldest_versions()]
    with_notebook = [Requirement(line) for line in oldest_versions.oldest_versions(["notebook"])]
    sys.modules.pop("oldest_versions")
    assert with_notebook[: len(needed)] == needed
    pinned = {each.name: str(each.specifier) for each in with_notebook}
    assert all(text.startswith("==") and "," not in text for text in pinned.values())
    assert "numpy" in pinned and pinned["ipykernel"] == "==7.0"
    assert str(next(each for each in needed if each.name == "tomli").marker) == (
        'python_version < "3.11"'
    )
