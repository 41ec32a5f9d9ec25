"""What a trial shares with everybody: the kernel's folders, sockets, and caches.

A cache that were private would be filled anew by every trial: by downloads, and by compilers.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import os
import stat
from collections.abc import Mapping

_ALWAYS = ("/dev", "/proc", "/sys", "/run", "/var/run")
#: Variables that name a cache, where it is without them (below the home), and whether it is made
#: where it is not there.
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
    # What the processes of MPI and of CUDA's MPS exchange.
    ("PMIX_SERVER_TMPDIR", "", False),
    ("CUDA_MPS_PIPE_DIRECTORY", "", False),
)
_MPS = "/tmp/nvidia-mps"
_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


def shared_paths(environment: Mapping[str, str], unix_sockets: str) -> list[str]:
    """Folders and sockets that are there, each by its real path.

    Caches that variables name are made where they are missing, and so are those that a trial
    would fill most likely.

    Args:
        environment: Variables of the rank.
        unix_sockets: Text of ``/proc/net/unix``.
    """
    home = environment.get("HOME", "")
    paths = [*_ALWAYS, _MPS]
    for variable, usual, made in _CACHES:
        path = environment.get(variable, "")
        if path:
            _make(path)
        elif home and usual:
            path = os.path.join(home, usual)
            if made or (variable == "TRITON_CACHE_DIR" and any(map(os.path.exists, _DEVICES))):
                _make(path)
        if path:
            paths.append(path)
    paths.append(_inductor_cache(environment))
    _make(paths[-1])
    paths += _compiled_scripts()
    paths += [path for path in _sockets(unix_sockets) if _is_socket(path)]
    return sorted({os.path.realpath(path) for path in paths if os.path.exists(path)} - {"/", home})


def _inductor_cache(environment: Mapping[str, str]) -> str:
    """As in ``torch/_inductor/runtime/cache_dir_utils.py``."""
    named = environment.get("TORCHINDUCTOR_CACHE_DIR", "")
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        user = ""
    return named or f"{environment.get('TMPDIR', '/tmp')}/torchinductor_{user}"


def _compiled_scripts() -> list[str]:
    """What Python has compiled in the working directory and just below."""
    return [*glob.glob("__pycache__"), *glob.glob("*/__pycache__"), *glob.glob("*/*/__pycache__")]


def _sockets(text: str) -> list[str]:
    """Paths of the sockets that processes of this host listen on."""
    words = (line.split(None, 7) for line in text.splitlines()[1:])
    return [each[7] for each in words if len(each) == 8 and each[7].startswith("/")]


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError:
        return False


def _make(path: str) -> None:
    with contextlib.suppress(OSError):  # not ours to make: it stays missing
        os.makedirs(path, mode=0o700, exist_ok=True)
