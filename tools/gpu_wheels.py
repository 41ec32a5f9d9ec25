"""Gather what ``make gpu-check`` needs on a machine without a network.

    python tools/gpu_wheels.py --python 3.12 --without botorch,numpy,scipy

It takes what this environment has installed, in the same versions but for the other machine's
Python, and Horovod's sources. torch is never among it: that machine has its own build.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import subprocess
from pathlib import Path

from horovod_build import BUILD_REQUIREMENTS, HOROVOD_VERSION, PIP, fail
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parents[1] / "build" / "gpu-wheels"
#: What the checks need besides the package: names of distributions.
CHECKERS = ("hypothesis", "pytest", "pytest-timeout", "setuptools")
#: Versions of glibc that wheels are made for, newest first.
_GLIBCS = ("2_34", "2_28", "2_27", "2_24", "2_17", "2_12", "2_5")


def installed_closure(*names: str) -> dict[str, str]:
    """Version of each distribution and of all that it needs, in this environment, without torch.

    Args:
        names: Distributions; ``name[extra]`` takes an extra with it.
    """
    found: dict[str, str] = {}
    left = [Requirement(name) for name in names]
    while left:
        wanted = left.pop()
        name = canonicalize_name(wanted.name)
        if name == "torch" or (name in found and not wanted.extras):
            continue
        distribution = importlib.metadata.distribution(name)
        found[name] = distribution.version
        for line in distribution.requires or ():
            needed = Requirement(line)
            extras = wanted.extras or {""}
            if not needed.marker or any(needed.marker.evaluate({"extra": e}) for e in extras):
                left.append(needed)
    return found


def download(folder: Path, python: str, requirements: list[str]) -> None:
    """Wheels for another Python, without what they need in turn."""
    platforms = [f"manylinux_{glibc}_{platform.machine()}" for glibc in _GLIBCS]
    platforms += [f"manylinux{year}_{platform.machine()}" for year in (2014, 2010, 1)]
    command = [*PIP, "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    command += ["--implementation", "cp", "--python-version", python]
    command += [word for each in platforms for word in ("--platform", each)]
    if subprocess.run([*command, *requirements]).returncode:
        fail("pip cannot download these wheels")


def main() -> None:
    """Gather wheels and sources."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--python", default=platform.python_version(), help="version of the other machine's Python")
    add("--without", default="", help="names, with commas, of what that machine has already")
    arguments = parser.parse_args()

    without = {canonicalize_name(name) for name in arguments.without.split(",")}
    closure = installed_closure("hvd-autosync[examples]", "horovod", *CHECKERS)
    pinned = [
        f"{name}=={version}"
        for name, version in closure.items()
        if name not in {"hvd-autosync", "horovod", *without}
    ]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for requirements in (pinned, [*BUILD_REQUIREMENTS]):  # which may differ in a version
        download(FOLDER, arguments.python, requirements)
    sources = [*PIP, "download", "-q", "--no-deps", "--no-binary=:all:", "--no-build-isolation"]
    if subprocess.run([*sources, "-d", str(FOLDER), f"horovod=={HOROVOD_VERSION}"]).returncode:
        fail("pip cannot download Horovod's sources")
    files = [*FOLDER.iterdir()]
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} files, {size / 1e6:.0f} MB, in {FOLDER}: copy this checkout with them")


if __name__ == "__main__":
    main()
