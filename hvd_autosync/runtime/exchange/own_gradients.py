"""Own gradients: what ``parameter.grad`` is after a step of owners, until the script uses it.

After a step of Horovod's, ``parameter.grad`` is the mean of all ranks. Owners have each only their
part of it, and to send it to all would cost what they save. So the attribute is then a tensor that
notices its first use, and has the mean before that use sees it. Hardly a script looks at gradients
between ``step()`` and the next ``backward()``: one that logs their norms does, or that prunes by
them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from hvd_autosync.util.weak_methods import weakly

#: What tells nothing of the values.
_OF_SHAPE = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "is_sparse", "layout", "requires_grad", "shape")
)


class OwnGradient(torch.Tensor):
    """This rank's gradient, which is about to become the mean of all ranks if the script uses it.

    Attributes:
        plain: The gradient as an ordinary tensor, of the same memory.
        fetch: Lets ``plain`` be the mean.
    """

    plain: torch.Tensor
    fetch: Callable[[], None]

    @classmethod
    def of(cls, gradient: torch.Tensor, fetch: Callable[[], None]) -> OwnGradient:
        """Return one of the memory of ``gradient``."""
        own = gradient.as_subclass(cls)
        own.plain, own.fetch = gradient, fetch
        return own

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of torch on ordinary tensors, after a fetch if it uses values."""

        def plain(value: Any) -> Any:
            if isinstance(value, OwnGradient):
                if func not in _OF_SHAPE:
                    value.fetch()
                return value.plain
            if type(value) in (list, tuple):
                return type(value)(map(plain, value))
            return value

        return func(*map(plain, args), **{k: plain(v) for k, v in (kwargs or {}).items()})


def holding_gradients(parameters: Iterable[torch.nn.Parameter]) -> Iterator[bool]:
    """Yield for each parameter whether the script holds its gradient in a variable of its own.

    It would find there, after an owners' step, what this rank had before.
    """
    one = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    one.grad = torch.zeros(1, device="cpu")
    # How many references there are of a parameter's alone depends on the interpreter.
    least = _references(one.grad)
    return (_references(parameter.grad) > least for parameter in parameters)


def _references(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else sys.getrefcount(tensor)


class _Put:
    """One own gradient, where it was put.

    Args:
        parameter: The parameter.
        own: Its own gradient, which a script may drop, so that its memory is free.
    """

    def __init__(self, parameter: torch.nn.Parameter, own: OwnGradient) -> None:
        self.parameter = parameter
        self._own = TensorWeakRef(own)
        plain = own.plain
        self._put_at = plain._version

    def is_held(self) -> bool:
        """Return whether the script holds it, and may use it at any time."""
        if self.parameter.grad is self._own():
            return any(holding_gradients([self.parameter]))
        return self._own() is not None

    def fill(self, mean: torch.Tensor) -> None:
        """Let it be the mean, unless a backward pass has added to it."""
        own = self._own()
        if own is not None and own.plain._version == self._put_at:
            own.plain.copy_(mean)

    def take_back(self) -> None:
        """Let the parameter have an ordinary gradient again."""
        gradient = self.parameter.grad
        if isinstance(gradient, OwnGradient):  # the script may have replaced it
            self.parameter.grad = gradient.plain


class OwnGradients:
    """The own gradients of one optimizer.

    Args:
        fetch: Called at the first use of one; has to call :meth:`fill`.
    """

    def __init__(self, fetch: Callable[[], None]) -> None:
        self._fetch = fetch
        self._put: list[_Put] = []
        self._notice = weakly(self._use)

    def put(self, factors: Mapping[torch.nn.Parameter, float]) -> None:
        """Let gradients, of this rank alone, notice their first use.

        Args:
            factors: Parameter -> what the ranks' mean gradient has to be multiplied by to be what
                they would have. Later passes may add to the gradients, so that their sum counts.
        """
        for parameter, factor in factors.items():
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                if not math.isclose(factor, 1.0):
                    gradient.mul_(factor)
                own = OwnGradient.of(gradient, self._notice)
                parameter.grad = own
                self._put.append(_Put(parameter, own))

    def take_back(self) -> None:
        """Let all parameters have ordinary gradients, which may be of this rank alone.

        One that the script holds becomes the mean.
        """
        if any(each.is_held() for each in self._put):
            self._fetch()
        self.restore()

    def restore(self) -> None:
        """As :meth:`take_back`, whatever the script holds."""
        for each in self._put:
            each.take_back()
        self._put.clear()

    def fill(self, means: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Let all be the means of all ranks, and ordinary tensors."""
        for each in self._put:
            if each.parameter in means:
                each.fill(means[each.parameter])
        self.restore()

    def _use(self) -> None:
        if self._put:
            self._fetch()
