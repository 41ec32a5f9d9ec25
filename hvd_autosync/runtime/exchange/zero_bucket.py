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

import torch

from hvd_autosync.runtime.collectives.operations import all_ranks, alltoall_into, rank
from hvd_autosync.runtime.exchange.buckets import Bucket, FlatBucket, dense_gradient, wire_dtype
from hvd_autosync.runtime.exchange.exchanges import Flat, Scaling, Steps, gather_into
from hvd_autosync.runtime.state.partition import Part, Partition


class ZeroBucket(Bucket):
    """Dense gradients of one type on one device, of which every rank owns a share.

    Args:
        name: As of any bucket.
        parameters: As of any bucket; all :func:`can_be_owned`.
        scaling: Factors of the reduction.
        ranks: Number of ranks.
        bounds: The elements to exchange, if it is a slice of a single parameter.

    Attributes:
        parts: What this rank owns, in the memory of the parameters; their gradients are the reduced
            ones.
        factor: What the sum of the ranks' gradients is multiplied by.
        owned: Whether only the owners have the last gradient.
    """

    needs_all = True

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.nn.Parameter],
        scaling: Scaling,
        ranks: int,
        bounds: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(name, parameters)
        first = self.parameters[0]
        self._scaling = scaling
        self.factor = scaling.before * scaling.after
        self._partition = Partition.evenly(parameters, ranks, bounds)
        self._whole = FlatBucket(name, parameters, Flat(scaling), bounds=bounds)
        shares = self._partition.shares
        self._splits = torch.tensor(shares, dtype=torch.int32, device="cpu")
        self._dtype = wire_dtype(first.dtype)
        self._in_place = len(self.parameters) == 1 and first.dtype is self._dtype
        # These buffers are filled before every use.
        self._flat = first.new_empty(0 if self._in_place else sum(shares), dtype=self._dtype)
        self._received = self._flat.new_empty(ranks, shares[rank()])
        self._own = self._flat.new_empty(shares[rank()])
        self._counts = torch.empty(ranks, dtype=torch.int32, device="cpu")
        self.parts = [
            Part(piece, torch.nn.Parameter(piece.of(piece.whole.detach().view(-1))))
            for piece in self._partition.pieces(rank())
        ]
        #: The elements of ``_own`` that belong to each part.
        self._of_parts = self._partition.split_share(rank(), self._own)
        self.owned = False

    def send(self) -> Steps:
        """Send to each owner its share, and reduce this rank's."""
        flat = self._fill([dense_gradient(parameter) for parameter in self.parameters])
        yield alltoall_into(
            self._received.view(-1), self._counts, flat, self._splits, name=f"{self.name}.owners"
        )
        torch.sum(self._received, 0, out=self._own).mul_(self.factor)
        self.owned = True

    def reset(self) -> None:
        super().reset()
        self.sent_in_place = False

    def send_plainly(self) -> Steps:
        self.owned, self.sent_in_place = False, True
        return self._whole.send()

    def take_gradients(self) -> None:
        """Set the gradient of each part, and its memory, if that of its parameter has changed."""
        for part, gradient in zip(self.parts, self._of_parts, strict=True):
            own = part.piece.of(part.piece.whole.detach().view(-1))
            if own.data_ptr() != part.values.data_ptr():  # the script gave it other memory
                part.values.data = own
            part.values.grad = gradient.to(own.dtype)

    def share_gradients(self) -> Steps:
        """Distribute the reduced gradient to all ranks."""
        gradients = [dense_gradient(parameter) for parameter in self.parameters]
        yield from self._share(self._own, gradients, "gradients")

    def parts_with_gradients(self) -> list[tuple[Part, torch.Tensor]]:
        """Return the parts with their last reduced gradients, until the next are reduced."""
        return list(zip(self.parts, self._of_parts, strict=True))

    def share_parameters(self) -> Steps:
        """Distribute the parameters that owners have stepped to all ranks."""
        stepped = torch.empty_like(self._own)  # the gradients are kept for a script that looks
        for part, own in zip(self.parts, self._partition.split_share(rank(), stepped), strict=True):
            own.copy_(part.values.detach())
        targets = [parameter.detach() for parameter in self.parameters]
        yield from self._share(stepped, targets, "parameters")

    def _share(self, own: torch.Tensor, targets: Sequence[torch.Tensor], what: str) -> Steps:
        """Gather all owners' ``own`` into ``targets``."""
        self.owned = False
        flat = self._memory(targets)
        yield gather_into(flat, own, f"{self.name}.{what}", all_ranks())
        if flat is self._flat:
            torch._foreach_copy_(self._partition.runs_of(targets), self._partition.split(flat))

    def _fill(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = self._memory(sources)
        if flat is self._flat:
            torch._foreach_copy_(self._partition.split(flat), self._partition.runs_of(sources))
        return flat

    def _memory(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensors' own memory if it can be sent as it is, else the bucket's."""
        return self._partition.runs_of(tensors)[0] if self._in_place else self._flat


def can_be_owned(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter has ordered elements to split, and is of a type to add up here.

    Horovod's own sums of float16 may overflow; added up in another way they would not.
    """
    ordered = parameter.dim() > 0 and parameter.is_contiguous()
    return ordered and parameter.dtype != torch.float16
