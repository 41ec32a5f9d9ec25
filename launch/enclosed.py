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


def main(command: list[str]) -> None:
    """Make the files private, then replace this process by the command."""
    from hvd_autosync.launch.refusal import enter_or_refuse

    enter_or_refuse(os.environ)
    while re.match(r"[A-Za-z_]\w*=", command[0]):  # a rank's own command starts with ``env``
        name, _, value = command.pop(0).partition("=")
        os.environ[name] = value
    try:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            path = shutil.which(command[0])
            if error.errno != errno.ENOEXEC or path is None:
                raise
            # A script without "#!": the C library's execvp, which env calls, gives it to a shell.
            os.execv("/bin/sh", ["/bin/sh", path, *command[1:]])
    except OSError as error:  # as a shell reports it
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))
    main(sys.argv[1:])
