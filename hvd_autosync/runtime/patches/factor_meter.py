"""Measures the factors of linear layers while the model is profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hvd_autosync.runtime.measure.repeated_bits import FactorBytes, coded_bytes
from hvd_autosync.runtime.patches.linear import (
    LinearLayer,
    LinearPass,
    is_product,
    product,
    watch_linear,
    watched,
)


class FactorMeter:
    """Counts, in one step, the bytes of layers' factors whose product is the weight's gradient.

    A product is compared with the gradient of one backward pass, before that is added to others and
    reduced, and after hooks of the script that are there already. It ends with the first step whose
    gradients are finite: its products take time, and the steps that follow are timed.

    Args:
        parameters: Of the script's optimizers; matrices among them are watched.

    Attributes:
        factors: Once it has ended, those of each weight that had no other gradients.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        trained = [p for p in parameters if p.requires_grad]
        #: Those whose passes an exchange by factors will send, and which of these it keeps.
        self._used = {p: each.worth for p in trained if (each := watched(p)) is not None}
        self._layers = watch_linear(trained)
        #: ``None``: of a weight that had other gradients, too.
        self._bytes: dict[torch.nn.Parameter, FactorBytes | None] = {}
        self._finite = True
        self.factors: dict[torch.nn.Parameter, FactorBytes] = {}
        self._hooks = [p.register_hook(self._hook(p, each)) for p, each in self._layers.items()]

    def _hook(
        self, weight: torch.nn.Parameter, layer: LinearLayer
    ) -> Callable[[torch.Tensor], None]:
        def arriving(gradient: torch.Tensor) -> None:
            passes, so_far = list(layer.latest), self._bytes.get(weight, FactorBytes())
            if weight not in self._used:
                layer.clear()
            if gradient.is_sparse:
                self._bytes[weight] = None
            elif not bool(gradient.isfinite().all()):
                self._finite = False  # as in the first steps of a gradient scaler
            elif so_far is not None:
                fine = _is_product(passes, gradient)
                self._bytes[weight] = sum(map(_factor_bytes, passes), so_far) if fine else None

        return arriving

    def step_ends(self) -> None:
        """A step has ended, and with it the measurement, if its gradients were finite."""
        if not self._finite:
            self._bytes, self._finite = {}, True
            return
        self.close()

    def close(self) -> None:
        """End the measurement."""
        for hook in self._hooks:
            hook.remove()
        for weight, layer in self._layers.items():
            layer.worth = self._used.get(weight, layer.worth)
        self._hooks, self._layers = [], {}
        self.factors = {weight: each for weight, each in self._bytes.items() if each and each.whole}


def _factor_bytes(each: LinearPass) -> FactorBytes:
    tensors = (each.inputs, each.output_gradients)
    whole = sum(t.numel() * t.element_size() for t in tensors)
    return FactorBytes(whole, sum(map(coded_bytes, tensors)))


@torch.no_grad()
def _is_product(passes: list[LinearPass], gradient: torch.Tensor) -> bool:
    if not passes:
        return False
    made = product(passes, gradient.dtype, bias=False)
    return is_product(made, gradient, passes, bias=False)
