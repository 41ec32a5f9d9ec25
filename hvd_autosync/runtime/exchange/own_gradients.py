"""Own gradients: what ``parameter.grad`` is after a step of owners, until the script uses it.

After a step of Horovod's, ``parameter.grad`` is the mean of all ranks. Owners have each only their
part of it, and to send it to all would cost what they save. So the attribute is then a tensor that
notices its first use, and has the mean before that use sees it. Hardly a script looks at gradients
between ``step()`` and the next ``backward()``: one that logs their norms does, or that prunes by
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

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


class OwnGradients:
    """The own gradients of one optimizer.

    Args:
        fetch: Called at the first use of one; has to call :meth:`fill`.
    """

    def __init__(self, fetch: Callable[[], None]) -> None:
        self._fetch = fetch
        #: Gradients that a script drops are to be freed, so they are not held here.
        self._put: list[torch.nn.Parameter] = []

    def put(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Let the gradients of ``parameters``, of this rank alone, notice their first use."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and not gradient.is_sparse:
                parameter.grad = OwnGradient.of(gradient, weakly(self._use))
                self._put.append(parameter)

    def take_back(self) -> None:
        """Restore ordinary gradients, which may be of this rank alone."""
        for parameter in self._put:
            if isinstance(parameter.grad, OwnGradient):  # the script may have replaced it
                parameter.grad = parameter.grad.plain
        self._put.clear()

    def fill(self, means: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Let all be the means of all ranks, and ordinary tensors."""
        for parameter in self._put:
            if isinstance(parameter.grad, OwnGradient) and parameter in means:
                parameter.grad.plain.copy_(means[parameter])
        self.take_back()

    def _use(self) -> None:
        if self._put:
            self._fetch()
