"""Averages parameters: exchanges each rank's change since they were equal, with any codec.

``x = anchor + mean over ranks of (x_i - anchor)``, which is the mean of x_i. A change is zero where
nothing was trained, it suits codecs with error feedback, and the anchor is a state to return to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_autosync.runtime.collectives.operations import Sum, allreduce_async_, size, synchronize
from hvd_autosync.runtime.exchange.buckets import Bucket, wire_dtype
from hvd_autosync.runtime.exchange.dispatcher import Dispatcher
from hvd_autosync.runtime.exchange.exchanges import Scaling
from hvd_autosync.runtime.exchange.planning import Planning
from hvd_autosync.search_space.exchange_plan import PARAMETER_CLASSES, ExchangePlan, for_changes


class Averaging:
    """The parameters of one optimizer, which ranks change separately and then average.

    It takes twice the memory of the parameters in addition to theirs, until it is closed.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        named: Parameter -> its name and its class; equal on all ranks, in the same order.
        plan: How gradients are exchanged, and the changes like them.

    Attributes:
        parameters: The parameters, in order.
        dispatcher: Exchanges the changes.
    """

    def __init__(
        self, name: str, named: Mapping[torch.nn.Parameter, tuple[str, str]], plan: ExchangePlan
    ) -> None:
        self._name = f"hvd_autosync.average.{name}"
        self.parameters = tuple(named)
        self._anchors = [parameter.detach().clone() for parameter in named]
        # Contiguous even if the parameters are not: buckets would replace other changes by copies.
        self._changes = [
            torch.zeros_like(anchor, memory_format=torch.contiguous_format)
            for anchor in self._anchors
        ]
        # Buckets exchange gradients of parameters; here, those of twins that share the parameters'
        # memory.
        self._twins = [torch.nn.Parameter(each.detach(), requires_grad=False) for each in named]
        for twin, change in zip(self._twins, self._changes, strict=True):
            twin.grad = change
        names = {
            twin: (f"average.{own}", parameter_class)
            for twin, (own, parameter_class) in zip(self._twins, named.values(), strict=True)
        }
        planning = Planning(for_changes(plan), names, Scaling(1.0, 1.0 / size()))

        def make_buckets(_: Any) -> list[Bucket]:
            return planning.buckets(self._twins, {})

        self._compressed = any(plan.of(each).codec != "none" for each in PARAMETER_CLASSES)
        #: For averages that are evaluated or saved: whole changes, uncompressed.
        self._plain = planning.plain(self._twins)
        self.dispatcher = Dispatcher(self._name, make_buckets, self._plain, lambda: None)

    @torch.no_grad()
    def begin(self) -> None:
        """Take the current parameters, which are equal, as the anchor."""
        torch._foreach_copy_(self._anchors, self._data())

    @property
    def touched(self) -> bool:
        """Whether a codec would hold back what somebody has set since parameters were equal.

        Their versions do not tell: a change of ``data`` leaves them.
        """
        pairs = zip(self._data(), self._anchors, strict=True)
        equal = (torch.equal(own, anchor.to(own)) for own, anchor in pairs)
        return self._compressed and not all(equal)

    @torch.no_grad()
    def exchange(self, *, exact: bool) -> None:
        """Add up the changes of all ranks; a collective.

        Args:
            exact: Without a codec, and with what error feedback has kept. A codec may leave out
                most of the changes of a round: they are sent after later rounds, but an average
                that is evaluated or saved has no later rounds.
        """
        torch._foreach_copy_(self._changes, self._data())
        torch._foreach_sub_(self._changes, self._anchors)
        if exact and self._compressed:
            self.dispatcher.take_left_out()
            self.dispatcher.run(bucket.send_plainly() for bucket in self._plain)
            return
        for twin in self._twins:
            self.dispatcher.arrived(twin)
        self.dispatcher.finish()

    @torch.no_grad()
    def take(self, ranks: int) -> None:
        """Apply the mean of the changes, so that parameters are equal.

        Args:
            ranks: How many ranks took part; those that wait in ``hvd.join()`` do not.
        """
        if ranks < size():
            torch._foreach_mul_(self._changes, size() / ranks)
        torch._foreach_add_(self._anchors, self._changes)
        torch._foreach_copy_(self._data(), self._anchors)

    def close(self) -> None:
        """Free what averages need; :meth:`average_tensors` needs nothing."""
        self.dispatcher.close()
        for twin in self._twins:
            twin.grad = None
        self._anchors, self._changes, self._plain = [], [], []

    def _data(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.parameters]

    def average_tensors(self, what: str, tensors: Sequence[torch.Tensor], ranks: int) -> None:
        """Replace other floating-point tensors by their means over ranks; a collective.

        Args:
            what: Names the operations.
            tensors: The same on all ranks, in the same order.
            ranks: As of :meth:`take`.
        """
        sent = [
            each.detach().to(wire_dtype(each.dtype), copy=True).contiguous() for each in tensors
        ]
        handles = [
            allreduce_async_(each, name=f"{self._name}.{what}.{i}", op=Sum)
            for i, each in enumerate(sent)
        ]
        for tensor, total, handle in zip(tensors, sent, handles, strict=True):
            synchronize(handle)
            tensor.detach().copy_(total.div_(ranks))
