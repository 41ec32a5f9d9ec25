"""Measures the factors of linear layers while the model is profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hvd_autosync.runtime.patches.linear import (
    LinearLayer,
    LinearPass,
    is_product,
    product,
    watch_linear,
)


class FactorMeter:
    """Counts, in one step, the bytes of layers' factors whose product is the weight's gradient.

    A product is compared with the gradient of one backward pass, before that is added to others and
    reduced, and after hooks of the script that are there already. It ends with the first step whose
    gradients are finite: its products take time, and the steps that follow are timed.

    Args:
        parameters: Of the script's optimizers; matrices among them are watched.

    Attributes:
        factor_bytes: Once it has ended, bytes of each weight that had no other gradients.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._layers = watch_linear(p for p in parameters if p.requires_grad)
        self._bytes: dict[torch.nn.Parameter, int] = {}
        self._finite = True
        self.factor_bytes: dict[torch.nn.Parameter, int] = {}
        self._hooks = [p.register_hook(self._hook(p, each)) for p, each in self._layers.items()]

    def _hook(
        self, weight: torch.nn.Parameter, layer: LinearLayer
    ) -> Callable[[torch.Tensor], None]:
        def arriving(gradient: torch.Tensor) -> None:
            passes, so_far = list(layer.passes), self._bytes.get(weight, 0)
            layer.clear()
            if gradient.is_sparse:
                self._bytes[weight] = -1
            elif not bool(gradient.isfinite().all()):
                self._finite = False  # as in the first steps of a gradient scaler
            elif so_far >= 0:
                fine = _is_product(passes, gradient)
                self._bytes[weight] = so_far + sum(map(_factor_bytes, passes)) if fine else -1

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
        self._hooks, self._layers = [], {}
        self.factor_bytes = {weight: count for weight, count in self._bytes.items() if count > 0}


def _factor_bytes(each: LinearPass) -> int:
    return sum(t.numel() * t.element_size() for t in (each.inputs, each.output_gradients))


@torch.no_grad()
def _is_product(passes: list[LinearPass], gradient: torch.Tensor) -> bool:
    if not passes:
        return False
    made = product(passes, gradient.dtype, bias=False)
    return is_product(made, gradient, passes, bias=False)
