"""A Python function as a job: the driver pickles it to a file, and each rank calls it.

``horovod.run`` does the same. The file is named after its content, so that the same function is
recognized as the same job. It lies in the user's data folder, which all hosts must share, as they
must share a script.
"""

from __future__ import annotations

import functools
import io
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
    """Write a function to a file and return the command that calls it.

    Args:
        function: The training function, which each rank calls.
        args: Its arguments.
        kwargs: Its named arguments.
        folder: Folder of the file.

    Raises:
        ConfigurationError: The function cannot be pickled, as it holds something that is tied to
            this process; or its file cannot be written.
    """
    import cloudpickle  # Horovod depends on it

    name = getattr(function, "__name__", type(function).__name__)
    call = (function, tuple(args), dict(kwargs))
    try:
        content, identity = cloudpickle.dumps(call), _identity(call) + _source_of(function)
    except Exception as error:  # an object may raise anything when it is pickled
        raise ConfigurationError(
            f"the function {name} cannot be sent to other processes: {error}",
            hint="Open files, create tensors on devices and read data inside the function.",
        ) from error
    digest = keyed_digest(identity)[:12]  # arguments may be secret
    path = Path(folder) / f"{re.sub(r'[^A-Za-z0-9_]', '', name) or 'function'}-{digest}.pickle"
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.touch(mode=0o600)
            partial.write_bytes(content)
            partial.replace(path)
    except OSError as error:
        raise ConfigurationError(
            f"the function {name} cannot be written to {path}: {error.strerror}",
            hint="Set XDG_DATA_HOME to a folder that you may write to.",
        ) from None
    return [sys.executable, "-m", _MODULE, str(path)]


def _identity(call: tuple[Any, ...]) -> bytes:
    """Return bytes that are the same for the same call in each process, as a pickle is not.

    There sets have an order by process, and a class of a notebook has a random number.
    """
    import cloudpickle
    from cloudpickle import cloudpickle as inside

    numbers: dict[str, int] = {}

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: object) -> object:
            if isinstance(value, set | frozenset) and type(value) in (set, frozenset):
                return type(value).__name__, sorted(value, key=repr)
            if isinstance(value, str) and value in inside._DYNAMIC_CLASS_TRACKER_BY_ID:
                return "class", numbers.setdefault(value, len(numbers))
            return None

    stream = io.BytesIO()
    Pickler(stream).dump(call)
    return stream.getvalue()


def _source_of(function: object) -> bytes:
    """Return the text of the module that ranks import the function from; empty if it is pickled.

    A function that can be imported is pickled by its name alone.
    """
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None) or "__main__"
    file = getattr(sys.modules.get(name), "__file__", None)
    if name == "__main__" or file is None:
        return b""
    try:
        return Path(file).read_bytes()
    except OSError:
        return b""


def main(path: str) -> None:
    """Call the function in the file at ``path``, on a rank."""
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
