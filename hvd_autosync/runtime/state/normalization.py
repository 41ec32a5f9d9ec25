"""Statistics that normalization layers keep for evaluation; replicas that train apart have each
their own."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase


def running_statistics(parameters: Collection[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Running means and variances in the models that ``parameters`` belong to.

    In the order in which the models' own code has their modules, which ranks have in common.

    Args:
        parameters: Those of an optimizer.
    """
    modules = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.children()}
    place = {parameter: index for index, parameter in enumerate(parameters)}
    models = []
    for module in modules:
        if id(module) not in inner:
            own = [place[p] for p in module.parameters() if p in place]
            if own:
                models.append((min(own), -len(own), module))
    models.sort(key=lambda entry: entry[:2])
    found: dict[int, torch.Tensor] = {}
    for _, _, model in models:
        for module in model.modules():
            if isinstance(module, _NormBase):
                for buffer in (module.running_mean, module.running_var):
                    if buffer is not None:
                        found.setdefault(id(buffer), buffer)
    return list(found.values())


#: The normalization layers of this process, in the order in which they were made; ``None``: they
#: are not counted.
_layers: list[weakref.ref[_NormBase]] | None = None


def count_layers() -> None:
    """Remember each normalization layer that is made from now on.

    Called before a script can have made any. Copies and unpickled layers are made by ``__new__``,
    too, which calls no ``__init__``.
    """
    global _layers
    if _layers is not None:
        return
    layers = _layers = []

    def new(cls: type[_NormBase], *args: Any, **kwargs: Any) -> _NormBase:
        layer = object.__new__(cls)
        layers.append(weakref.ref(layer, layers.remove))
        return layer

    _NormBase.__new__ = new  # type: ignore[assignment, method-assign]


def statistics_beside(parameters: Collection[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Running means and variances that may change while ``parameters`` are trained.

    Those of every layer that is not another optimizer's. Looking through all objects of a process,
    as :func:`running_statistics` does, takes 50 to 80 ms; nothing of it where layers are counted.

    Args:
        parameters: Those of an optimizer.
    """
    if _layers is None:
        return running_statistics(parameters)
    own = set(parameters)
    found: dict[int, torch.Tensor] = {}
    for reference in _layers:
        layer = reference()
        weight = getattr(layer, "weight", None)
        if layer is None or (weight is not None and weight.requires_grad and weight not in own):
            continue
        for buffer in (layer.running_mean, layer.running_var):
            if buffer is not None:
                found.setdefault(id(buffer), buffer)
    return list(found.values())
