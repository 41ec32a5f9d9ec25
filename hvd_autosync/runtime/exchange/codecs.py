"""Codecs: lossy reductions of one flat tensor that send fewer bytes.

Each is a reduction as exchanges use it: a generator that yields handles of Horovod's operations and
leaves the result in its tensor. ``sent_bytes`` is what a rank sends, by the collective's algorithm:
2 (n - 1) / n of what a ring of n ranks reduces, (n - 1) / n of what an alltoall distributes, n - 1
times what a ring gathers from each rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from hvd_autosync.errors import SpaceError
from hvd_autosync.extensions import CODECS
from hvd_autosync.runtime.collectives.operations import (
    ProcessSet,
    Sum,
    allgather_async,
    allreduce_async_,
    alltoall_async,
    rank,
)
from hvd_autosync.runtime.exchange.exchanges import Scaling, Steps, add_at, allreduce, gather_into
from hvd_autosync.search_space.exchange_plan import ClassPlan

#: Elements that share one scale of the codec ``int8``.
_BLOCK = 256
#: Name in a codec's state of what error feedback keeps; it is part of the checkpoint format.
LEFT_OUT = "left_out"


class Codec(ABC):
    """A lossy reduction of a tensor of ``size`` elements, step after step.

    Args:
        size: Elements of the tensor.
        like: A tensor of its type, on its device.
        ranks: Number of ranks that reduce it.
    """

    def __init__(self, size: int, like: torch.Tensor, ranks: int) -> None:
        self.size = size
        self.like = like
        self.ranks = ranks

    @abstractmethod
    def __call__(
        self, tensor: torch.Tensor, name: str, scaling: Scaling, among: ProcessSet
    ) -> Steps:
        """Reduce ``tensor``, shape ``(size,)``, in place."""

    @abstractmethod
    def sent_bytes(self) -> float:
        """Bytes that each rank sends per step, on average."""

    def state(self) -> dict[str, torch.Tensor]:
        """Return what this rank keeps from step to step, to be saved with the optimizer.

        What error feedback keeps is named :data:`LEFT_OUT`; all else is the same on all ranks.
        """
        return {}

    def left_out(self) -> torch.Tensor | None:
        """Return what error feedback keeps of this rank's tensors, shape ``(size,)``; a view."""
        return None

    def reset(self) -> None:
        """Reset the state."""
        for tensor in self.state().values():
            tensor.zero_()

    def load(self, state: dict[str, torch.Tensor]) -> None:
        """Load what :meth:`state` returned; reset if it does not have the same shapes."""
        own = self.state()
        if all(name in state and state[name].shape == own[name].shape for name in own):
            for name, tensor in own.items():
                tensor.copy_(state[name])
        else:
            self.reset()


class Fp16Codec(Codec):
    """``fp16``: sums in half precision, like Horovod's own ``Compression.fp16``."""

    def __init__(self, size: int, like: torch.Tensor, ranks: int) -> None:
        super().__init__(size, like, ranks)
        self._narrow = like.new_empty(size, dtype=torch.float16)

    def __call__(
        self, tensor: torch.Tensor, name: str, scaling: Scaling, among: ProcessSet
    ) -> Steps:
        self._narrow.copy_(tensor)
        yield from allreduce(self._narrow, name, scaling, among)
        tensor.copy_(self._narrow)

    def sent_bytes(self) -> float:
        return 2 * (self.ranks - 1) / self.ranks * 2 * self.size


