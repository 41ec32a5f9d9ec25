"""Versions of all software that a study's results depend on."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = (
    "hvd-autosync",
    "horovod",
    "torch",
    "botorch",
    "gpytorch",
    "linear-operator",  # factorizes the models' covariances
    "numpy",
    "scipy",  # optimizes their hyperparameters
)
#: The packages whose code trials measure.
MEASURED = ("horovod", "torch")
#: Name of the digest of the modules that choose the next trial. The version alone does not identify
#: them between two releases.
_SOURCES = "hvd-autosync's sources"
#: The packages of these modules.
_DECIDING = ("cost", "learner", "search_space", "study")


def versions() -> dict[str, str]:
    """Return package name -> version, for Python and the installed packages."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def deciding_versions() -> dict[str, str]:
    """Return :func:`versions` with the digest of the modules that choose the next trial."""
    return {**versions(), _SOURCES: _digest()}


@cache
def _digest() -> str:
    return digest(Path(__file__).parents[1], _DECIDING)


def digest(package: Path, rooms: Sequence[str]) -> str:
    """Return a short digest of all modules of some packages, and of their data.

    Args:
        package: The folder of the packages.
        rooms: The packages' names.

    Raises:
        FileNotFoundError: A package is missing or has no modules.
    """
    found = hashlib.sha256()
    for room in rooms:
        paths = sorted(p for p in (package / room).rglob("*") if p.suffix in (".py", ".json"))
        if not paths:
            raise FileNotFoundError(f"{package / room} has no modules")
        for path in paths:
            found.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    return found.hexdigest()[:8]


def other_versions(recorded: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each package whose version here differs from the recorded one.

    The digest of the modules that choose trials is left out, because it does not affect the step
    time of a strategy.
    """
    here = versions()
    for package, version_there in recorded.items():
        if package != _SOURCES and here.get(package) != version_there:
            yield f"{package} was {version_there}, here it is {here.get(package, 'missing')}"


def other_deciding_versions(recorded: Mapping[str, str]) -> Iterator[str]:
    """Yield :func:`other_versions` and a line if the modules that choose trials differ."""
    yield from other_versions(recorded)
    there = recorded.get(_SOURCES, "not recorded")
    if there != _digest():
        yield f"{_SOURCES} that choose trials were {there}, here they are {_digest()}"
