"""Reading of JSON Lines from a file that may be damaged or malicious; errors name the line."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn, ParamSpec, TypeVar

from hvd_autosync.errors import TraceFormatError
from hvd_autosync.search_space.records import UnknownFieldError
from hvd_autosync.traces.validity import UnknownValueError

#: A trial of 1,000 ranks and 200 steps has 8 MB.
LONGEST_LINE_BYTES = 32 * 1024 * 1024
_DEEPEST = 64
#: Whole numbers beyond this do not fit the 64 bits that databases and numpy give them.
_LARGEST_INTEGER = 2**63 - 1

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class LineReader:
    """The lines of one file as JSON objects, with a running SHA-256.

    Args:
        stream: The file, opened in binary mode.
        name: The file's name, for messages.
    """

    def __init__(self, stream: BinaryIO, name: str) -> None:
        self._stream = stream
        self._name = name
        self._number = 0
        self._digest = hashlib.sha256()

    def start_digest(self) -> None:
        """Begin a new checksum with the next line."""
        self._digest = hashlib.sha256()

    def digest(self) -> str:
        """Return the checksum of the lines read since :meth:`start_digest`, hexadecimal."""
        return self._digest.hexdigest()

    def at_end(self) -> bool:
        """Return whether the file ends here."""
        here = self._stream.tell()
        ended = not self._stream.read(1)
        self._stream.seek(here)
        return ended

    def error(
        self, what: str, *, hint: str = "Get the file again; nothing was imported."
    ) -> TraceFormatError:
        """Return the error for the line that was read last."""
        return TraceFormatError(f"{self._name}, line {self._number}: {what}", hint=hint)

    def next_object(self) -> dict[str, Any]:
        """Return the next line.

        Raises:
            TraceFormatError: The file ends, or the line is not a plain JSON object.
        """
        self._number += 1
        line = self._stream.readline(LONGEST_LINE_BYTES)
        if not line.endswith(b"\n"):
            if len(line) == LONGEST_LINE_BYTES:
                raise self.error(
                    f"the line is too long: it has {LONGEST_LINE_BYTES:,} bytes or more"
                )
            raise self.error("the file is cut off here")
        self._digest.update(line)
        value = self.checked(_parse, line)
        if not isinstance(value, dict):
            raise self.error("this is not a JSON object")
        return value

    def checked(
        self,
        read: Callable[_Arguments, _Result],
        *arguments: _Arguments.args,
        **keywords: _Arguments.kwargs,
    ) -> _Result:
        """``read(*arguments)``, with its ``ValueError`` turned into an error that names the line.

        Raises:
            TraceFormatError: ``read`` raised a ``ValueError``.
        """
        try:
            return read(*arguments, **keywords)
        except UnknownFieldError as error:
            raise self.error(
                f"perhaps written by a newer hvd-autosync: {error}",
                hint="Upgrade hvd-autosync, or get the file again; nothing was imported.",
            ) from None
        except UnknownValueError as error:
            hint = f"{error.hint} Otherwise get the file again; nothing was imported."
            raise self.error(str(error), hint=hint) from None
        except ValueError as error:
            raise self.error(str(error)) from None


def _parse(line: bytes) -> Any:
    try:
        value = json.loads(
            line.decode(), parse_float=_float, parse_int=_integer, parse_constant=_refuse
        )
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    if not _is_shallow(value, _DEEPEST):
        raise ValueError("the JSON is nested too deeply")
    return value


def _float(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _integer(text: str) -> int:
    # The length is checked first, because the time of a conversion grows with its square.
    fits = len(text) <= 20 and abs(int(text)) <= _LARGEST_INTEGER
    return int(text) if fits else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text:.30} is not a number that a trace can contain")


def _is_shallow(value: Any, levels: int) -> bool:
    if isinstance(value, (dict, list)):
        inside = value.values() if isinstance(value, dict) else value
        return levels > 0 and all(_is_shallow(part, levels - 1) for part in inside)
    return True
