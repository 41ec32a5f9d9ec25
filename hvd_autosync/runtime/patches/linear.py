"""Watches linear layers: what went into each, and the gradients of what came out.

``torch.nn.functional.linear`` is what ``nn.Linear``, attention and most wrappers of linear layers
call. Watched weights are found there by identity, so it does not matter who calls it. The function
is replaced only while a weight is watched. What cannot be looked at without changing what the
script does (transforms of ``torch.func``, tracing, checkpointed or offloaded activations) is left
alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.overrides import handle_torch_function, has_torch_function

from hvd_autosync.util import patches
from hvd_autosync.util.weak_methods import once_gone, weakly

_PATCH = "linear layers"
#: More passes than this between two steps are no accumulation: nobody uses these gradients.
_MOST_PASSES = 64
#: Sums of products in another order differ by at most this many units of rounding of the sum of
#: their absolute values (at most 2.7 were seen in sums of 1 to 1024).
_REORDERED = 8
#: If products of a low type are added in another order, this share of the sums is rounded alike.
_ROUNDED_ALIKE = 0.99


#: Whether factors may be of use, of so many rows of a type of so many bytes, for a weight.
Worth: TypeAlias = Callable[[int, torch.Tensor, int], bool]


@dataclass(frozen=True)
class LinearPass:
    """One pass of a batch through a linear layer: its sufficient factors.

    Attributes:
        inputs: Inputs X of the layer, shape ``k x n``.
        output_gradients: Gradients G of its outputs, shape ``k x m``.
    """

    inputs: torch.Tensor
    output_gradients: torch.Tensor

    @classmethod
    def without_values(cls, inputs: torch.Tensor, output_gradients: torch.Tensor) -> LinearPass:
        """One of the shapes and types of these, which takes no memory."""
        zero = output_gradients.new_zeros(1, 1)
        return cls(*(zero.expand(each.shape) for each in (inputs, output_gradients)))

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
        """Return the sum of G's rows, ``m``."""
        with _without_autocast(self.inputs.device):
            return self.output_gradients.sum(0)

    def magnitude(self, *, bias: bool) -> torch.Tensor:
        """|G|^T |X|, or the sum of the rows of |G|: what the error of a sum is measured by."""
        columns = self.output_gradients.abs().to(_wide(self.output_gradients.dtype))
        if bias:
            return columns.sum(0)
        with _without_autocast(self.inputs.device):
            return columns.t().mm(self.inputs.abs().to(columns.dtype))


