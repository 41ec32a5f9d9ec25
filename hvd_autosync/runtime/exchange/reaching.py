"""Who reaches for a parameter whose step waits, and who could without being seen.

Three watches, each for what the others miss:

- A module's dictionary of parameters: forward, ``state_dict()``, whatever begins at a module.
- The class of a parameter that waits: whatever Python does to the tensor itself, wherever the
  script keeps it (functional calls, traced graphs, averages of weights).
- Other tensors of the same memory (``parameter.data``, views): they are counted.

What runs compiled (:mod:`hvd_autosync.runtime.exchange.compiling`) passes all of them.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn

Reach = Callable[[Any], None]


def marked_class(reach: Reach) -> type[nn.Parameter]:
    """The class of parameters for as long as their steps wait.

    Args:
        reach: Called with a parameter before it is used; makes it a plain parameter again.
    """

    class Marked(nn.Parameter):
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            return nn.Parameter(*args, **kwargs)  # of copies, which never wait

        @classmethod
        def __torch_function__(
            cls,
            function: Any,
            _: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            kwargs = kwargs or {}
            for tensor in _flattened([args, kwargs]):
                if type(tensor) is cls:
                    reach(tensor)
            return function(*args, **kwargs)

    return Marked


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
        """Whether other tensors have a part in it, which nobody sees when they are read."""
        if torch._C._storage_Use_Count(self._place) != 2:  # the parameter's, and ours
            self._find()  # the parameter may have been given other memory
        return bool(torch._C._storage_Use_Count(self._place) != 2)

    def _find(self) -> None:
        self._storage = self._parameter.untyped_storage()
        self._place = self._storage._cdata


def watch_modules(parameters: Collection[nn.Parameter], reach: Reach) -> set[nn.Parameter]:
    """Have modules tell when their parameters are reached for.

    Args:
        parameters: Those that matter.
        reach: Called with each.

    Returns:
        Those that are in modules, and in no module whose parameters Python does not see read.
    """
    wanted = set(parameters)
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
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
        if isinstance(module, nn.RNNBase):  # which keeps its parameters in a list, too
            module.register_forward_pre_hook(_reach_for_all)
    return usable


def unwatch_modules() -> None:
    """Let all modules be as they were: compilers look into them."""
    for module in [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]:
        own = module.__dict__.get("_parameters")
        if isinstance(own, _Watched):
            module.__dict__["_parameters"] = own.copy()


def _watchable(module: nn.Module) -> bool:
    """Whether Python sees who reads a module's parameters; scripted ones read them elsewhere."""
    return type(module.__dict__["_parameters"]) in (dict, OrderedDict, _Watched)


def _reach_for_all(module: nn.Module, _: Any) -> None:
    list(module.parameters(recurse=False))


class _Watched(dict[str, Any]):
    """A module's parameters; whoever reaches for one is given it up to date.

    Attributes:
        reached: What is told; one for each optimizer.
    """

    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.reached: list[Reach] = []

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self._reach(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def values(self) -> Any:
        self._reach_all()
        return super().values()

    def items(self) -> Any:
        self._reach_all()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> Any:
        # Copied and saved models are no models of this optimizer.
        return dict, (self.copy(),)

    def _reach(self, parameter: Any) -> None:
        for reach in self.reached:
            reach(parameter)

    def _reach_all(self) -> None:
        for parameter in super().values():
            self._reach(parameter)
