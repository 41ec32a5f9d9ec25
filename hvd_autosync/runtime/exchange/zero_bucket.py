"""ZeRO bucket (exchange ``sharded``): each rank owns a shard, sums its gradient and makes its step.

Every rank sends to each owner its part (an alltoall), owners sum, and the result is distributed to
all (an allgather): the parameters after the owners' optimizer step
(:mod:`hvd_autosync.runtime.exchange.zero_step`), or the gradient if owners do not make the step.
The bytes are those of a ring allreduce; what is saved is the optimizer's work on shards of other
ranks. It is AutoSync's partitioned parameter server, with all ranks as servers, and the first stage
of ZeRO (Rajbhandari et al. 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hvd_autosync.runtime.collectives.operations import all_ranks, alltoall_into, rank
from hvd_autosync.runtime.exchange.buckets import Bucket, FlatBucket, dense_gradient, wire_dtype
from hvd_autosync.runtime.exchange.exchanges import Flat, Scaling, Steps, gather_into


@dataclass(frozen=True)
class ZeroPiece:
    """A part of a parameter that this rank owns.

    Attributes:
        whole: The parameter.
        begin: Its first element of ``whole``, flattened.
        part: These elements, in the parameter's own memory; its gradient is the reduced one.
    """

    whole: torch.nn.Parameter
    begin: int
    part: torch.nn.Parameter


class ZeroBucket(Bucket):
    """Dense gradients of one type on one device, of which every rank owns a share.

    Args:
        name: As of any bucket.
        parameters: As of any bucket; contiguous, with at least one dimension.
        scaling: Factors of the reduction.
        shares: Elements that each rank owns, in order of rank.
        bounds: The elements to exchange, if it is a slice of a single parameter.

    Attributes:
        pieces: What this rank owns.
        owned: Whether only the owners have the last gradient.
    """

    needs_all = True

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.nn.Parameter],
        scaling: Scaling,
        shares: Sequence[int],
        bounds: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(name, parameters)
        first = self.parameters[0]
        self._scaling = scaling
        self._slice = slice(*bounds) if bounds else slice(None)
        self._whole = FlatBucket(name, parameters, Flat(scaling), bounds=bounds)
        self._splits = torch.tensor(shares, dtype=torch.int32)
        self._dtype = wire_dtype(first.dtype)
        self._in_place = len(self.parameters) == 1 and first.dtype is self._dtype
        # These buffers are filled before every use.
        self._flat = first.new_empty(0 if self._in_place else sum(shares), dtype=self._dtype)
        self._received = self._flat.new_empty(len(shares), shares[rank()])
        self._own = self._flat.new_empty(shares[rank()])
        self._counts = torch.empty(len(shares), dtype=torch.int32)
        begin = sum(shares[: rank()])
        self._place = slice(begin, begin + shares[rank()])
        self.pieces = self._make_pieces()
        self.owned = False

    def send(self) -> Steps:
        """Send to each owner its share, and reduce this rank's."""
        flat = self._fill([dense_gradient(parameter) for parameter in self.parameters])
        yield alltoall_into(
            self._received.view(-1), self._counts, flat, self._splits, name=f"{self.name}.owners"
        )
        factor = self._scaling.before * self._scaling.after
        if self._dtype is torch.float16:
            # Summed in float32, because a sum in float16 overflows sooner than each summand.
            self._own.copy_(self._received.sum(0, dtype=torch.float32).mul_(factor))
        else:
            torch.sum(self._received, 0, out=self._own).mul_(factor)
        self.owned = True

    def send_plainly(self) -> Steps:
        self.owned = False
        return self._whole.send()

    def take_gradients(self) -> None:
        """Set the gradient of each piece, and its memory, if that of its parameter has changed."""
        begin = 0
        for piece in self.pieces:
            count = piece.part.numel()
            own = piece.whole.detach().view(-1)[piece.begin : piece.begin + count]
            if own.data_ptr() != piece.part.data_ptr():  # the script gave it other memory
                piece.part.data = own
            piece.part.grad = self._own[begin : begin + count].to(piece.part.dtype)
            begin += count

    def share_gradients(self) -> Steps:
        """Distribute the reduced gradient to all ranks."""
        gradients = [dense_gradient(parameter) for parameter in self.parameters]
        yield from self._share(gradients, "gradients")

    def share_parameters(self) -> Steps:
        """Distribute the parameters that owners have stepped to all ranks."""
        begin = 0
        for piece in self.pieces:
            count = piece.part.numel()
            self._own[begin : begin + count].copy_(piece.part.detach())
            begin += count
        yield from self._share([parameter.detach() for parameter in self.parameters], "parameters")

    def _share(self, targets: Sequence[torch.Tensor], what: str) -> Steps:
        """Gather the owners' ``_own`` into ``targets``."""
        self.owned = False
        flat = self._memory(targets)
        yield gather_into(flat, self._own, f"{self.name}.{what}", all_ranks())
        if flat is self._flat:
            parts = self._parts(targets)
            views = self._flat.split([part.numel() for part in parts])
            torch._foreach_copy_(parts, list(views))

    def _fill(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = self._memory(sources)
        if flat is self._flat:
            parts = self._parts(sources)
            torch._foreach_copy_(list(flat.split([part.numel() for part in parts])), parts)
        return flat

    def _memory(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tensors' own memory if it can be sent as it is, else the bucket's."""
        return tensors[0].view(-1)[self._slice] if self._in_place else self._flat

    def _parts(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [tensor.view(-1)[self._slice] for tensor in tensors]

    def _make_pieces(self) -> list[ZeroPiece]:
        pieces, offset = [], 0
        for parameter in self.parameters:
            flat = parameter.detach().view(-1)
            first, last, _ = self._slice.indices(len(flat))
            # Of the bucket's elements offset..., this parameter has those from first to last.
            begin = max(self._place.start - offset, 0) + first
            end = min(self._place.stop - offset + first, last)
            if begin < end:
                pieces.append(ZeroPiece(parameter, begin, torch.nn.Parameter(flat[begin:end])))
            offset += last - first
        return pieces


def even_shares(count: int, ranks: int) -> list[int]:
    """Split ``count`` elements into as many shares of about equal size as there are ranks."""
    return [count * (each + 1) // ranks - count * each // ranks for each in range(ranks)]
