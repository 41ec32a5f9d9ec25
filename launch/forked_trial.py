"""Runs the user's script in a forked child, as if it had been started as a program."""

from __future__ import annotations

import importlib.machinery
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from hvd_autosync.launch.refusal import enter_or_refuse
from hvd_autosync.search_space.trial import TrialSpec

#: Files whose frames are left out of tracebacks; ``<string>`` is the command line's code.
_OURS = {"<string>", __file__, __file__.replace("forked_trial", "fork_server")}


class ForkedTrial:
    """One rank of a trial.

    Args:
        message: The driver's order: ``spec`` (JSON) and ``environment``.
        record_imports: Called before the script starts.
    """

    def __init__(self, message: dict[str, Any], record_imports: Callable[[], None]) -> None:
        self._spec = TrialSpec.from_json(message["spec"])
        self._environment: dict[str, str] = message["environment"]
        self._record_imports = record_imports

    def run(self, module: bool, words: Sequence[str]) -> NoReturn:
        """Run the script to its end and exit with its status.

        Args:
            module: Whether the first word names a module instead of a script's file.
            words: Script or module, then its arguments.
        """
        from hvd_autosync.runtime.install.hooks import install, watch_first_import

        os.environ.update(self._environment)
        enter_or_refuse(os.environ)
        _reseed()
        install(self._spec)
        self._record_imports()
        target, sys.argv = words[0], list(words)
        sys.excepthook = _print_exception
        if self._spec.probe:
            from hvd_autosync.runtime.trial import probe

            probe.measure(self._spec.key)
        watch_first_import()
        # With -P (since 3.11) and -I, Python does not add the script's folder to the path.
        safe_path = getattr(sys.flags, "safe_path", False) or sys.flags.isolated
        if module:
            if not safe_path:
                sys.path.insert(0, os.getcwd())
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            # As the interpreter does, which follows links.
            if not safe_path:
                sys.path.insert(0, os.path.dirname(os.path.realpath(target)))
            _run_file(target)
        sys.exit(0)


def _run_file(path: str) -> None:
    """Execute a script as ``__main__``, as the interpreter does."""
    path = os.path.join(os.getcwd(), path)  # so ``__file__`` is absolute
    main = ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    with io.open_code(path) as file:
        # Our own statements of the future are none of the script's.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _reseed() -> None:
    """Reseed generators as in a fresh process; Python reseeds its own after each fork."""
    import torch

    torch.default_generator.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _print_exception(
    kind: type[BaseException], value: BaseException, trace: TracebackType | None
) -> None:
    """Print an uncaught exception as if the script had been started directly."""
    while trace is not None:
        path = trace.tb_frame.f_code.co_filename
        if path not in _OURS and "runpy" not in path:
            break
        trace = trace.tb_next
    sys.__excepthook__(kind, value.with_traceback(trace), trace)
