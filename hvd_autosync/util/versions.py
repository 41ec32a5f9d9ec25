"""Versions of everything that a study's numbers depend on."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("hvd-autosync", "horovod", "torch", "botorch", "gpytorch", "numpy")
#: Name of the digest of our sources that decide which trial comes next: between two releases the
#: same version stands for many of them.
_SOURCES = "hvd-autosync's sources"
#: These rooms.
_DECIDING = ("cost", "learner", "search_space", "study")


def versions() -> dict[str, str]:
    """Package name -> version, for Python and the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def deciding_versions() -> dict[str, str]:
    """The same, with our sources that decide what is tried."""
    return {**versions(), _SOURCES: _digest()}


@cache
def _digest() -> str:
    return digest(Path(__file__).parents[1], _DECIDING)


def digest(package: Path, rooms: Sequence[str]) -> str:
    """A short digest of all modules of some rooms.

    Args:
        package: The folder that they are in.
        rooms: Their names.

    Raises:
        FileNotFoundError: There is no such room, or nothing in it.
    """
    found = hashlib.sha256()
    for room in rooms:
        paths = sorted((package / room).rglob("*.py"))
        if not paths:
            raise FileNotFoundError(f"{package / room} has no modules")
        for path in paths:
            found.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:8]


def other_versions(recorded: Mapping[str, str]) -> Iterator[str]:
    """A line for each package that has another version here than ``recorded`` says.

    Our sources do not count: what decides is nothing to the step time of what was decided.
    """
    here = versions()
    for package, version_there in recorded.items():
        if package != _SOURCES and here.get(package) != version_there:
            yield f"{package} was {version_there}, here it is {here.get(package, 'missing')}"


def other_deciding_versions(recorded: Mapping[str, str]) -> Iterator[str]:
    """The same, with a line for our sources that decide what is tried."""
    yield from other_versions(recorded)
    there = recorded.get(_SOURCES, "not written down")
    if there != _digest():
        yield f"{_SOURCES} that decide were {there}, here they are {_digest()}"
