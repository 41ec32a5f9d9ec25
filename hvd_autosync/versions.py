"""Versions of everything that a study's numbers depend on."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_OURS = "hvd-autosync"
_PACKAGES = (_OURS, "horovod", "torch", "botorch", "gpytorch", "numpy")
#: What decides which trial comes next: modules and packages of ours.
_DECIDING = (
    "confirm.py", "cost", "decision.py", "finalists.py", "learner", "quality.py", "search_space",
    "turns.py",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Package name -> version, for Python and the packages that are installed.

    Ours ends with a digest of its sources that decide what is tried: between two releases the same
    number stands for many of them.
    """
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if _OURS in found:
        found[_OURS] += f"+{_digest()}"
    return found


@cache
def _digest() -> str:
    here = Path(__file__).parent
    found = hashlib.sha256()
    for name in _DECIDING:
        place = here / name
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            found.update(f"{path.relative_to(here)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:8]


def other_versions(recorded: Mapping[str, str]) -> Iterator[str]:
    """A line for each package that has another version here than ``recorded`` says."""
    here = versions()
    for package, version_there in recorded.items():
        if here.get(package) != version_there:
            yield f"{package} was {version_there}, here it is {here.get(package, 'missing')}"
