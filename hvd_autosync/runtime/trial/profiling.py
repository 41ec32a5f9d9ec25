"""Profiling of the model during some steps of a trial: gradients on rank 0, arithmetic on all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.agreement import same_by_sums
from hvd_autosync.runtime.collectives.launcher_use import script_needs_launcher
from hvd_autosync.runtime.measure.arithmetic import arithmetic
from hvd_autosync.runtime.patches.epochs import AlwaysInSync, Epochs
from hvd_autosync.search_space.model_profile import ModelProfile

if TYPE_CHECKING:
    from hvd_autosync.runtime.measure.profiler import Profiler
    from hvd_autosync.runtime.patches.factor_meter import FactorMeter


#: Profiled steps, if the warm-up has so many: gradients are looked at in the first one, and two are
#: timed.
_PROFILED = 3


def profiled_steps(warmup: int, earliest: int) -> tuple[int, int] | None:
    """Return the numbers of steps after which profiling begins and ends.

    It begins in the middle of a long warm-up. It ends one step before the measured ones, if there
    are enough without that one: the other ranks wait while rank 0 reports.

    Args:
        warmup: Steps before the measured ones.
        earliest: When it can begin at the earliest.

    Returns:
        ``None`` if no step is left for it.
    """
    begin = max(min(warmup // 2, warmup - 1 - _PROFILED), earliest)
    end = max(warmup - 1, min(begin + 2, warmup))
    return (begin, end) if begin < end else None


class Profiling(AlwaysInSync):
    """What one rank does for the profile of the model.

    Attributes:
        profiler: Set on rank 0 while the model is profiled.
        epochs: The epochs of the script's loaders.
    """

    def __init__(self) -> None:
        self.profiler: Profiler | None = None
        self._factor_meter: FactorMeter | None = None
        #: Whether all ranks are known to multiply alike.
        self._alike = False
        self.epochs = Epochs(self)
        self._has_epochs = False

    def begin(self, optimizers: Sequence[Any]) -> None:
        """Begin to profile, on rank 0; not while a step is under way.

        Args:
            optimizers: Optimizers that Horovod wrapped, in the order of their creation.
        """
        # One trial of a study needs them.
        from hvd_autosync.runtime.exchange.lossless import seconds_to_code
        from hvd_autosync.runtime.measure.profiler import Profiler
        from hvd_autosync.runtime.patches.factor_meter import FactorMeter

        self.profiler = Profiler(optimizers, seconds_to_code)
        self._factor_meter = FactorMeter(self.profiler.parameters)

    def step_ends(self) -> None:
        """A step has ended."""
        if not self._has_epochs:
            self.epochs.stepped()
            self._has_epochs = self.epochs.seen
        if self.profiler is not None:
            self.profiler.step_ends()
        if self._factor_meter is not None:
            self._factor_meter.step_ends()

    def compare_arithmetic(self, device: torch.device) -> None:
        """Compare how the ranks multiply; a collective, also beside ``join()``.

        Args:
            device: The device of the gradients.
        """
        self._alike = same_by_sums(arithmetic(device), "trial.arithmetic")

    def end(self) -> ModelProfile | None:
        """Return the profile on rank 0, if profiling had begun; ``None`` elsewhere."""
        if self.profiler is None or self._factor_meter is None:
            return None
        self._factor_meter.close()
        # Where ranks multiply differently, products of factors would make replicas differ.
        factors = self._factor_meter.factors if self._alike else {}
        profile = self.profiler.finish(factors)
        self.close()
        return replace(
            profile,
            has_epochs=self._has_epochs or current.script_averages,
            needs_launcher=script_needs_launcher(),
        )

    def close(self) -> None:
        """Profile no longer."""
        if self.profiler is not None and self._factor_meter is not None:
            self._factor_meter.close()
            self.profiler.close()
        self.profiler = self._factor_meter = None


def gradient_device(optimizers: Sequence[Any]) -> torch.device:
    """Return the device of the gradients.

    Args:
        optimizers: Those of the script.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                device: torch.device = parameter.device
                return device
    return torch.device("cuda" if torch.cuda.is_initialized() else "cpu")


def device_name(device: torch.device) -> str:
    """Name of a device in the trace: ``cpu``, or the name of the GPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def wait_for_device() -> None:
    """Wait for work that was queued on an accelerator, so that the clock includes it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
