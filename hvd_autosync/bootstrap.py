"""Imported by the ``.pth`` file at Python's start, in two kinds of process only.

In Horovod's launcher it adds the plugin's options. In a worker it activates the runtime as soon as
the script imports ``horovod.torch``. The import of this module has these effects.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from types import ModuleType

from hvd_autosync.search_space.horovod_settings import RANK_VARIABLES
from hvd_autosync.util.import_hook import when_imported
from hvd_autosync.util.variables import CONTROLLERS_VARIABLE, JUDGED_VARIABLE, LIVE_VARIABLE, is_on

_LAUNCHER = "horovod.runner.launch"
#: Python's option for a module, perhaps behind others that take no value.
_MODULE = re.compile("-[bBdEhiIOPqRsSuvVx]*m(.*)")
#: ``prctl`` option of Linux (``linux/prctl.h``).
_PR_SET_PDEATHSIG = 1
#: After SIGTERM a launcher gives its processes five seconds to end (``safe_shell_exec.py``); after
#: this many seconds it counts as stuck.
_PATIENCE_S = 15.0
#: ``python -m horovod.runner.launch`` runs this in place of the module's own code, so that the
#: launcher is imported with the plugin instead of executed as ``__main__``.
_RUN_LAUNCHER = f"from {_LAUNCHER} import run_commandline\nrun_commandline()\n"


def _is_launcher(*, ranked: bool) -> bool:
    """Return whether this process is ``horovodrun`` or ``python -m horovod.runner.launch``.

    Args:
        ranked: Whether it has a rank. The script of a rank may have any words; elsewhere another
            program may run the launcher, as a profiler does.
    """
    if not ranked:
        modules = ("horovod.runner", "-mhorovod.runner")
        return any(w.endswith("horovodrun") or w.startswith(modules) for w in sys.orig_argv[1:6])
    words = iter(sys.orig_argv[1:])
    for word in words:
        if module := _MODULE.fullmatch(word):
            return (module[1] or next(words, "")) in ("horovod.runner", _LAUNCHER)
        if word in ("-X", "-W"):
            next(words, "")
        elif not word.startswith("-") or word == "-":
            return word.endswith("horovodrun")
    return False


def _extend_launcher(_: ModuleType, known: Sequence[str], *, driven: bool) -> None:
    from hvd_autosync.commands.flag import extend_launcher
    from hvd_autosync.launch.driven_launcher import (
        become_mpirun,
        order_interfaces,
        pass_on_all_bytes,
        spare_checks,
    )
    from hvd_autosync.util.streams import open_standard_streams

    # Not earlier: during the import of this module Python reads the .pth file, whose descriptor may
    # be that of a closed stream.
    open_standard_streams()
    extend_launcher()
    if driven:
        spare_checks(known)
        become_mpirun()
        order_interfaces()
        pass_on_all_bytes()


def _end_with(driver: int) -> None:
    """End this process, or the mpirun that replaces it, whenever the driver ends or is killed."""
    import ctypes
    import threading

    if sys.platform == "linux":
        threading.Thread(target=_kill_after_driver, args=(driver,), daemon=True).start()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != driver:
            sys.exit(128 + signal.SIGTERM)


def _kill_after_driver(driver: int) -> None:
    """Kill this process if the signal has not ended it.

    Horovod's processes then end their children.
    """
    while os.getppid() == driver:
        time.sleep(1.0)
    time.sleep(_PATIENCE_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _start() -> None:
    from hvd_autosync.runtime.driver.environment import DRIVER_VARIABLE, spec_from_environment

    driver = os.environ.pop(DRIVER_VARIABLE, "")
    known = os.environ.pop(CONTROLLERS_VARIABLE, "").split()
    spec = spec_from_environment()
    # A trial's launcher has the trial's variables, too, and in a batch system's shell also a rank.
    # Only launchers have the driver's process id. The shell itself has a rank, but no trial.
    ranked = any(name in os.environ for name in RANK_VARIABLES)
    if spec is not None and ranked and not driver:
        from hvd_autosync.runtime.install.hooks import install, install_live

        install(spec)
        if os.environ.get(JUDGED_VARIABLE):  # this training begins under a strategy, and goes on
            install_live()
    elif _is_launcher(ranked=ranked):
        if driver:
            _end_with(int(driver))
        extend = partial(_extend_launcher, known=known, driven=bool(driver))
        when_imported(_LAUNCHER, extend, run_as_main=_RUN_LAUNCHER)
    elif ranked and is_on(os.environ.get(LIVE_VARIABLE, "")):
        from hvd_autosync.runtime.install.hooks import install_live

        install_live()


_start()
