"""One rank's view of the ranks in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hvd_autosync.runtime.collectives.over_threads.calls import Call
from hvd_autosync.runtime.collectives.protocol import Join, Max, ProcessSet, Sum

if TYPE_CHECKING:
    from hvd_autosync.runtime.collectives.over_threads.ranks import ThreadRanks


@dataclass(frozen=True)
class ThreadSet:
    """A process set.

    Attributes:
        ranks: Its ranks.
        own: The rank that looks at it.
    """

    ranks: tuple[int, ...]
    own: int

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.own)


class ThreadRank:
    """The collectives of one of several ranks.

    Args:
        ranks: All of them.
        rank: Its number.
    """

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.all_ranks: ProcessSet = ThreadSet(tuple(range(ranks.size)), rank)
        self._join: Join = lambda device: ranks.join(rank)
        self._before_leaving: list[Callable[[], None]] = []

    @property
    def ranks(self) -> ThreadRanks:
        """All of them."""
        return self._ranks

    def pass_turn(self) -> None:
        """Let other ranks run, where a test stands for what the tested code would wait for."""
        self._ranks.pass_turn(self._rank)

    def init(self) -> None:
        pass

    def shutdown(self) -> None:
        self._act()
        self._ranks.fail(f"rank {self._rank} has shut down")

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks.size

    def local_rank(self) -> int:
        return self._rank % self.local_size()

    def local_size(self) -> int:
        return self._ranks.size // self._ranks.hosts

    def cross_rank(self) -> int:
        return self._rank // self.local_size()

    def cross_size(self) -> int:
        return self._ranks.hosts

    def is_homogeneous(self) -> bool:
        return True

    def mpi_enabled(self) -> bool:
        return False

    def copies_to_host(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    def add_process_set(self, ranks: Sequence[int]) -> ProcessSet:
        return ThreadSet(tuple(ranks), self._rank)

    def allreduce(self, tensor: torch.Tensor, *, name: str, op: int) -> torch.Tensor:
        return self.synchronize(self.allreduce_async_(tensor.clone(), name=name, op=op))

    def allreduce_async_(
        self,
        tensor: torch.Tensor,
        *,
        name: str,
        op: int,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet | None = None,
    ) -> int:
        if op not in (Sum, Max):
            raise ValueError(f"no reduction has the number {op}")
        detail = (op, prescale_factor, postscale_factor)
        return self._begin("allreduce", name, tensor, process_set, detail, (tensor,))

    def allgather(self, tensor: torch.Tensor, *, name: str) -> torch.Tensor:
        return self.synchronize(self.allgather_async(tensor, name=name))

    def allgather_async(
        self, tensor: torch.Tensor, *, name: str, process_set: ProcessSet | None = None
    ) -> int:
        return self._begin("allgather", name, tensor, process_set)

    def allgather_into(
        self, output: torch.Tensor, tensor: torch.Tensor, *, name: str, process_set: ProcessSet
    ) -> int:
        return self._begin("allgather", name, tensor, process_set, outputs=(output,))

    def alltoall_async(
        self,
        tensor: torch.Tensor,
        splits: torch.Tensor | None = None,
        *,
        name: str,
        process_set: ProcessSet | None = None,
    ) -> int:
        ranks = (process_set or self.all_ranks).size()
        rows = [len(tensor) // ranks] * ranks if splits is None else splits.tolist()
        return self._begin("alltoall", name, tensor, process_set, splits=rows)

    def alltoall_into(
        self,
        output: torch.Tensor,
        counts: torch.Tensor,
        tensor: torch.Tensor,
        splits: torch.Tensor,
        *,
        name: str,
    ) -> int:
        rows = splits.tolist()
        return self._begin("alltoall", name, tensor, None, (), (output, counts), rows)

    def broadcast_(self, tensor: torch.Tensor, root: int, *, name: str) -> torch.Tensor:
        return self.synchronize(self._begin("broadcast", name, tensor, None, (root,), (tensor,)))

    def poll(self, handle: int) -> bool:
        return self._ranks.poll(self._rank, handle)

    def synchronize(self, handle: int) -> torch.Tensor:
        output: torch.Tensor = self._ranks.synchronize(self._rank, handle)
        return output

    def join(self) -> int:
        self._act()
        return self._join(-1)

    def wrap_join(self, wrap: Callable[[Join], Join]) -> None:
        self._join = wrap(self._join)

    def before_leaving(self, action: Callable[[], None]) -> None:
        self._before_leaving.append(action)

    def _act(self) -> None:
        for action in self._before_leaving:
            action()

    def _begin(
        self,
        kind: str,
        name: str,
        tensor: torch.Tensor,
        process_set: ProcessSet | None,
        detail: tuple[Any, ...] = (),
        outputs: tuple[torch.Tensor, ...] | None = None,
        splits: list[int] | None = None,
    ) -> int:
        among = process_set or self.all_ranks
        assert isinstance(among, ThreadSet), "made by add_process_set()"
        call = Call(self._rank, kind, name, tensor, detail, outputs, splits or [])
        return self._ranks.begin(call, among.ranks)
