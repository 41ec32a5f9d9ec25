"""Notices gradients that the script changes in place between their arrival and the step.

Horovod reduces a gradient in its own memory, so a factor by which all ranks multiply it takes
effect before or after. A bucket that sends a copy would lose it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

#: For the user.
HELD = (
    "the script changes gradients between backward() and step() without synchronize(): nothing is "
    "sent before step()"
)


class ChangedGradients:
    """Gradients of one step, with the versions that they had when nobody had changed them.

    Args:
        with_bits: Compare their bits too, because a change of ``p.grad.data`` leaves the version.
    """

    def __init__(self, *, with_bits: bool) -> None:
        self.with_bits = with_bits
        self._noted: dict[torch.nn.Parameter, tuple[torch.Tensor, int, int]] = {}

    def note(self, parameter: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """The gradient of ``parameter`` is complete."""
        bits = sum_of_bits(gradient) if self.with_bits and not gradient.is_sparse else 0
        self._noted[parameter] = (gradient, gradient._version, bits)

    def written(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """An exchange may have written into the gradients of ``parameters`` itself."""
        for parameter in parameters:
            if parameter in self._noted:
                gradient, _, bits = self._noted[parameter]
                self._noted[parameter] = (gradient, gradient._version, bits)

    def found(self) -> bool:
        """Return whether any was changed by the script."""
        return any(
            gradient._version != version or (bits and sum_of_bits(gradient) != bits)
            for gradient, version, bits in self._noted.values()
        )

    def clear(self) -> None:
        """Prepare for the next step."""
        self._noted.clear()


def sum_of_bits(tensor: torch.Tensor) -> int:
    """Return the sum of a tensor's bits as integers of 64 bits, the last one of the rest; not 0."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.element_size() % 8:  # a part of another tensor
        flat = flat.clone()
    bits = flat.view(torch.uint8)
    whole = len(bits) // 8 * 8
    rest = int.from_bytes(bits[whole:].tolist(), "little")
    return int(bits[:whole].view(torch.int64).sum()) + rest or 1
