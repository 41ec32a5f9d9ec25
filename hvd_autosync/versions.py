"""Versions of everything that a study's numbers depend on."""

from __future__ import annotations

import platform
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
