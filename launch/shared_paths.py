"""Paths that trials do not keep private: the kernel's folders, sockets and caches.

A private cache would be filled again in every trial, by downloads and compilers.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

_ALWAYS = ("/dev", "/proc", "/sys", "/run", "/var/run")
#: Caches: the variable that names it, its default path below the home folder, and whether it is
#: created if it is missing.
_CACHES = (
    ("XDG_CACHE_HOME", ".cache", True),
    ("HF_HOME", ".cache/huggingface", False),
    ("HF_HUB_CACHE", "", False),
    ("HUGGINGFACE_HUB_CACHE", "", False),
    ("HF_DATASETS_CACHE", "", False),
    ("HF_XET_CACHE", "", False),
    ("TRANSFORMERS_CACHE", "", False),
    ("TORCH_HOME", ".cache/torch", False),
    ("TORCH_EXTENSIONS_DIR", "", False),
    ("TRITON_HOME", "", False),
    ("TRITON_CACHE_DIR", ".triton", False),
    ("CUDA_CACHE_PATH", ".nv", False),
    ("NUMBA_CACHE_DIR", "", False),
    ("MPLCONFIGDIR", ".config/matplotlib", False),
    ("PYTHONPYCACHEPREFIX", "", False),
)
#: Variables that name folders through which processes of MPI and of CUDA's MPS communicate.
_COMMUNICATION = ("PMIX_SERVER_TMPDIR", "CUDA_MPS_PIPE_DIRECTORY")
_MPS = "/tmp/nvidia-mps"
_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


def shared_paths(environment: Mapping[str, str], unix_sockets: str) -> list[str]:
    """Return the shared folders and sockets that exist, by their real paths.

    Missing caches are created if a variable names them or if a trial will probably fill them.

    Args:
        environment: The rank's environment.
        unix_sockets: Text of ``/proc/net/unix``.
    """
    home = environment.get("HOME", "")
    caches = []
    for variable, usual, made in _CACHES:
        path = environment.get(variable, "")
        if path:
            _make(path)
        elif home and usual:
            path = os.path.join(home, usual)
            if made or (variable == "TRITON_CACHE_DIR" and any(map(os.path.exists, _DEVICES))):
                _make(path)
        if path:
            caches.append(path)
    caches.append(_inductor_cache(environment))
    _make(caches[-1])
    private = [os.getcwd(), home, environment.get("TMPDIR") or "/tmp"]
    paths = [*_ALWAYS, _MPS, *(each for each in caches if not _holds_any(each, private))]
    paths += [environment.get(variable, "") for variable in _COMMUNICATION]
    paths += _compiled_scripts()
    paths += [path for path in _sockets(unix_sockets) if _is_socket(path)]
    return sorted({os.path.realpath(path) for path in paths if os.path.exists(path)} - {"/", home})


def _holds_any(folder: str, places: Sequence[str]) -> bool:
    """Return whether a cache is, or contains, one of the folders in which scripts write.

    Then what it shares would be more than the cache.
    """
    real = os.path.realpath(folder)
    return any(Path(os.path.realpath(place)).is_relative_to(real) for place in places if place)


def _inductor_cache(environment: Mapping[str, str]) -> str:
    """Return inductor's cache folder, as ``torch/_inductor/runtime/cache_dir_utils.py`` does."""
    named = environment.get("TORCHINDUCTOR_CACHE_DIR", "")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = ""
    return named or f"{environment.get('TMPDIR', '/tmp')}/torchinductor_{user}"


def _compiled_scripts() -> list[str]:
    """Return Python's byte-code folders in the working directory and two levels below."""
    return [*glob.glob("__pycache__"), *glob.glob("*/__pycache__"), *glob.glob("*/*/__pycache__")]


def _sockets(text: str) -> list[str]:
    """Return the paths of this host's Unix sockets."""
    words = (line.split(None, 7) for line in text.splitlines()[1:])
    return [each[7] for each in words if len(each) == 8 and each[7].startswith("/")]


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _make(path: str) -> None:
    with contextlib.suppress(OSError):  # not permitted: it stays missing
        os.makedirs(path, mode=0o700, exist_ok=True)
