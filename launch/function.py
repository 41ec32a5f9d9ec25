"""A Python function as a job: written to a file here, called by each rank there.

``horovod.run`` does the same. The file is named after what is in it, so that the same function is
the same job the next time. It lies in the user's data folder, which every host has to share, as it
has to have a script.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.masking import keyed_digest

_MODULE = "hvd_autosync.launch.function"


def function_command(
    function: Callable[..., object],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    folder: str | os.PathLike[str],
) -> list[str]:
    """The command that calls ``function(*args, **kwargs)``.

    Args:
        function: What each rank is to call; it trains.
        args: Its arguments.
        kwargs: Its named arguments.
        folder: Where the file is written.

    Raises:
        ConfigurationError: It cannot be written: something in it is tied to this process.
    """
    import cloudpickle  # Horovod needs it, too

    name = getattr(function, "__name__", type(function).__name__)
    try:
        content = cloudpickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # whatever an object raises that is asked to be written
        raise ConfigurationError(
            f"the function {name} cannot be sent to other processes: {error}",
            hint="Open files, make tensors on devices and read data inside of it.",
        ) from error
    digest = keyed_digest(content)[:12]  # arguments may be secret
    path = Path(folder) / f"{re.sub(r'[^A-Za-z0-9_]', '', name) or 'function'}-{digest}.pickle"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.touch(mode=0o600)
        partial.write_bytes(content)
        partial.replace(path)
    return [sys.executable, "-m", _MODULE, str(path)]


def main(path: str) -> None:
    """Call what the file at ``path`` has; a rank's part."""
    import cloudpickle

    try:
        content = Path(path).read_bytes()
    except OSError as error:
        sys.exit(
            f"hvd-autosync: error: the function's file is not on this host: {error}\n"
            "Share the user's data folder between the hosts (XDG_DATA_HOME), or tune a script."
        )
    function, args, kwargs = cloudpickle.loads(content)
    function(*args, **kwargs)


if __name__ == "__main__":
    main(sys.argv[1])
