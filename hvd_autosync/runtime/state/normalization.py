"""Running statistics of normalization layers, which differ between separately trained replicas."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from hvd_autosync.runtime.collectives.operations import Sum, allreduce
from hvd_autosync.util import patches
from hvd_autosync.util.instances import instances


class Statistic:
    """A running mean or variance.

    ``model.double()``, ``model.cpu()`` and ``load_state_dict(assign=True)`` put other tensors in
    the place of buffers, but leave the layers.

    Args:
        layer: Its layer, which is not kept alive.
        name: Its name there.
    """

    def __init__(self, layer: Any, name: str) -> None:
        self._layer = weakref.ref(layer)
        self._name = name
        self._last: torch.Tensor = getattr(layer, name)

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer that the layer has now; the last one known if that or the layer is gone.

        Ranks may collect layers at different times, and have to exchange equally many.
        """
        now = getattr(self._layer(), self._name, None)
        if now is not None:
            self._last = now
        return self._last


def _of_layers(layers: Iterable[_NormBase]) -> list[Statistic]:
    found: dict[int, Statistic] = {}
    for layer in layers:
        for name in ("running_mean", "running_var"):
            buffer = getattr(layer, name)
            if buffer is not None:
                found.setdefault(id(buffer), Statistic(layer, name))
    return list(found.values())


def running_statistics(parameters: Collection[torch.nn.Parameter]) -> list[Statistic]:
    """Running means and variances in the models that ``parameters`` belong to.

    They are in the order of the modules in the models, which is the same on all ranks.

    Args:
        parameters: Those of an optimizer.
    """
    modules = instances(torch.nn.Module)
    inner = {id(child) for module in modules for child in module.children()}
    place = {parameter: index for index, parameter in enumerate(parameters)}
    models = []
    for module in modules:
        if id(module) not in inner:
            own = [place[p] for p in module.parameters() if p in place]
            if own:
                models.append((min(own), -len(own), module))
    models.sort(key=lambda entry: entry[:2])
    inside = (module for _, _, model in models for module in model.modules())
    return _of_layers(module for module in inside if isinstance(module, _NormBase))


class RunningStatistics:
    """The running statistics beside one optimizer's parameters, searched for when first needed.

    Args:
        name: Distinguishes its operations from those of others; equal on all ranks.
        find_parameters: Returns the optimizer's parameters.
    """

    def __init__(
        self, name: str, find_parameters: Callable[[], Collection[torch.nn.Parameter]]
    ) -> None:
        self._name = f"hvd_autosync.{name}.statistics"
        self._find_parameters = find_parameters
        self._found: list[Statistic] | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of :func:`running_statistics`, as they are now."""
        if self._found is None:
            self._found = running_statistics(self._find_parameters())
        return [each.tensor for each in self._found]

    def average(self, ranks: int) -> None:
        """Set them to their means over ranks; a collective of one operation, if there are any.

        Args:
            ranks: Number of ranks that take part; others wait in ``hvd.join()`` and count as zero.
        """
        tensors = self.tensors
        if not tensors:
            return
        flat = torch.cat([each.detach().double().cpu().view(-1) for each in tensors])
        mean = allreduce(flat, op=Sum, name=self._name) / ranks
        parts = mean.split([each.numel() for each in tensors])
        for statistic, part in zip(tensors, parts, strict=True):
            statistic.detach().copy_(part.view(statistic.shape))


#: The normalization layers of this process, in order of creation; ``None``: not recorded.
_layers: list[weakref.ref[_NormBase]] | None = None


def count_layers() -> None:
    """Record each normalization layer created from now on.

    Called before a script can have created any. Copying and unpickling create layers without
    ``__init__``, by ``__setstate__``. (``__new__`` sees all of them, but Python cannot put back a
    class's ``__new__``.)
    """
    global _layers
    if _layers is not None:
        return
    layers = _layers = []

    def recording(make: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(make)
        def record(self: _NormBase, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            layers.append(weakref.ref(self, layers.remove))

        return record

    patches.install("normalization layers", recording, undo=_forget_layers)


def _forget_layers() -> None:
    global _layers
    _layers = None


def statistics_beside(parameters: Collection[torch.nn.Parameter]) -> list[Statistic]:
    """Running means and variances that may change while ``parameters`` are trained.

    They are those of every layer that does not belong to another optimizer. Searching all objects
    of a process, as :func:`running_statistics` does, takes 50 to 80 ms; recorded layers need no
    search.

    Args:
        parameters: Those of an optimizer.
    """
    if _layers is None:
        return running_statistics(parameters)
    own = set(parameters)
    layers = []
    for reference in _layers:
        layer = reference()
        weight = getattr(layer, "weight", None)
        of_another = weight is not None and weight.requires_grad and weight not in own
        if layer is not None and not of_another:
            layers.append(layer)
    return _of_layers(layers)
