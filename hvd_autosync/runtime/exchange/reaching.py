"""Detects accesses to parameters with deferred steps, and memory that is accessed undetected.

There are three mechanisms, each for what the others miss:

- A module's dictionary of parameters detects forward, ``state_dict()``, and whatever else starts
  from a module.
- The class of a deferred parameter detects whatever Python does to the tensor itself, wherever the
  script keeps it (functional calls, traced graphs, averages of weights).
- Other tensors of the same memory (``parameter.data``, views) are counted.

Compiled code (:mod:`hvd_autosync.runtime.exchange.compiling`) bypasses all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

from hvd_autosync.util.instances import instances

Reach = Callable[[Any], None]
_SET_GRADIENT = torch.Tensor.grad.__set__  # type: ignore[union-attr]


def marked_class(reach: Reach, arrived: Reach) -> type[nn.Parameter]:
    """Return the class of parameters while their steps are deferred.

    Args:
        reach: Called with a parameter before it is used; makes it a plain parameter again.
        arrived: Called before with a parameter that the script gives a gradient. Nothing has used
            the parameter, so what computed the gradient has read it without Python's knowledge, as
            the transforms of ``torch.func`` do.
    """

    class Marked(nn.Parameter):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return nn.Parameter(*args, **kwargs)  # copies have no deferred steps

        @classmethod
        def __torch_function__(
            cls,
            function: Any,
            _: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            kwargs = kwargs or {}
            if function == _SET_GRADIENT and args[1] is not None:
                arrived(args[0])
            for tensor in _flattened([args, kwargs]):
                if type(tensor) is cls:
                    reach(tensor)
                    _make_plain(tensor)  # its optimizer may be gone
            return function(*args, **kwargs)

    return Marked


def _make_plain(parameter: Any) -> None:
    parameter.__class__ = nn.Parameter


def _flattened(values: Any) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flattened(value)
        elif isinstance(value, dict):
            yield from _flattened(value.values())
        else:
            yield value


class Memory:
    """The memory of one parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._find()

    def shared(self) -> bool:
        """Return whether other tensors share it, whose accesses cannot be detected."""
        if torch._C._storage_Use_Count(self._place) != 2:  # the parameter's and ours
            self._find()  # the parameter may have been given other memory
        return bool(torch._C._storage_Use_Count(self._place) != 2)

    def _find(self) -> None:
        self._storage = self._parameter.untyped_storage()
        self._place = self._storage._cdata


def watch_modules(parameters: Collection[nn.Parameter], reach: Reach) -> set[nn.Parameter]:
    """Have modules report accesses to their parameters.

    Args:
        parameters: The parameters to watch.
        reach: Called with each that is accessed.

    Returns:
        Those that are in modules, and only in modules whose accesses Python sees.
    """
    wanted = set(parameters)
    modules = instances(nn.Module)
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules:
        for parameter in module.__dict__.get("_parameters", {}).values():
            if parameter in wanted:
                owners.setdefault(parameter, []).append(module)
    usable = {p for p, its in owners.items() if all(map(_watchable, its))}
    for module in {m for p in usable for m in owners[p] if _watchable(m)}:
        own = module.__dict__["_parameters"]
        if not isinstance(own, _Watched):
            own = module.__dict__["_parameters"] = _Watched(own)
        own.reached.append(reach)
        if isinstance(module, nn.RNNBase):  # it keeps its parameters in a list too
            module.register_forward_pre_hook(_reach_for_all)
    return usable


def unwatch_modules(reach: Reach | None = None) -> None:
    """Report accesses no longer, and restore modules about which nobody is told any more.

    Args:
        reach: To whom; ``None``: to anybody, because compilers inspect modules.
    """
    for module in instances(nn.Module):
        own = module.__dict__.get("_parameters")
        if isinstance(own, _Watched):
            own.reached = [each for each in own.reached if reach is not None and each != reach]
            if not own.reached:
                module.__dict__["_parameters"] = own.copy()


def _watchable(module: nn.Module) -> bool:
    """Return whether Python sees accesses to a module's parameters, as of no scripted module."""
    return type(module.__dict__["_parameters"]) in (dict, OrderedDict, _Watched)


def _reach_for_all(module: nn.Module, _: Any) -> None:
    list(module.parameters(recurse=False))


class _Watched(dict[str, Any]):
    """A module's parameters; each is updated before it is returned.

    Attributes:
        reached: Callbacks, one for each optimizer.
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.reached: list[Reach] = []

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._reach(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (it is this method)

    def values(self) -> Any:
        self._reach_all()
        return super().values()

    def items(self) -> Any:
        self._reach_all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> Any:
        # Copied and saved models do not belong to this optimizer.
        return dict, (self.copy(),)

    def _reach(self, parameter: Any) -> None:
        for reach in self.reached:
            reach(parameter)

    def _reach_all(self) -> None:
        for parameter in super().values():
            self._reach(parameter)
