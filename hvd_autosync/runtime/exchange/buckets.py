"""Buckets: gradients that are exchanged together, and the fusion buffer that holds them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from hvd_autosync.errors import SpaceError
from hvd_autosync.runtime.collectives.operations import Sum, collectives
from hvd_autosync.runtime.exchange.codecs import Codec
from hvd_autosync.runtime.exchange.exchanges import Exchange, Scaling, Steps
from hvd_autosync.runtime.state.partition import cut_evenly

#: Types that Horovod's reductions support (``horovod/torch/mpi_ops_v2.cc``); bfloat16 is not among
#: them and is reduced as float32.
_REDUCIBLE = (torch.float16, torch.float32, torch.float64)


def split_evenly(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Split the indices of ``sizes`` in order into at most ``count`` groups of about equal sums.

    A group is closed when all groups so far have reached their share of the total
    ("ordered-balanced" in AutoSync's code).

    Args:
        sizes: Bytes of each.
        count: Number of groups wanted, at least 1.
    """
    total, reached = sum(sizes), 0
    groups: list[list[int]] = [[]]
    for index, size in enumerate(sizes):
        groups[-1].append(index)
        reached += size
        if reached * count >= total * len(groups) and index + 1 < len(sizes):
            groups.append([])
    return groups


def slice_bounds(size: int, count: int, unit: int = 1) -> list[tuple[int, int]]:
    """Split ``size`` elements into at most ``count`` nonempty slices of about equal length.

    Args:
        size: Number of elements.
        count: Number of slices wanted.
        unit: Elements that stay together, as those of a matrix row.
    """
    return cut_evenly(size, min(count, max(-(-size // unit), 1)), unit)


class Bucket(ABC):
    """Gradients that are exchanged together, step after step.

    Args:
        name: Name of its operations, equal on all ranks.
        parameters: Those whose gradients it holds, in its order.

    Attributes:
        needs_all: Whether its exchange is more than plain allreduces, so that ranks that wait in
            ``hvd.join()`` cannot take part.
        codec: The codec of its exchange, if any.
        deferrable: Whether it is a single plain allreduce of whole gradients, which needs no
            further action.
        size_bytes: Bytes of its gradients.
        missing: Number of its gradients that have not arrived in this step.
        started: Whether its exchange is in progress or done in this step.
        sent_in_place: Whether Horovod may write into its gradients while it is in progress.
    """

    needs_all = False
    sent_in_place = False
    deferrable = False
    codec: Codec | None = None

    def __init__(self, name: str, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.name = name
        self.parameters = tuple(parameters)
        self.size_bytes = sum(p.numel() * p.element_size() for p in self.parameters)
        self.reset()

    def reset(self) -> None:
        """Prepare for the next step."""
        self.missing = len(self.parameters)
        self.started = False

    @abstractmethod
    def send(self) -> Steps:
        """Exchange the gradients; those that did not arrive count as zeros."""

    @abstractmethod
    def send_plainly(self) -> Steps:
        """Exchange them by plain allreduces."""


class GradientBucket(Bucket):
    """One whole gradient, exchanged by one plain allreduce, exactly as by Horovod's own optimizer.

    Args:
        name: As of any bucket.
        parameter: Its gradient is of a type that Horovod can reduce.
        scaling: Factors of the reduction.
    """

    deferrable = True
    sent_in_place = True

    def __init__(self, name: str, parameter: torch.nn.Parameter, scaling: Scaling) -> None:
        super().__init__(name, (parameter,))
        self._parameter = parameter
        self._allreduce_async_ = collectives().allreduce_async_
        self._scaling = scaling

    def start(self) -> int:
        """Start the only operation; returns its handle."""
        gradient = dense_gradient(self._parameter)
        return self._allreduce_async_(
            gradient,
            name=self.name,
            op=Sum,
            prescale_factor=self._scaling.before,
            postscale_factor=self._scaling.after,
        )

    def send(self) -> Steps:
        yield self.start()

    def send_plainly(self) -> Steps:
        return self.send()


class FlatBucket(Bucket):
    """Dense gradients of one type on one device, as one flat tensor.

    A single gradient is sent from its own memory, several from a fusion buffer that is allocated
    once.

    Args:
        name: As of any bucket.
        parameters: As of any bucket.
        plain: Reduces the flat tensor in place, by allreduces.
        exchange: Reduces it in another way, if there is one.
        codec: The codec that this exchange uses, if any.
        bounds: The elements to exchange, if it is a slice of a single parameter.
        coded_from: The first element of the flat tensor that the codec reduces on this rank.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[torch.nn.Parameter],
        plain: Exchange,
        exchange: Exchange | None = None,
        codec: Codec | None = None,
        bounds: tuple[int, int] | None = None,
        coded_from: int = 0,
    ) -> None:
        super().__init__(name, parameters)
        self.needs_all = exchange is not None
        self.deferrable = exchange is None and bounds is None
        self.codec = codec
        self._plain = plain
        self._exchange = exchange or plain
        self._slice = slice(*bounds) if bounds else slice(None)
        self._coded_from = coded_from
        own = self.parameters[0].dtype
        self.sent_in_place = len(self.parameters) == 1 and wire_dtype(own) == own
        self._flat: torch.Tensor | None = None
        self._views: list[torch.Tensor] = []

    def send(self) -> Steps:
        return self._send(self._exchange)

    def send_plainly(self) -> Steps:
        return self._send(self._plain)

    @torch.no_grad()
    def take_left_out(self) -> None:
        """Add to the gradients what error feedback has kept of them, which is then zero."""
        left = None if self.codec is None else self.codec.left_out()
        if left is None:
            return
        begin = -self._coded_from
        for parameter in self.parameters:
            gradient = dense_gradient(parameter).view(-1)
            if len(self.parameters) == 1:
                gradient = gradient[self._slice]
            end = begin + gradient.numel()
            own = left[max(begin, 0) : max(end, 0)]
            gradient[max(-begin, 0) :][: own.numel()].add_(own)
            begin = end
        left.zero_()

    def drop_codec(self) -> None:
        """Exchange the gradients uncompressed from now on."""
        if self.codec is not None:
            self.codec, self._exchange = None, self._plain

    def _send(self, exchange: Exchange) -> Steps:
        gradients = [dense_gradient(parameter) for parameter in self.parameters]
        if self.sent_in_place:
            yield from exchange(gradients[0].view(-1)[self._slice], self.name)
            return
        if len(gradients) == 1:
            gradients = [gradients[0].view(-1)[self._slice]]
        if self._flat is None:
            self._flat = self._allocate(gradients)
        torch._foreach_copy_(self._views, gradients)
        yield from exchange(self._flat, self.name)
        torch._foreach_copy_(gradients, self._views)

    def _allocate(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        size = sum(gradient.numel() for gradient in gradients)
        flat = gradients[0].new_empty(size, dtype=wire_dtype(gradients[0].dtype))
        begin = 0
        for gradient in gradients:
            self._views.append(flat[begin : begin + gradient.numel()].view_as(gradient))
            begin += gradient.numel()
        return flat


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which gradients of a type are reduced.

    Raises:
        SpaceError: They cannot be reduced.
    """
    if dtype in _REDUCIBLE:
        return dtype
    if dtype is not torch.bfloat16:
        raise SpaceError(
            f"gradients of type {dtype} cannot be reduced", hint="Use a floating-point type."
        )
    return torch.float32


def dense_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the gradient, dense and contiguous; zeros if there is none, as Horovod has."""
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    elif gradient.is_sparse or not gradient.is_contiguous():
        gradient = (gradient.to_dense() if gradient.is_sparse else gradient).contiguous()
    else:
        return gradient
    parameter.grad = gradient
    return gradient
