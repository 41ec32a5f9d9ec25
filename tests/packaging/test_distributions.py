"""What the sdist and the wheel contain, and what they ask for."""

from __future__ import annotations

import email
import email.message
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

Build = Callable[[str, Path], Path]
FOLDERS_BEHIND_LINKS = ("search_space", "launch")


@pytest.fixture(params=["wheel", "wheel_of_sdist"])
def any_wheel(request: pytest.FixtureRequest) -> Path:
    """Either wheel: they must not differ."""
    return Path(request.getfixturevalue(request.param))


@pytest.fixture
def metadata(wheel: Path) -> email.message.Message:
    """The wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def package_files(source: Path) -> set[str]:
    """Python files of the package, as a user imports them: ``hvd_autosync/launch/job.py``."""
    own = {path.relative_to(source) for path in (source / "hvd_autosync").rglob("*.py")}
    linked = {
        Path("hvd_autosync") / path.relative_to(source)
        for folder in FOLDERS_BEHIND_LINKS
        for path in (source / folder).rglob("*.py")
    }
    return {str(path) for path in own | linked}


def test_wheel_has_every_module_the_marker_and_the_pth(any_wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(any_wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {name for name in names if name.endswith(".py")}
    assert modules == package_files(source)
    assert {"hvd_autosync.pth", "hvd_autosync/py.typed"} <= names
    assert {name.partition("/")[0] for name in names} == {"hvd_autosync", "hvd_autosync.pth"}


def test_wheel_has_files_in_place_of_links(any_wheel: Path) -> None:
    with zipfile.ZipFile(any_wheel) as archive:
        for folder in FOLDERS_BEHIND_LINKS:
            assert f"hvd_autosync/{folder}/__init__.py" in archive.namelist()
            assert f"hvd_autosync/{folder}" not in archive.namelist()


def test_wheel_has_nothing_of_an_earlier_build(build: Build, source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "checkout", symlinks=True)
    removed = copy / "build" / "lib" / "hvd_autosync" / "removed.py"
    removed.parent.mkdir(parents=True, exist_ok=True)
    removed.touch()
    with zipfile.ZipFile(build("build_wheel", copy)) as archive:
        assert "hvd_autosync/removed.py" not in archive.namelist()


def test_sdist_has_files_in_place_of_links_and_what_a_build_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert all(member.isreg() or member.isdir() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    assert {"setup.cfg", "setup.py", "pyproject.toml", "LICENSE", "hvd_autosync.pth"} <= names
    assert {f"hvd_autosync/{folder}/__init__.py" for folder in FOLDERS_BEHIND_LINKS} <= names


def test_metadata_states_licence_and_python(metadata: email.message.Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"


def test_requirements_are_lower_bounds(metadata: email.message.Message) -> None:
    for requirement in metadata.get_all("Requires-Dist", []):
        bounds = re.findall(r"[<>=~!]+", requirement.partition(";")[0])
        assert bounds in ([], [">="]), requirement


def test_torch_and_horovod_stay_the_users(metadata: email.message.Message) -> None:
    requirements = metadata.get_all("Requires-Dist", [])
    names = {re.split(r"[^A-Za-z0-9_-]", text)[0].lower(): text for text in requirements}
    assert not {"torch", "horovod"} & names.keys()
    assert "extra ==" in names["mpi4py"]
