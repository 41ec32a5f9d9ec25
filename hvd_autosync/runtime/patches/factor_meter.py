"""Measures the factors of linear layers while the model is profiled."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hvd_autosync.runtime.patches.linear import (
    LinearLayer,
    LinearPass,
    matches,
    unwatch_linear,
    watch_linear,
)


class FactorMeter:
    """Counts the bytes of layers' factors whose product is the gradient of the weight.

    A product is compared with the gradient of one backward pass, before that is added to others and
    reduced, and after hooks of the script that are there already.

    Args:
        parameters: Of the script's optimizers; matrices among them are watched.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._layers = watch_linear(p for p in parameters if p.requires_grad and p.dim() == 2)
        self._bytes: dict[torch.nn.Parameter, int] = {}
        self._hooks = [p.register_hook(self._hook(p, each)) for p, each in self._layers.items()]

    def _hook(
        self, weight: torch.nn.Parameter, layer: LinearLayer
    ) -> Callable[[torch.Tensor], None]:
        def arriving(gradient: torch.Tensor) -> None:
            passes, so_far = list(layer.passes), self._bytes.get(weight, 0)
            layer.clear()
            if so_far >= 0:
                fine = _is_product(passes, gradient)
                self._bytes[weight] = so_far + sum(map(_factor_bytes, passes)) if fine else -1

        return arriving

    def finish(self) -> dict[torch.nn.Parameter, int]:
        """End; returns the bytes of all steps of each weight that had no other gradients."""
        for hook in self._hooks:
            hook.remove()
        unwatch_linear(self._layers)
        return {weight: count for weight, count in self._bytes.items() if count > 0}


def _factor_bytes(each: LinearPass) -> int:
    return sum(t.numel() * t.element_size() for t in (each.inputs, each.output_gradients))


@torch.no_grad()
def _is_product(passes: list[LinearPass], gradient: torch.Tensor) -> bool:
    if not passes or gradient.is_sparse:
        return False
    product = passes[0].weight_gradient().to(gradient.dtype)
    for each in passes[1:]:
        product = product.add_(each.weight_gradient())
    return matches(product, gradient, passes[0].inputs.dtype)
