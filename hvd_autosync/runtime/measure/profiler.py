"""Profiles the model's gradients during some steps of the warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from types import MappingProxyType
from typing import Any

import torch

from hvd_autosync.runtime.measure.repeated_bits import FactorBytes, coded_share
from hvd_autosync.runtime.measure.touched import touched_rows
from hvd_autosync.search_space.model_profile import ModelProfile, ParameterProfile

#: Bits of smaller gradients are not looked at: they are no part of what codes can save.
_CODED_BYTES = 4096


class _HostClock:
    """Times the host."""

    def now(self) -> Any:
        return perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        return float(end - start)


class _DeviceClock:
    """Times an accelerator, which runs asynchronously."""

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end)) / 1000


@dataclass
class _Step:
    """Clock readings of one step; of several backward passes, the last counts."""

    begin: Any
    backward: tuple[Any, Any] | None = None
    #: Index of parameter -> position in the step, begin of its backward, arrival.
    arrivals: dict[int, tuple[int, Any, Any]] = field(default_factory=dict)


class Profiler:
    """Profiles the parameters of the given optimizers from its creation to :meth:`finish`.

    Gradients are looked at in the first step, which takes many times as long as a short backward
    pass. So that step is timed only if it is the only one.

    Args:
        optimizers: Optimizers that Horovod wrapped, in the order of their creation; none for a
            script that reduces gradients by hand.
        seconds_to_code: Times the lossless code of a gradient.
    """

    def __init__(
        self, optimizers: Sequence[Any], seconds_to_code: Callable[[torch.Tensor], float]
    ) -> None:
        # Parameters that add_param_group() added later have no name there, and are not
        # synchronized.
        self._parameters: list[tuple[str, torch.nn.Parameter]] = [
            (str(optimizer._parameter_names[parameter]), parameter)
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter in optimizer._parameter_names
        ]
        self._wrapped = bool(optimizers)
        devices = {parameter.device for _, parameter in self._parameters}
        on_cuda = len(devices) == 1 and next(iter(devices)).type == "cuda"
        self._clock = _DeviceClock() if on_cuda else _HostClock()
        self._sparse: set[int] = set()
        self._touched: dict[int, float] = {}
        self._stored: dict[int, float] = {}
        self._seconds_to_code = seconds_to_code
        self._coded: dict[int, tuple[float, float]] = {}
        self._coding_s: dict[int, float] = {}
        self._position = 0
        self._backward_begin: Any = self._clock.now()
        self._steps: list[_Step] = []
        self._step = _Step(self._clock.now())
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))
            for index, (_, parameter) in enumerate(self._parameters)
            if parameter.requires_grad
        ]

    def _hook(self, index: int) -> Any:
        def arrived(parameter: torch.Tensor) -> None:
            self._position += 1
            self._step.arrivals[index] = (self._position, self._backward_begin, self._clock.now())
            if parameter.grad is not None:
                self._look_at(index, parameter.grad)

        return arrived

    def _look_at(self, index: int, gradient: torch.Tensor) -> None:
        """Record the kind of a parameter's gradient, before another is added to it."""
        if gradient.is_sparse:
            self._sparse.add(index)
            if not self._steps and gradient.sparse_dim() == 1:
                stored, rows = gradient._indices()[0], max(len(gradient), 1)
                self._touched[index] = len(stored.unique()) / rows
                self._stored[index] = len(stored) / rows
            return
        if self._steps:
            return
        if gradient.numel() * gradient.element_size() >= _CODED_BYTES:
            self._coded[index] = coded_share(gradient)
            if min(self._coded[index]) < 1:
                self._coding_s[index] = self._seconds_to_code(gradient)
        if gradient.dim() == 2:
            self._touched[index] = len(touched_rows(gradient)) / max(len(gradient), 1)

    def backward_begins(self) -> None:
        """A backward pass begins."""
        self._backward_begin = self._clock.now()

    def backward_ends(self) -> None:
        """The current backward pass ends."""
        self._step.backward = (self._backward_begin, self._clock.now())

    def step_ends(self) -> None:
        """A step ends, and the next begins."""
        self._steps.append(self._step)
        self._step = _Step(self._clock.now())
        self._position = 0

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The profiled parameters."""
        return [parameter for _, parameter in self._parameters]

    def finish(
        self, factors: Mapping[torch.nn.Parameter, FactorBytes] = MappingProxyType({})
    ) -> ModelProfile:
        """Remove every hook; returns the profile.

        Args:
            factors: Of weights of linear layers, bytes of their factors in a step.
        """
        self.close()
        if isinstance(self._clock, _DeviceClock):
            torch.cuda.synchronize()
        seconds = self._clock.seconds
        passes = [(step.begin, *step.backward) for step in self._timed if step.backward]
        return ModelProfile(
            parameters=self._parameter_profiles(factors),
            forward_s=_median([seconds(begin, start) for begin, start, _ in passes]),
            backward_s=_median([seconds(start, end) for _, start, end in passes]),
            wrapped=self._wrapped,
        )

    @property
    def _timed(self) -> Sequence[_Step]:
        return self._steps[1:] or self._steps

    def close(self) -> None:
        """Remove every hook."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _parameter_profiles(
        self, factors: Mapping[torch.nn.Parameter, FactorBytes]
    ) -> tuple[ParameterProfile, ...]:
        arrivals = _by_parameter(self._steps)
        positions = {index: median(a[0] for a in seen) for index, seen in arrivals.items()}
        arrivals |= _by_parameter(self._timed)  # which lack what has arrived in the first step only
        arrived = sorted(positions, key=positions.__getitem__)
        # Ranks exchange zeros for those whose gradient has not arrived at the end of backward
        # (``synchronize`` in ``horovod/torch/optimizer.py``), but not for frozen ones.
        never = [
            index
            for index, (_, parameter) in enumerate(self._parameters)
            if arrived and index not in positions and parameter.requires_grad
        ]
        order = {index: position for position, index in enumerate([*arrived, *never])}
        none = FactorBytes()
        return tuple(
            ParameterProfile(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                sparse=index in self._sparse,
                ready_order=order.get(index, -1),
                ready_s=_median(
                    [self._clock.seconds(start, end) for _, start, end in arrivals.get(index, [])]
                ),
                touched_rows=self._touched.get(index, 1.0),
                stored_rows=self._stored.get(index, 0.0),
                factor_bytes=factors.get(parameter, none).whole,
                coded_factors_share=factors.get(parameter, none).coded_share,
                coded_share=self._coded.get(index, (1.0, 1.0))[0],
                summed_share=self._coded.get(index, (1.0, 1.0))[1],
                coding_s=self._coding_s.get(index, 0.0),
            )
            for index, (name, parameter) in enumerate(self._parameters)
        )


def _by_parameter(steps: Sequence[_Step]) -> dict[int, list[tuple[int, Any, Any]]]:
    """Return the arrivals of each parameter."""
    found: dict[int, list[tuple[int, Any, Any]]] = {}
    for step in steps:
        for index, arrival in step.arrivals.items():
            found.setdefault(index, []).append(arrival)
    return found


def _median(values: list[float]) -> float:
    return median(values) if values else math.nan