class LinearLayer:
    """The passes through one layer since the last :meth:`clear`; watched as long as it is held.

    Args:
        weight: Its weight, shape ``m x n``; while it is frozen, nothing is watched.

    Attributes:
        worth: Of passes that are too large alone, no values are kept.
        bias: Its bias, once it was called with one.
        passes: Passes whose output gradients are known and that have reached the weight's
            gradient, in the order of backward.
        latest: Those of the last backward pass.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        self._weight = weakref.ref(weight)
        self.worth: Worth = _always
        self.bias: torch.nn.Parameter | None = None
        self.passes: list[LinearPass] = []
        self.latest: list[LinearPass] = []
        #: Passes of a backward pass, by its number, that may not be about this weight.
        self._arrived: list[tuple[int, LinearPass]] = []
        # Backward runs hooks in one thread for each device.
        self._lock = threading.Lock()
        self._hooked = False
        self._hook(weight)
        _WATCHED[id(weight)] = self  # before: a layer that ends meanwhile must not uninstall it
        _install()
        once_gone(self, _uninstall)

    @property
    def weight(self) -> torch.nn.Parameter | None:
        """Its weight, while the script holds it."""
        return self._weight()

    def clear(self) -> None:
        """Forget all passes."""
        with self._lock:
            self.passes, self.latest, self._arrived = [], [], []

    def called(
        self, inputs: torch.Tensor, bias: torch.Tensor | None, outputs: torch.Tensor
    ) -> None:
        """A batch has passed the layer; its output gradients will follow, if it is trained."""
        weight = self._weight()
        if weight is not None:
            self._hook(weight)  # it may have been frozen until now
        if isinstance(bias, torch.nn.Parameter) and bias.shape == outputs.shape[-1:]:
            self.bias = bias
        # In a list, because scripts keep graphs: the loss that they add to a total has one.
        kept, arrived = [inputs.detach()], weakly(self._output_gradients)
        # At the node: gradients of the outputs alone do not pass it, and inputs are needed later.
        node, place = outputs.grad_fn, outputs.output_nr
        assert node is not None, "only outputs that are trained are visible"
        node.register_prehook(lambda gradients: arrived(kept, gradients[place]))

    def _hook(self, weight: torch.nn.Parameter) -> None:
        """Have each backward pass tell when it reaches the weight; frozen ones take no hooks."""
        if weight.requires_grad and not self._hooked:
            self._hooked = True
            reached = weakly(self._reached)
            once_gone(self, weight.register_hook(lambda _: reached()).remove)

    def _output_gradients(self, kept: list[torch.Tensor], gradients: torch.Tensor | None) -> None:
        if gradients is None or not kept:
            return  # torch refuses a further pass through a graph that was not to be kept
        inputs = kept[0] if _graph_is_kept() else kept.pop()
        if _transformed() or torch._C._functorch.is_legacy_batchedtensor(gradients):
            return  # of autograd.grad(is_grads_batched=True)
        gradients = gradients.detach()
        rows, weight = _rows(gradients), self._weight()
        if weight is not None and self.worth(len(rows), weight, rows.element_size()):
            # Under autocast the layer has cast its inputs likewise.
            passed = LinearPass(_rows(inputs).to(gradients.dtype), rows)
        else:
            passed = LinearPass.without_values(_rows(inputs), rows)
        now = torch._C._current_graph_task_id()
        with self._lock:
            # Those of other backward passes have not reached the weight, and never will.
            same = [each for each in self._arrived if each[0] == now]
            self._arrived = [*same[1 - _MOST_PASSES :], (now, passed)]

    def _reached(self) -> None:
        """The gradient of the weight is about to be added to."""
        now = torch._C._current_graph_task_id()
        with self._lock:
            # The others belong to gradients of something else, as of inputs alone.
            self.latest = [passed for task, passed in self._arrived if task == now]
            self.passes = [*self.passes, *self.latest][-_MOST_PASSES:]
            self._arrived = []


#: Identity of a weight -> its layer.
_WATCHED: weakref.WeakValueDictionary[int, LinearLayer] = weakref.WeakValueDictionary()


def _always(rows: int, weight: torch.Tensor, item_bytes: int) -> bool:
    return True


def watch_linear(
    weights: Iterable[torch.nn.Parameter], worth: Worth = _always
) -> dict[torch.nn.Parameter, LinearLayer]:
    """Watch the layers of these weights as long as the result, or a part of it, is held.

    Args:
        weights: Matrices; those of no linear layer get no passes, nor those that are frozen.
            Weights of float16 are left out: Horovod's sum of their gradients may overflow, and ours
            would not.
        worth: Passes of which it says no are noted without their values, which would be held until
            the end of the step.
    """
    layers = {}
    for weight in weights:
        if weight.dim() != 2 or weight.dtype is torch.float16:
            continue
        layer = watched(weight) or LinearLayer(weight)
        layer.clear()
        layer.worth = worth
        layers[weight] = layer
    return layers


def watched(weight: torch.nn.Parameter) -> LinearLayer | None:
    """Return the layer of a weight that somebody watches."""
    layer = _WATCHED.get(id(weight))
    return layer if layer is not None and layer.weight is weight else None


def product(passes: Sequence[LinearPass], dtype: torch.dtype, *, bias: bool) -> torch.Tensor:
    """Return the gradient of a weight, or of a bias: the sum over passes, in order.

    Args:
        passes: At least one.
        dtype: Type of the gradient.
        bias: Whether it is that of the bias.
    """
    total: torch.Tensor | None = None
    for each in passes:
        own = (each.bias_gradient() if bias else each.weight_gradient()).to(dtype)
        total = own if total is None else total.add_(own)
    assert total is not None
    return total


def is_product(
    made: torch.Tensor, gradient: torch.Tensor, passes: Sequence[LinearPass], *, bias: bool
) -> bool:
    """Return whether a gradient is the product of its factors, up to the order of addition.

    The product is made by the call of autograd, so nearly always both have the same bits.

    Args:
        made: The product, by :func:`product`.
        gradient: The gradient.
        passes: The factors.
        bias: Whether it is that of the bias.
    """
    if gradient.is_sparse or made.shape != gradient.shape or made.dtype is not gradient.dtype:
        return False
    if torch.equal(made, gradient):
        return True
    if not bool(gradient.isfinite().all()):
        return False
    kind = passes[0].inputs.dtype
    magnitudes = torch.stack([each.magnitude(bias=bias) for each in passes]).sum(0)
    allowed = magnitudes.mul_(_REORDERED * torch.finfo(_wide(kind)).eps)
    if kind is not _wide(kind):
        # Of a layer used several times in one backward pass, autograd rounds sums too.
        alike = float((made == gradient).float().mean())
        if len(passes) > 1 or alike < _ROUNDED_ALIKE:
            return False
        allowed += 2 * torch.finfo(kind).eps * gradient.abs()
    return bool(((made - gradient).abs() <= allowed).all())


class _WatchedLinear:
    """Takes the place of ``linear``: equal to it in tables of functions, and the same where called.

    Args:
        linear: PyTorch's own.
    """

    def __init__(self, linear: Callable[..., Any]) -> None:
        functools.update_wrapper(self, linear)
        self.own = linear

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.own

    def __hash__(self) -> int:
        return hash(self.own)

    def __call__(self, input: Any, weight: Any, bias: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return self.own(input, weight, bias)
        if has_torch_function((input, weight, bias)):
            return handle_torch_function(self, (input, weight, bias), input, weight, bias=bias)
        outputs = self.own(input, weight, bias)
        layer = _WATCHED.get(id(weight))
        if layer is not None and _visible(input, weight, outputs):
            layer.called(input, bias, outputs)
        return outputs


def _visible(inputs: torch.Tensor, weight: torch.Tensor, outputs: torch.Tensor) -> bool:
    """Return whether a call can be watched without changing what the script does."""
    return (
        torch._C._get_tracing_state() is None
        and outputs.requires_grad
        and weight.requires_grad
        and type(outputs) is torch.Tensor
        and inputs.layout is torch.strided
        and not inputs.is_nested
        and not _transformed()
        # Checkpointed and offloaded activations must not be held; some are computed in backward.
        and torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        and torch._C._current_graph_task_id() == -1
    )


def _graph_is_kept() -> bool:
    """Return whether the backward pass that runs leaves the graph (``retain_graph``)."""
    # Old versions do not tell.
    tell = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return tell is None or bool(tell())


def _transformed() -> bool:
    """Return whether a transform of ``torch.func`` or a mode that sees all operations is active."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as a matrix of as many columns as its last dimension."""
    *leading, columns = tensor.shape
    return tensor.reshape(math.prod(leading), columns)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager[None]:
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def _install() -> None:
    builtins = vars(torch.jit)["_builtins"]
    known: list[int] = []

    def watching(linear: Callable[..., Any]) -> _WatchedLinear:
        watched = _WatchedLinear(linear)
        # torch.jit knows functions by identity.
        builtins._register_builtin(watched, "aten::linear")
        known.append(id(watched))
        return watched

    def forget() -> None:
        for each in known:
            builtins._get_builtin_table().pop(each, None)

    patches.install(_PATCH, watching, undo=forget)


def _uninstall() -> None:
    """Put PyTorch's own function back, if nothing is watched any more."""
    # The entry of the layer that ends just now may still be there.
    if not list(_WATCHED.values()):
        patches.uninstall(_PATCH)
