"""Watches linear layers: what went into each, and the gradients of what came out.

``torch.nn.functional.linear`` is what ``nn.Linear``, attention and most wrappers of linear layers
call. Watched weights are found there by identity, so it does not matter who calls it.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

#: More passes than this between two steps are no accumulation: nobody uses these gradients.
_MOST_PASSES = 64


@dataclass(frozen=True)
class LinearPass:
    """One pass of a batch through a linear layer: its sufficient factors.

    Attributes:
        inputs: Inputs X of the layer, shape ``k x n``.
        output_gradients: Gradients G of its outputs, shape ``k x m``.
    """

    inputs: torch.Tensor
    output_gradients: torch.Tensor

    @property
    def rows(self) -> int:
        """Rows of the batch, k."""
        return len(self.inputs)

    def weight_gradient(self) -> torch.Tensor:
        """G^T X, ``m x n``, by the call of autograd, and so with its rounding.

        (``addmm`` and ``mm`` in ``tools/autograd/derivatives.yaml`` of PyTorch.)
        """
        with _without_autocast(self.inputs.device):
            return self.output_gradients.t().mm(self.inputs)

    def bias_gradient(self) -> torch.Tensor:
        """The sum of G's rows, ``m``."""
        return self.output_gradients.sum(0)


class LinearLayer:
    """The passes through one watched layer since the last :meth:`clear`.

    Args:
        weight: Its weight, shape ``m x n``.

    Attributes:
        bias: Its bias, once it was called with one.
        passes: Passes whose output gradients are known, in the order of backward.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self._weight = weakref.ref(weight)
        self.bias: torch.nn.Parameter | None = None
        self.passes: list[LinearPass] = []
        # Backward runs hooks in one thread for each device.
        self._lock = threading.Lock()

    @property
    def weight(self) -> torch.nn.Parameter | None:
        """Its weight, while the script holds it."""
        return self._weight()

    def clear(self) -> None:
        """Forget all passes."""
        with self._lock:
            self.passes = []

    def called(
        self, inputs: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor
    ) -> None:
        """A batch has passed the layer; its output gradients will follow, if it is trained."""
        if isinstance(bias, torch.nn.Parameter):
            self.bias = bias
        kept, layer = inputs.detach(), weakref.ref(self)

        def arrived(gradients: torch.Tensor) -> None:
            self = layer()
            if self is not None:
                self._arrived(kept, gradients.detach())

        outputs.register_hook(arrived)

    def _arrived(self, inputs: torch.Tensor, gradients: torch.Tensor) -> None:
        # Under autocast the layer has cast its inputs likewise.
        flat = inputs.reshape(-1, inputs.shape[-1]).to(gradients.dtype)
        passed = LinearPass(flat, gradients.reshape(-1, gradients.shape[-1]))
        with self._lock:
            if len(self.passes) == _MOST_PASSES:
                self.passes = []
            self.passes.append(passed)


#: Identity of a weight -> its layer.
_WATCHED: dict[int, LinearLayer] = {}


def watch_linear(weights: Iterable[torch.nn.Parameter]) -> dict[torch.nn.Parameter, LinearLayer]:
    """Watch the layers of these weights from now on, until :func:`unwatch_linear`.

    Args:
        weights: Matrices; those of no linear layer get no passes.
    """
    _install()
    layers = {}
    for weight in weights:
        layer = _WATCHED.get(id(weight))
        if layer is None or layer.weight is not weight:
            layer = LinearLayer(weight)
            _WATCHED[id(weight)] = layer
            weakref.finalize(weight, _WATCHED.pop, id(weight), None).atexit = False
        layers[weight] = layer
    return layers


def unwatch_linear(weights: Iterable[torch.nn.Parameter]) -> None:
    """Watch the layers of these weights no longer."""
    for weight in weights:
        layer = _WATCHED.pop(id(weight), None)
        if layer is not None:
            layer.clear()


def matches(product: torch.Tensor, gradient: torch.Tensor, made_in: torch.dtype) -> bool:
    """Whether a gradient is the product of its factors, up to the order of addition.

    The product is made by the call of autograd, so nearly always both have the same bits. Where
    a library adds in another order, a low type may round to a neighbour.

    Args:
        product: The product, in the type of the gradient.
        gradient: The gradient, of the same shape.
        made_in: The type of the factors, in which the product was made.
    """
    if torch.equal(product, gradient):
        return True
    largest = float(gradient.abs().max())
    if not math.isfinite(largest):
        return False
    finest = torch.finfo(torch.promote_types(made_in, torch.float32)).eps
    own = max(torch.finfo(made_in).eps, torch.finfo(gradient.dtype).eps)
    neighbour = 2 * own if own > finest else 0.0
    allowed = gradient.abs().mul(neighbour).add_(8 * finest * largest)
    return bool(((product - gradient).abs() <= allowed).all())


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


@functools.cache
def _install() -> None:
    linear = functional.linear

    @functools.wraps(linear)
    def watched_linear(input: Any, weight: Any, bias: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return linear(input, weight, bias)
        outputs = linear(input, weight, bias)
        layer = _WATCHED.get(id(weight))
        # Gradients pass through a frozen layer to its inputs, but it has none itself.
        if layer is not None and outputs.requires_grad and weight.requires_grad:
            layer.called(input, bias, outputs)
        return outputs

    # torch.jit knows functions by identity.
    vars(torch.jit)["_builtins"]._register_builtin(watched_linear, "aten::linear")
    vars(functional)["linear"] = watched_linear
