"""Partition: which rank owns which elements of some parameters, and of their optimizer states.

The elements of all parameters, in a row, are cut into one share for each rank, in order of rank. A
share consists of pieces, each a run of elements of one parameter::

    parameters | a a a a a a | b b b | c c c c c c |
    shares     |  rank 0   |  rank 1   |  rank 2   |
    pieces     | a a a a a | a | b b b | c | c c c c c |

A share is cut out of a flat tensor by one slice. The flat tensor is put together by writing shares
next to each other. Optimizer states are cut by piece, and put together from the entries of all
ranks. Shares may have any sizes, and may be empty.

ZeRO steps and parameter servers are partitions of their buckets. The part of a ZeRO step is in the
parameter's own memory, that of a parameter server in the server's.
"""

from __future__ import annotations

import bisect
import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvd_autosync.errors import AutosyncError
from hvd_autosync.runtime.state.states import Entry, decode_entries, to_device

State = dict[str, Any]


def cut_evenly(size: int, count: int, unit: int = 1) -> list[tuple[int, int]]:
    """Cut ``size`` elements into exactly ``count`` runs of about equal length.

    Args:
        size: Number of elements.
        count: Number of runs; some are empty if there are more than units.
        unit: Elements that stay together, as those of a matrix's row.

    Returns:
        First element of each run, and the one behind its last.
    """
    units = -(-size // unit)
    ends = [min(units * index // count * unit, size) for index in range(count + 1)]
    return list(itertools.pairwise(ends))


@dataclass(frozen=True)
class Piece:
    """A run of elements of one parameter, with one owner.

    Attributes:
        place: The parameter's place in the partition.
        whole: The parameter.
        begin: Its first element of ``whole``, flattened.
        count: Number of its elements.
    """

    place: int
    whole: torch.nn.Parameter
    begin: int
    count: int

    @property
    def shape(self) -> torch.Size:
        """That of the parameter if it is all of it, for optimizers that depend on it; else flat."""
        return self.whole.shape if self.count == self.whole.numel() else torch.Size([self.count])

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this piece of a tensor of as many elements as the parameter; a view.

        Args:
            flat: The tensor, of one dimension.
        """
        return flat[self.begin : self.begin + self.count].view(self.shape)

    def cut_state(self, state: Mapping[str, Any], device: str | None = None) -> State:
        """Return this piece of the parameter's optimizer state; copies.

        Args:
            state: What has the parameter's shape is cut, all else belongs to each piece.
            device: Where the copies are; by default where the state is.
        """
        return {name: self._cut(value, device) for name, value in state.items()}

    def _cut(self, value: Any, device: str | None) -> Any:
        if not isinstance(value, torch.Tensor):
            copied = copy.deepcopy(value)
            return copied if device is None else to_device(copied, device)
        if value.shape == self.whole.shape:
            value = self.of(value.detach().reshape(-1))
        return value.to(device or value.device, copy=True)

    def entry(self, place: int, state: Mapping[str, Any]) -> Entry:
        """Return the state of this piece, for :func:`put_together`.

        Args:
            place: The parameter's place among those of the optimizer.
            state: Its state; not copied.
        """
        return part_entry(place, self.begin, state, self.shape)


def part_entry(place: int, begin: int, state: Mapping[str, Any], shape: torch.Size) -> Entry:
    """Return the state of a part of a parameter, as its shape tells."""
    by_element = {
        name: value.detach().reshape(-1)
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == shape
    }
    return Entry(place, begin, {**state, **by_element}, frozenset(by_element))


@dataclass(frozen=True, eq=False)
class Part:
    """A piece with its elements, which an optimizer steps as a parameter.

    Attributes:
        piece: The piece.
        values: Its elements.
    """

    piece: Piece
    values: torch.nn.Parameter


class Partition:
    """A partition of some parameters.

    Args:
        parameters: The parameters, in their order.
        shares: Number of elements that each rank owns, in order of rank.
        bounds: The elements to cut up, if they are a slice of a single parameter.

    Attributes:
        parameters: As given.
        shares: As given.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        shares: Sequence[int],
        bounds: tuple[int, int] | None = None,
    ) -> None:
        runs = [bounds] if bounds else [(0, parameter.numel()) for parameter in parameters]
        self.parameters = tuple(parameters)
        self.shares = tuple(shares)
        self._runs = list(zip(parameters, runs, strict=True))
        self._sizes = [end - begin for begin, end in runs]
        self._ends = list(itertools.accumulate(self.shares))
        assert self._ends[-1] == sum(self._sizes), "every element has an owner"

    @classmethod
    def evenly(
        cls,
        parameters: Sequence[torch.nn.Parameter],
        ranks: int,
        bounds: tuple[int, int] | None = None,
    ) -> Partition:
        """Shares of about equal size; the arguments are those of the class."""
        begin, end = bounds or (0, sum(parameter.numel() for parameter in parameters))
        shares = [last - first for first, last in cut_evenly(end - begin, ranks)]
        return cls(parameters, shares, bounds)

    @classmethod
    def of_whole_tensors(cls, parameters: Sequence[torch.nn.Parameter], ranks: int) -> Partition:
        """Shares near equal size that cut no tensor, for steps that need whole tensors."""
        ends = [0, *itertools.accumulate(parameter.numel() for parameter in parameters)]
        even = [end for _, end in cut_evenly(ends[-1], ranks)]
        cuts = [0, *(min(ends, key=lambda end: abs(end - wanted)) for wanted in even)]
        return cls(parameters, [end - begin for begin, end in itertools.pairwise(cuts)])

    def share(self, owner: int, flat: torch.Tensor) -> torch.Tensor:
        """Return the share of ``owner`` in a flat tensor of all elements; a view."""
        return flat[self._ends[owner] - self.shares[owner] : self._ends[owner]]

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a flat tensor of all elements, by parameter; views."""
        return list(flat.split(self._sizes))

    def runs_of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the elements of the partition in tensors like the parameters, flat; views."""
        pairs = zip(tensors, self._runs, strict=True)
        return [tensor.view(-1)[slice(*run)] for tensor, (_, run) in pairs]

    def pieces(self, owner: int) -> list[Piece]:
        """Return the pieces of ``owner``, in order.

        A parameter without elements has one piece too, because it has a state.
        """
        end = self._ends[owner]
        begin, offset, found = end - self.shares[owner], 0, []
        for place, (parameter, (first, last)) in enumerate(self._runs):
            size = last - first
            own_first, own_last = max(begin - offset, 0), min(end - offset, size)
            if own_first < own_last or (not size and owner == self._owner_at(offset)):
                found.append(Piece(place, parameter, first + own_first, own_last - own_first))
            offset += size
        return found

    def split_share(self, owner: int, share: torch.Tensor) -> list[torch.Tensor]:
        """Return the share of ``owner``, by piece, each of its shape; views."""
        pieces = self.pieces(owner)
        runs = share.split([piece.count for piece in pieces])
        return [run.view(piece.shape) for run, piece in zip(runs, pieces, strict=True)]

    def _owner_at(self, offset: int) -> int:
        """Return the owner of the element at ``offset``; the last rank if there is none."""
        return min(bisect.bisect_right(self._ends, offset), len(self._ends) - 1)


def put_together(
    entries: Iterable[Entry],
    parameters: Sequence[torch.nn.Parameter],
    answers: Iterable[bytes] = (),
) -> dict[int, State]:
    """Merge the states of pieces: place of the parameter -> its whole state.

    Args:
        entries: Those of this rank.
        parameters: Those of the optimizer.
        answers: Encoded entries of other ranks.

    Raises:
        AutosyncError: Pieces are missing.
        ValueError: An answer is something else.
    """
    states: dict[int, State] = {}
    found: dict[tuple[int, str], int] = {}
    received = (entry for answer in answers for entry in decode_entries(answer))
    for entry in itertools.chain(entries, received):
        whole = parameters[entry.place]
        state = states.setdefault(entry.place, {})
        for name, value in entry.state.items():
            if name not in entry.by_element:
                state.setdefault(name, copy.deepcopy(value))
                continue
            if name not in state:
                state[name] = torch.empty(whole.shape, dtype=value.dtype, device=whole.device)
            end = entry.begin + value.numel()
            state[name].view(-1)[entry.begin : end].copy_(value)
            found[entry.place, name] = found.get((entry.place, name), 0) + value.numel()
    for (place, name), count in found.items():
        if count != parameters[place].numel():
            raise AutosyncError(
                f"only {count} of {parameters[place].numel()} elements of {name} are known, "
                "because ranks have taken different steps",
                hint="Save the optimizer on a rank that has taken all of them.",
            )
    return states
