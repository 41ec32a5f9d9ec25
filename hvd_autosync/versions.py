"""Versions of everything that a study's numbers depend on."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = ("hvd-autosync", "horovod", "torch", "botorch", "gpytorch", "numpy")


def versions() -> dict[str, str]:
    """Package name -> version, for Python and the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def other_versions(recorded: Mapping[str, str]) -> Iterator[str]:
    """A line for each package that has another version here than ``recorded`` says."""
    here = versions()
    for package, version_there in recorded.items():
        if here.get(package) != version_there:
            yield f"{package} was {version_there}, here it is {here.get(package, 'missing')}"
