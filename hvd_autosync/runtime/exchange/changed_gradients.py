"""Notices gradients that the script changes in place between their arrival and the step.

Horovod reduces a gradient in its own memory, so a factor by which all ranks multiply it takes
effect before or after. A bucket that sends a copy would lose it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch

#: A gradient, its version and the sum of its bits.
_Noted: TypeAlias = tuple[torch.Tensor, int | None, torch.Tensor | None]
#: For the user.
HELD = (
    "the script changes gradients between backward() and step() without synchronize(): nothing is "
    "sent before step()"
)


@dataclass
class Habits:
    """What one exchange has noticed of a script, for those that follow it.

    Attributes:
        changes_gradients: Whether it changes gradients between ``backward()`` and ``step()``.
    """

    changes_gradients: bool = False


class ChangedGradients:
    """Gradients of one step, with the versions that they had when nobody had changed them.

    Args:
        with_bits: Compare their bits too, because a change of ``p.grad.data`` leaves the version.
    """

    def __init__(self, *, with_bits: bool) -> None:
        self.with_bits = with_bits
        #: Without bits where Horovod changes them, without a version where gradients are views of
        #: one buffer, which have one version together.
        self._noted: dict[torch.nn.Parameter, _Noted] = {}

    def note(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """The gradient of ``parameter`` is complete."""
        bits = _sum_of_bits(gradient) if self.with_bits and not gradient.is_sparse else None
        alone = gradient.is_sparse or not gradient._is_view()
        self._noted[parameter] = (gradient, gradient._version if alone else None, bits)

    def in_flight(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Gradients of ``parameters`` are reduced in their own memory from here on."""
        for parameter in parameters:
            if parameter in self._noted:
                self._noted[parameter] = (*self._noted[parameter][:2], None)

    def written(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """An exchange may have written into the gradients of ``parameters`` itself."""
        for parameter in parameters:
            if parameter in self._noted:
                gradient, version, bits = self._noted[parameter]
                if version is not None and version == gradient._version:
                    continue  # each of its writes counts, and a sum is a pass over memory
                version = None if version is None else gradient._version
                bits = None if bits is None else _sum_of_bits(gradient)
                self._noted[parameter] = (gradient, version, bits)

    def found(self) -> bool:
        """Return whether any was changed by the script."""
        noted = self._noted.values()
        if any(version not in (None, gradient._version) for gradient, version, _ in noted):
            return True
        pairs = [(bits, _sum_of_bits(gradient)) for gradient, _, bits in noted if bits is not None]
        if not pairs:
            return False
        device = pairs[0][0].device
        before, now = (
            torch.stack([each.to(device) for each in s]) for s in zip(*pairs, strict=True)
        )
        return not torch.equal(before, now)

    def clear(self) -> None:
        """Prepare for the next step."""
        self._noted.clear()


def sum_of_bits(*tensors: torch.Tensor) -> int:
    """Return the sum of tensors' bits as integers of 64 bits, the last one of the rest; not 0."""
    sums = [_sum_of_bits(each) for each in tensors]
    return int(torch.stack([each.to(sums[0].device) for each in sums]).sum()) or 1


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    bytes_each = tensor.element_size()
    aligned = not (tensor.numel() * bytes_each % 8 or tensor.storage_offset() * bytes_each % 8)
    if (
        aligned and tensor.numel() > 1 and tensor.is_contiguous()
    ):  # in few calls: it is in each step
        return tensor.detach().view(-1).view(torch.int64).sum()
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8 or flat.stride(0) != 1:
        flat = flat.clone(memory_format=torch.contiguous_format)  # a part of another tensor
    bits = flat.view(torch.uint8)
    whole = len(bits) // 8 * 8
    total = bits[:whole].view(torch.int64).sum()
    if whole == len(bits):
        return total
    rest = bits[whole:].to(torch.int64)
    return total + (rest << 8 * torch.arange(len(rest), device=rest.device)).sum()
