"""What Horovod's launcher does otherwise in a process that our driver has started."""

from __future__ import annotations

import codecs
import functools
import os
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, NoReturn

from hvd_autosync.util import patches


def spare_checks(controllers: Collection[str]) -> None:
    """Do not check whether Horovod has these controllers.

    For a check it imports torch in a process of its own (``horovod/common/util.py``), which takes a
    second and more.
    """
    if "gloo" in controllers:
        patches.install("check of gloo", _found)
    if "mpi" in controllers:
        patches.install("check of mpi", _found)


def _found(_: Callable[..., object]) -> Callable[..., bool]:
    return lambda verbose=False: True


def become_mpirun() -> None:
    """Let the shell that starts ``mpirun`` become it.

    The signal that ends this process when the driver is killed reaches no child of a shell
    (``mpi_run`` of ``horovod/runner/mpi_run.py``).
    """

    def execve(path: str, words: list[str], environment: dict[str, str]) -> NoReturn:
        *shell, line = words
        os.execve(path, [*shell, f"exec {line}"], environment)

    def replaced(before: ModuleType) -> ModuleType:
        shim = ModuleType("os")
        shim.__dict__.update(vars(before))
        shim.execve = execve  # type: ignore[attr-defined]
        return shim

    patches.install("shell of mpirun", replaced)


def pass_on_all_bytes() -> None:
    """Pass on what ranks print even if it is no UTF-8.

    The thread that reads a rank's output would end at such a byte (``prefix_connection`` of
    ``horovod/runner/common/util/safe_shell_exec.py``): all later lines would be lost, messages of
    trials among them, and the rank would wait for ever once the pipe is full.
    """

    def decoder(name: str) -> Callable[[], codecs.IncrementalDecoder]:
        return functools.partial(codecs.getincrementaldecoder(name), "replace")

    def replaced(before: ModuleType) -> ModuleType:
        shim = ModuleType("codecs")
        shim.__dict__.update(vars(before))
        shim.getincrementaldecoder = decoder  # type: ignore[attr-defined]
        return shim

    patches.install("decoder of output", replaced)


def order_interfaces() -> None:
    """Let all launches of a job take the same one of its networks.

    Gloo uses the first interface of a set (``create_run_env_vars`` of ``horovod/runner/
    gloo_run.py``), whose order is another one in each process.
    """

    def ordered(found: Callable[..., Collection[str]]) -> Callable[..., list[str]]:
        def common_interfaces(*args: Any, **keywords: Any) -> list[str]:
            return sorted(found(*args, **keywords) or ())

        return common_interfaces

    patches.install("order of interfaces", ordered)
