"""The last lines of a job's output, separately for each rank and the launcher."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable

_LINES, _LINE_BYTES = 60, 500
#: Launchers put the rank before each line: ``[1]<stderr>:`` (Gloo), ``[1,1]<stderr>:`` (MPI).
#: MPI adds a space, Gloo does not.
_PREFIX = re.compile(rb"^(?:.{0,80}?\[(\d{1,9},)?(\d{1,9})\]<std(?:err|out)>:(?(1) ?))?")


class Tail:
    """Keeps the last lines of every rank.

    The lines of the rank that failed first stay, even if all other ranks then print errors. Lines
    without a rank of the job count as the launcher's.

    Args:
        ranks: Number of the job's ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._count = 0
        self._lines: dict[int | None, deque[tuple[int, str]]] = {}

    def add(self, line: bytes) -> None:
        """Add one line of output; empty lines are left out."""
        prefix = _PREFIX.match(line)
        assert prefix is not None, "the pattern matches the empty prefix"
        text = line[prefix.end() : prefix.end() + _LINE_BYTES].decode(errors="replace").rstrip()
        if not text:
            return
        rank = None if prefix[2] is None or int(prefix[2]) >= self._ranks else int(prefix[2])
        self._lines.setdefault(rank, deque(maxlen=_LINES)).append((self._count, text))
        self._count += 1

    def ranks(self) -> list[int]:
        """Return the ranks that have written something."""
        return sorted(rank for rank in self._lines if rank is not None)

    def launcher(self) -> str:
        """Return the launcher's lines."""
        return _joined(self._lines.get(None, ()))

    def of(self, ranks: Iterable[int]) -> str:
        """Return the lines of ``ranks``, in the order of arrival."""
        return _joined(line for rank in ranks for line in self._lines.get(rank, ()))

    def whole(self) -> str:
        """Return the lines of all ranks and the launcher, in the order of arrival."""
        return _joined(line for lines in self._lines.values() for line in lines)


def _joined(lines: Iterable[tuple[int, str]]) -> str:
    return "\n".join(text for _, text in sorted(lines)[-_LINES:])
