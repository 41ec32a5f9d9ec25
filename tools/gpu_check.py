"""Show on a machine with one GPU, without a network, whatever one GPU can show.

    python tools/gpu_wheels.py --python 3.12     # before, on a machine with a network
    make gpu-check PYTHON=/path/to/python3       # there: one that has torch for GPUs

It makes two environments over that Python: one whose Horovod sends gradients on GPUs through the
host, so that two ranks can share the device, and one whose Horovod has NCCL. In them run the cases
of ``tests/runtime`` with tensors on the GPU, and ``tests/test_gpu.py``. What they print is in
``build/gpu-check``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import time
import venv
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WHEELS = ROOT / "build" / "gpu-wheels"
REPORTS = ROOT / "build" / "gpu-check"
#: Horovod's wheels, once they are built.
CACHE = ROOT / "build" / "gpu-cache"
#: Groups of ``tests/runtime/test_on_ranks.py`` that do not depend on where tensors are.
GROUPS = ("plain", "exchanges", "codecs", "lossless", "loops", "methods", "reinitialize")
_CASES = "tests/runtime/test_on_ranks.py"
#: Names of checks that measure, so that nothing runs beside them; each is a test of this file.
MEASURING = {
    "events": "test_events_time_what_the_device_does",
    "live study": "test_a_training_is_tuned_in_its_own_steps",
    "fork servers": "test_fork_servers_never_open_the_device",
}
_MEASURED = "tests/test_gpu.py"


class Check(NamedTuple):
    """One run of pytest.

    Attributes:
        name: Its name in the table.
        environment: Folder of the environment.
        arguments: Of pytest.
    """

    name: str
    environment: Path
    arguments: tuple[str, ...]


class Outcome(NamedTuple):
    """What came of a check."""

    check: Check
    passed: int
    failed: int
    skipped: int
    seconds: float


def variables(environment: Path) -> dict[str, str]:
    """Of commands in an environment: nothing comes from a network."""
    return {
        **os.environ,
        "CASES_DEVICE": "cuda",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_FIND_LINKS": str(WHEELS),
        "PIP_NO_INDEX": "1",
        "XDG_CACHE_HOME": str(CACHE),
    }


def make_environment(environment: Path, *options: str) -> None:
    """Make an environment over this one, with Horovod.

    Args:
        environment: Its folder.
        options: Of ``horovod_wheel.py``.
    """
    venv.create(environment, with_pip=False, symlinks=True)
    packages = environment / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # An environment over an environment would see only the system's packages. pip is among these,
    # and what setuptools puts into a .pth file of its own: distutils.
    below = sysconfig.get_path("purelib")
    (packages / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    within(environment, str(ROOT / "tools" / "horovod_wheel.py"), "--without-mpi", *options)


def install_package(environment: Path) -> None:
    """Install the package and what the checks need; not twice at once from one checkout."""
    pip = ("-m", "pip", "install", "-q", "--disable-pip-version-check")
    within(environment, *pip, "-e", f"{ROOT}[examples]", "hypothesis", "pytest", "pytest-timeout")


def within(environment: Path, *words: str) -> None:
    """Run an environment's Python."""
    command = [str(environment / "bin" / "python"), *words]
    if subprocess.run(command, env=variables(environment), cwd=ROOT).returncode:
        sys.exit(f"error: {environment.name} could not be made: {' '.join(command)}")


def run(check: Check) -> Outcome:
    """Run a check, with its output and results in files."""
    report = REPORTS / f"{check.name.replace(' ', '-')}.xml"
    command = [str(check.environment / "bin" / "python"), "-m", "pytest", "-p", "no:cacheprovider"]
    report.unlink(missing_ok=True)  # of an earlier run
    start = time.monotonic()
    with report.with_suffix(".log").open("w") as log:
        subprocess.run(
            [*command, f"--junitxml={report}", *check.arguments],
            env=variables(check.environment),
            cwd=ROOT,
            stdout=log,
            stderr=log,
            check=False,
        )
    seconds = time.monotonic() - start
    if not report.exists():  # pytest itself failed
        return Outcome(check, 0, 1, 0, seconds)
    suite = next(ElementTree.parse(report).iter("testsuite"))
    count = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    passed = count["tests"] - failed - count["skipped"]
    # A check of which nothing ran shows nothing.
    return Outcome(check, passed, failed or int(passed == 0), count["skipped"], seconds)


def show(outcome: Outcome) -> int:
    """Print a line of the table; returns how much failed."""
    check, passed, failed, skipped, seconds = outcome
    print(f"{check.name:14}{passed:8}{failed:8}{skipped:9}{seconds:7.0f}", flush=True)
    return failed


def main() -> int:
    """Prepare, run every check, and print a table; 0 if all passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", default="", help="names of checks, with commas")
    add("--at-once", type=int, default=max(len(os.sched_getaffinity(0)) // 4, 1), help="of cases")
    arguments = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        sys.exit(f"error: torch {torch.__version__} of {sys.executable} finds no GPU")
    if not WHEELS.is_dir():
        sys.exit(f"error: there is no {WHEELS}; gather it before: python tools/gpu_wheels.py")
    by_host, by_nccl = ROOT / ".venv-gpu", ROOT / ".venv-gpu-nccl"
    checks = [
        *(Check(name, by_host, (f"{_MEASURED}::{test}",)) for name, test in MEASURING.items()),
        *(Check(name, by_host, (_CASES, "-k", f"{name}-gloo")) for name in GROUPS),
        Check("nccl", by_nccl, ("tests/runtime/test_nccl.py",)),
    ]
    names = arguments.only.split(",") if arguments.only else [check.name for check in checks]
    if unknown := {*names} - {check.name for check in checks}:
        sys.exit(f"error: no check is named {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [check for check in checks if check.name in names]
    REPORTS.mkdir(parents=True, exist_ok=True)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    options = {by_host: ["--without-nccl"], by_nccl: []}
    needed = {check.environment for check in chosen}
    with ThreadPoolExecutor() as pool:
        [
            *pool.map(
                lambda environment: make_environment(environment, *options[environment]), needed
            )
        ]
    for environment in needed:
        install_package(environment)
    print(f"{'check':14}{'passed':>8}{'failed':>8}{'skipped':>9}{'s':>7}", flush=True)
    alone = [check for check in chosen if check.name in MEASURING]
    failed = sum(show(run(check)) for check in alone)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        failed += sum(map(show, pool.map(run, (c for c in chosen if c not in alone))))
    print(f"output and results: {REPORTS}")
    return int(failed > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
