"""Distributions, built from a copy of the checkout so that nothing is left in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
NOT_SOURCE = (".*", "build", "dist", "*.egg-info", "__pycache__", "docs", "notebooks", "tests")

Build = Callable[[str, Path], Path]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout without what builds leave in it; links stay links."""
    copy = tmp_path_factory.mktemp("source") / "checkout"
    ignore = shutil.ignore_patterns(*NOT_SOURCE)
    return shutil.copytree(CHECKOUT, copy, symlinks=True, ignore=ignore)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """``build(hook, folder)``: what setuptools makes of ``folder`` by a hook of PEP 517 or 660."""

    def build_by(hook: str, folder: Path) -> Path:
        target = tmp_path_factory.mktemp(hook)
        code = f"from setuptools import build_meta; build_meta.{hook}({str(target)!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, text=True, capture_output=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        (built,) = target.iterdir()
        return built

    return build_by


@pytest.fixture(scope="session")
def sdist(build: Build, source: Path) -> Path:
    """The source distribution."""
    return build("build_sdist", source)


@pytest.fixture(scope="session")
def wheel(build: Build, source: Path) -> Path:
    """The wheel, from the checkout."""
    return build("build_wheel", source)


@pytest.fixture(scope="session")
def wheel_of_sdist(build: Build, sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, from the source distribution."""
    folder = tmp_path_factory.mktemp("unpacked")
    shutil.unpack_archive(sdist, folder)
    (unpacked,) = folder.iterdir()
    return build("build_wheel", unpacked)


@pytest.fixture(scope="session")
def editable_wheel(build: Build, source: Path) -> Path:
    """The wheel that ``pip install -e`` installs."""
    return build("build_editable", source)
