"""Runs a command with private files (``python -I -S enclosed.py COMMAND...``).

A fresh launch of a trial starts this on each slot, whatever the user's command is, because any
program may write files. See :mod:`hvd_autosync.launch.private_files`.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NoReturn

_SHELL = "/bin/sh"


def main(command: list[str]) -> None:
    """Make the files private, then replace this process by the command."""
    from hvd_autosync.launch.refusal import enter_or_refuse

    enter_or_refuse(os.environ)
    while re.match(r"[A-Za-z_]\w*=", command[0]):  # a rank's own command starts with ``env``
        name, _, value = command.pop(0).partition("=")
        os.environ[name] = value
    try:
        _execute(command)
    except OSError as error:  # as a shell reports it
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def _execute(command: list[str]) -> NoReturn:
    """Replace this process by the command, as the launcher does."""
    from hvd_autosync.search_space.horovod_settings import launched_by_mpi

    try:
        os.execvp(command[0], command)
    except OSError as error:
        path = shutil.which(command[0])
        # Horovod without MPI starts ranks by ``env``, which gives a script without ``#!`` to a
        # shell; mpirun refuses it.
        if error.errno != errno.ENOEXEC or path is None or launched_by_mpi(os.environ):
            raise
        os.execv(_SHELL, [_SHELL, path, *command[1:]])


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))
    main(sys.argv[1:])
