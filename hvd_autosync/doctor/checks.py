"""Checks of an installation: problems that would prevent tuning, and their remedies.

The checks use the real programs: the plugin's runs ``horovodrun --help``, the store's writes to the
store, a host's runs a command on the host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from hvd_autosync.doctor.finding import Finding, Severity
from hvd_autosync.doctor.hosts import check_hosts
from hvd_autosync.errors import AutosyncError
from hvd_autosync.launch.command import OPEN_MPI_5_BINDING, launcher_environment, open_mpi_major
from hvd_autosync.runtime.driver.environment import DISABLE_VARIABLE
from hvd_autosync.search_space import HorovodBuild
from hvd_autosync.util.patches import PATCHES, missing_targets, tested_here
from hvd_autosync.util.private_names import TESTED_VERSIONS, missing_names, untested
from hvd_autosync.util.variables import is_on
from hvd_autosync.util.versions import versions

_TESTED_HOROVOD = TESTED_VERSIONS["horovod"].rpartition(".")[0] + "."
_NEEDED = ("torch", "botorch", "gpytorch")
_TIMEOUT_S = 120


def examine(
    hosts: Sequence[str] = (),
    *,
    ssh: tuple[int | None, str | None] = (None, None),
    store: str | None = None,
) -> Iterator[Finding]:
    """Run all checks, each when its finding is requested.

    Args:
        hosts: Names of the hosts of a job; empty: only this machine is checked.
        ssh: Port and identity file for ssh to the hosts; ``None``: ssh's defaults.
        store: Location of the store; ``None``: the default store.
    """
    yield check_versions()
    yield from check_horovod()
    yield check_private_names()
    yield check_patches()
    yield check_plugin()
    yield from check_hosts(hosts, ssh)
    yield check_store(store)
    yield check_threads()


def check_versions() -> Finding:
    """Check the versions of Python and of the libraries that the tuner needs."""
    found = versions()
    text = ", ".join(f"{name} {number}" for name, number in found.items())
    missing = [name for name in _NEEDED if name not in found]
    if missing:
        return Finding(
            "versions",
            Severity.FAIL,
            f"{text}; without {', '.join(missing)}",
            f"Run pip install {' '.join(missing)}.",
        )
    if untested("torch"):
        tested = TESTED_VERSIONS["torch"]
        return Finding(
            "versions",
            Severity.WARN,
            f"{text}; the newest torch that was tested is {tested}",
            f"If a job fails only with --autosync, install torch {tested}.",
        )
    return Finding("versions", Severity.OK, text)


def check_private_names() -> Finding:
    """Return whether the installed packages have the undocumented names that this one uses."""
    missing = list(missing_names())
    if not missing:
        return Finding("private names", Severity.OK, "all that are used exist")
    lines = [f"{name} ({row.why}; {', '.join(row.used_in)})" for name, row in missing]
    packages = sorted({row.package for _, row in missing} & TESTED_VERSIONS.keys())
    tested = " and ".join(f"{package} {TESTED_VERSIONS[package]}" for package in packages)
    return Finding(
        "private names",
        Severity.FAIL if {"torch", "horovod"}.intersection(packages) else Severity.WARN,
        f"missing: {'; '.join(lines)}",
        f"Install {tested}, the tested version{'s' if len(packages) > 1 else ''}."
        if tested
        else "Use an older Python, and report the output of hvd-autosync doctor --json.",
    )


def check_patches() -> Finding:
    """Return whether the installed packages have everything that this one replaces in them."""
    missing = list(missing_targets())
    if missing:
        lines = [f"{name} ({patch.why}; {patch.used_in})" for name, patch in missing]
        packages = sorted({package for _, patch in missing for package in patch.packages})
        tested = " and ".join(f"{package} {TESTED_VERSIONS[package]}" for package in packages)
        return Finding(
            "patches",
            Severity.FAIL,
            f"cannot be replaced, as they are missing: {'; '.join(lines)}",
            f"Install {tested}, the tested version{'s' if len(packages) > 1 else ''}.",
        )
    return Finding("patches", Severity.OK, f"the targets of all {len(PATCHES)} exist")


def patch_table() -> list[dict[str, str]]:
    """Return a row for each patch of other packages, with the versions that it was tested with.

    Keys: name, targets, why, used_in (the module that installs it, as a path in ``hvd_autosync/``),
    tested (such as ``"torch 2.13.0"``; functions of Python itself are the same in every version)
    and here, how the installed versions compare with these.
    """
    rows = []
    for patch in PATCHES:
        tested = [f"{package} {TESTED_VERSIONS[package]}" for package in patch.packages]
        here = {package: tested_here(package) for package in patch.packages}
        alike = len(set(here.values())) == 1
        words = [next(iter(here.values()))] if alike else [f"{p}: {w}" for p, w in here.items()]
        rows.append(
            {
                "name": patch.name,
                "targets": patch.targets.replace(" ", ", "),
                "why": patch.why,
                "used_in": patch.used_in,
                "tested": ", ".join(tested) or "every Python",
                "here": ", ".join(words) or "tested",
            }
        )
    return rows


def check_horovod() -> Iterator[Finding]:
    """Check the version of Horovod and the controllers that it can use."""
    from hvd_autosync.launch.facts import horovod_build, mpi_built

    try:
        build, has_mpi = horovod_build(), mpi_built()
    except AutosyncError as error:
        yield Finding("Horovod", Severity.FAIL, error.message, error.hint)
        return
    offers = {"Gloo": build.gloo, "MPI": has_mpi, "NCCL": build.nccl}
    text = f"{build.version} with {', '.join(n for n, has in offers.items() if has) or 'nothing'}"
    if build.version.startswith(_TESTED_HOROVOD):
        yield Finding("Horovod", Severity.OK, text)
    else:
        remedy = "Install Horovod 0.28: the knobs are those of this version."
        yield Finding("Horovod", Severity.WARN, text, remedy)
    if not (build.gloo or has_mpi):
        yield Finding(
            "controller",
            Severity.FAIL,
            "Horovod has neither Gloo nor MPI",
            "Build it again with CMake installed, for Gloo.",
        )
    if build.gloo:
        yield Finding("controller", Severity.OK, "Gloo")
    if has_mpi:
        yield _check_mpi(build)


def _check_mpi(build: HorovodBuild) -> Finding:
    """Check whether MPI jobs can be started: ``mpirun``, its version, and mpi4py."""
    path = launcher_environment({})["PATH"]
    program = shutil.which("mpirun", path=path)
    if program is None:
        return Finding(
            "controller",
            Severity.WARN if build.gloo else Severity.FAIL,
            "MPI is built in, but there is no mpirun on the PATH; horovodrun uses MPI by default",
            "Put mpirun on the PATH, or pass --gloo to horovodrun.",
        )
    shown = _output([program, "--version"]).partition("\n")[0]
    text = f"MPI: {shown or 'of unknown version'} ({program})"
    if find_spec("mpi4py") is None:
        return Finding(
            "controller",
            Severity.WARN,
            f"{text}, without mpi4py",
            "Run pip install 'hvd-autosync[mpi]'.",
        )
    if (open_mpi_major() or 0) >= 5:
        return Finding(
            "controller",
            Severity.OK,
            f"{text}; it rejects Horovod's own -bind-to, so --autosync supplies a replacement",
            f"For jobs without --autosync pass '{OPEN_MPI_5_BINDING}' to horovodrun --mpi.",
        )
    return Finding("controller", Severity.OK, text)


def check_plugin() -> Finding:
    """Check whether ``horovodrun --help`` lists ``--autosync``."""
    if is_on(os.environ.get(DISABLE_VARIABLE, "")):
        return Finding(
            "plugin",
            Severity.FAIL,
            f"switched off by {DISABLE_VARIABLE}",
            f"Unset {DISABLE_VARIABLE}.",
        )
    program = shutil.which("horovodrun")
    beside = Path(sys.executable).with_name("horovodrun")
    if program is None:
        if not _knows_autosync([sys.executable, "-m", "horovod.runner.launch"]):
            return _inactive(f"{sys.executable} -m horovod.runner.launch")
        return Finding(
            "plugin",
            Severity.WARN,
            "active, but there is no horovodrun on the PATH",
            f"Add {beside.parent} to the PATH.",
        )
    if _knows_autosync([program]):
        return Finding("plugin", Severity.OK, f"active: {program} has --autosync")
    if beside.exists() and not beside.samefile(program) and _knows_autosync([str(beside)]):
        return Finding(
            "plugin",
            Severity.FAIL,
            f"{program} belongs to another Python",
            f"Put {beside.parent} first on the PATH.",
        )
    return _inactive(program)


def _inactive(program: str) -> Finding:
    """Return the finding for a plugin that is not active, with the reason if the files show it."""
    file = "hvd_autosync.pth"
    if any(Path(folder, file).exists() for folder in sys.path if folder):
        return Finding(
            "plugin",
            Severity.FAIL,
            f"{program} does not have --autosync",
            f"Run {program} --help; its first lines give the reason.",
        )
    return Finding(
        "plugin",
        Severity.FAIL,
        f"{file} is not installed, so nothing adds --autosync",
        "Run pip install --force-reinstall --no-deps . in a checkout.",
    )


def _knows_autosync(launcher: list[str]) -> bool:
    return "--autosync-trials" in _output([*launcher, "--help"])


def _output(command: list[str]) -> str:
    """Return the standard output of ``command``; empty if it cannot be run."""
    command = [str(Path(command[0]).absolute()), *command[1:]]  # of a PATH with relative folders
    try:
        # The working directory must not matter, as `python -m` imports from it.
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def check_store(location: str | None) -> Finding:
    """Check whether traces can be written."""
    from hvd_autosync.traces import TraceStore

    try:
        store = TraceStore(location)
        study = store.create_study(job_key="doctor", command=(), settings={}, versions={})
        store.delete(study.study_id)
    except AutosyncError as error:
        return Finding("store", Severity.FAIL, error.message, error.hint)
    return Finding("store", Severity.OK, f"{store.name} is writable")


def check_threads() -> Finding:
    """Check whether the ranks of a host would compete for its processors."""
    cores = len(os.sched_getaffinity(0))
    given = os.environ.get("OMP_NUM_THREADS", "")
    advice = f"export OMP_NUM_THREADS={cores}/RANKS-PER-HOST, at least 1."
    if cores == 1:
        return Finding("threads", Severity.OK, "one core")
    if not given:
        return Finding(
            "threads",
            Severity.WARN,
            f"OMP_NUM_THREADS is not set: each rank uses all {cores} cores, so the ranks of a host "
            "compete for them",
            advice,
        )
    threads = given.partition(",")[0]
    if threads.isdecimal() and int(threads) > cores:
        return Finding(
            "threads",
            Severity.WARN,
            f"OMP_NUM_THREADS={given} is more than the {cores} cores",
            advice,
        )
    return Finding("threads", Severity.OK, f"OMP_NUM_THREADS={given} on {cores} cores")