class _Coded(Codec):
    """Sends codes of each n-th part to one rank, which sums, then codes of the sums to all ranks.

    Sums are made in the tensor's own type, where a ring would add up codes, and their errors.
    """

    def __init__(self, size: int, like: torch.Tensor, ranks: int) -> None:
        super().__init__(size, like, ranks)
        self._part = -(-size // (ranks * _BLOCK)) * _BLOCK
        self._padded = like.new_zeros(ranks, self._part)

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Codes of ``rows``, shape ``(n, part)``, as bytes of shape ``(n, code bytes)``."""

    @abstractmethod
    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``codes``, shape ``(n, part)``, of the tensor's type."""

    def __call__(
        self, tensor: torch.Tensor, name: str, scaling: Scaling, among: ProcessSet
    ) -> Steps:
        flat = self._padded.view(-1)
        torch.mul(tensor, scaling.before, out=flat[: self.size])
        codes = self.encode(self._padded)
        received = yield alltoall_async(codes, name=f"{name}.parts", process_set=among)
        total = self.decode(received[0]).sum(dim=0, keepdim=True).mul_(scaling.after)
        codes_of_sums = torch.empty_like(codes)
        yield gather_into(codes_of_sums, self.encode(total), f"{name}.sums", among)
        flat.copy_(self.decode(codes_of_sums).view(-1))
        tensor.copy_(flat[: self.size])
        flat[self.size :].zero_()

    @abstractmethod
    def _code_bytes(self) -> float:
        """Bytes of one part's codes."""

    def sent_bytes(self) -> float:
        return 2 * (self.ranks - 1) * self._code_bytes()


class Bf16Codec(_Coded):
    """``bf16``: the upper half of each float32, rounded to nearest."""

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.view(torch.bfloat16).to(self.like.dtype)

    def _code_bytes(self) -> float:
        return 2 * self._part


class Int8Codec(_Coded):
    """``int8``: a scale for each block, and stochastic rounding, which is unbiased.

    With u uniform in [0, 1), floor(x / s + u) has the expected value x / s (QSGD, NeurIPS 2017).
    """

    def __init__(self, size: int, like: torch.Tensor, ranks: int) -> None:
        super().__init__(size, like, ranks)
        # A generator of its own leaves the script's random numbers unchanged; ranks round
        # independently.
        self._random = torch.Generator(like.device).manual_seed(rank())

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        blocks = rows.view(len(rows), -1, _BLOCK)
        scales = blocks.abs().amax(dim=2, keepdim=True).to(torch.float32).div_(127)
        noise = torch.rand(
            blocks.shape, generator=self._random, device=rows.device, dtype=torch.float32
        )
        codes = noise.addcdiv_(blocks, scales.clamp_min(1e-38)).floor_().clamp_(-127, 127)
        parts = (codes.to(torch.int8).view(len(rows), -1), scales.view(len(rows), -1))
        return torch.cat([part.view(torch.uint8) for part in parts], dim=1)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        values = codes[:, : self._part].contiguous().view(torch.int8).to(torch.float32)
        scales = codes[:, self._part :].contiguous().view(torch.float32)
        blocks = values.view(len(codes), -1, _BLOCK).mul_(scales[:, :, None])
        return blocks.view(len(codes), -1).to(self.like.dtype)

    def _code_bytes(self) -> float:
        return self._part * (1 + 4 / _BLOCK)


class TopK(Codec):
    """``topk``: the elements of largest magnitude, as indices and values.

    What a step leaves out is added to the gradient of the next (error feedback; Deep Gradient
    Compression, ICLR 2018; Karimireddy et al., ICML 2019).

    Args:
        size: As of any codec.
        like: As of any codec.
        ranks: As of any codec.
        ratio: Share of the elements that are sent, at least one.
    """

    def __init__(self, size: int, like: torch.Tensor, ranks: int, ratio: float) -> None:
        super().__init__(size, like, ranks)
        self._count = min(max(round(ratio * size), 1), size)
        self._left_out = like.new_zeros(size)

    def __call__(
        self, tensor: torch.Tensor, name: str, scaling: Scaling, among: ProcessSet
    ) -> Steps:
        owed = self._left_out.add_(tensor)
        numbers = owed.abs().topk(self._count, sorted=False).indices
        values = owed[numbers]
        owed[numbers] = 0
        message = torch.cat([numbers.to(torch.int32), values.to(torch.float32).view(torch.int32)])
        gathered = yield allgather_async(message, name=name, process_set=among)
        rows = gathered.view(-1, 2, self._count)
        values = rows[:, 1].reshape(-1).view(torch.float32)
        if not bool(values.isfinite().all()):
            self.reset()  # an overflow, as in mixed precision, must not stay in the error feedback
        tensor.zero_()
        add_at(tensor, rows[:, 0].reshape(-1).to(torch.int64), values.to(tensor.dtype))
        tensor.mul_(scaling.before * scaling.after)

    def sent_bytes(self) -> float:
        return (self.ranks - 1) * 8 * self._count

    def left_out(self) -> torch.Tensor:
        return self._left_out

    def state(self) -> dict[str, torch.Tensor]:
        return {LEFT_OUT: self._left_out}


class PowerSGD(Codec):
    """``powersgd``: a low-rank matrix, by one step of the power method from the last one.

    Algorithm 1 of PowerSGD (NeurIPS 2019): P = M Q, summed and orthogonalized; Q = M^T P, summed;
    the result is P Q^T, and its error is added to the next gradient (error feedback).

    Args:
        size: As of any codec.
        like: As of any codec.
        ranks: As of any codec.
        columns: Columns of the matrix; the last row is padded with zeros.
        rank_kept: Rank of the result.
    """

    def __init__(
        self, size: int, like: torch.Tensor, ranks: int, columns: int, rank_kept: int
    ) -> None:
        super().__init__(size, like, ranks)
        rows = -(-size // columns)
        self._left_out = like.new_zeros(rows, columns)
        self._left = like.new_empty(rows, rank_kept)
        self._right = like.new_empty(columns, rank_kept)
        self.reset()

    def reset(self) -> None:
        self._left_out.zero_()
        self._draw_right()

    def _draw_right(self) -> None:
        # A generator of its own: equal on all ranks, and the script's random numbers stay
        # unchanged.
        generator = torch.Generator().manual_seed(self._left_out.numel())
        self._right.copy_(torch.randn(self._right.shape, generator=generator, device="cpu"))

    def __call__(
        self, tensor: torch.Tensor, name: str, scaling: Scaling, among: ProcessSet
    ) -> Steps:
        matrix, left, right = self._left_out, self._left, self._right
        matrix.view(-1)[: self.size].add_(tensor)
        torch.matmul(matrix, right, out=left)
        yield allreduce_async_(left, name=f"{name}.left", op=Sum, process_set=among)
        # At least float32: LAPACK has no half precision.
        left.copy_(torch.linalg.qr(left.to(torch.promote_types(left.dtype, torch.float32))).Q)
        torch.matmul(matrix.T, left, out=right)
        own = torch.matmul(left, right.T, out=torch.empty_like(matrix))  # not as autocast says
        matrix.sub_(own)
        matrix.view(-1)[self.size :].zero_()
        yield from allreduce(right, f"{name}.right", scaling, among)
        torch.matmul(left, right.T, out=own)
        tensor.copy_(own.view(-1)[: self.size])
        if not bool(right.isfinite().all()):
            self.reset()  # an overflow, as in mixed precision, must not stay in the error feedback
        elif not bool(right.any()):
            self._draw_right()  # the power method cannot leave zero

    def sent_bytes(self) -> float:
        elements = self._left.numel() + self._right.numel()
        return 2 * (self.ranks - 1) / self.ranks * elements * self.like.element_size()

    def left_out(self) -> torch.Tensor:
        return self._left_out.view(-1)[: self.size]

    def state(self) -> dict[str, torch.Tensor]:
        return {LEFT_OUT: self._left_out, "right": self._right}


def make_codec(
    plan: ClassPlan, size: int, like: torch.Tensor, ranks: int, columns: int
) -> Codec | None:
    """Return the codec of a plan, or ``None`` if gradients are not compressed.

    Args:
        plan: Names the codec, its ratio and its rank.
        size: Elements of the tensor.
        like: A tensor of its type, on its device.
        ranks: Number of ranks that reduce it.
        columns: Columns of the matrix; 1 if the tensor is none.

    Raises:
        SpaceError: No codec has that name.
    """
    if plan.codec == "fp16":
        return Fp16Codec(size, like, ranks)
    if plan.codec == "bf16":
        return Bf16Codec(size, like, ranks)
    if plan.codec == "int8":
        return Int8Codec(size, like, ranks)
    if plan.codec == "topk":
        return TopK(size, like, ranks, plan.ratio)
    if plan.codec == "powersgd" and columns > 1:
        most = min(columns, math.ceil(size / columns))
        return PowerSGD(size, like, ranks, columns, min(plan.rank, most))
    if plan.codec in CODECS:
        return CODECS[plan.codec](plan, size, like, ranks)
    if plan.codec not in ("none", "powersgd"):
        raise SpaceError(
            f"no codec is called {plan.codec!r} on this rank",
            hint="Load the file that adds it on every rank: HVD_AUTOSYNC_EXTENSIONS=FILE.",
        )
    return None
