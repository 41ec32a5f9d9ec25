"""A method of synchronization: one object with the hooks that an optimizer calls.

A method is attached to an optimizer by its creation, so that it is never there in part. It is
detached at the end of a step; then another takes its place (``sync/synchronizer.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from hvd_autosync.runtime.patches.epochs import SyncPoint

_T = TypeVar("_T")


class SyncMethod:
    """The hooks. Here they do nothing, as for an optimizer that has no other ranks.

    Entries of :meth:`state_dict` have keys of the checkpoint format.
    """

    @property
    def replicas_in_sync(self) -> bool:
        """Whether parameters are the same on all ranks, and all have made the same steps."""
        return True

    @property
    def average_is_exact(self) -> bool:
        """Whether the average that has made replicas equal has left nothing for a later one."""
        return True

    @property
    def in_round(self) -> bool:
        """Whether replicas differ, in a round of local steps that their average will end."""
        return False

    @property
    def near_average(self) -> bool:
        """Whether parameters are equal, or so few steps old that they are near the average."""
        return True

    @property
    def round_steps(self) -> int:
        """Steps of the current round of local steps; 0 if there is none."""
        return 0

    def on_gradient_added(self, parameter: torch.nn.Parameter) -> None:
        """A backward pass has added to the gradient of ``parameter``."""

    def on_gradient_ready(self, parameter: torch.nn.Parameter) -> None:
        """The gradient of ``parameter`` is complete."""

    def on_extra_gradient(self) -> None:
        """A backward pass has added to a gradient that was complete, which Horovod refuses.

        Raises:
            ConfigurationError: The method is the reason.
        """

    def settle_skipped(self) -> None:
        """Gradients are dropped, or there are others: count a skipped step; a collective.

        Ranks may be in another phase after it.
        """

    def on_synchronize(self, *, in_step: bool, fresh: bool) -> None:
        """Gradients are about to be used.

        Args:
            in_step: Whether the optimizer's own step alone uses them.
            fresh: Whether there are gradients that were not synchronized yet.
        """

    def run_step(self, step: Callable[[], _T]) -> _T:
        """Run the optimizer's own step, perhaps on other parameters than those of its groups."""
        return step()

    def on_step_end(self) -> None:
        """A step was made."""

    @property
    def keeps_left_out(self) -> bool:
        """Whether error feedback keeps parts of gradients, multiplied by the loss scale."""
        return False

    def on_skip(self) -> None:
        """A gradient scaler may have skipped the step."""

    def on_drop(self) -> None:
        """The script has dropped synchronized gradients, of which no step was made."""

    def on_rescale(self, factor: float) -> None:
        """The loss scale was multiplied by ``factor``."""

    def at_sync_point(self, why: SyncPoint) -> None:
        """Make parameters equal on all ranks, unless they are; a collective."""

    def average(self) -> None:
        """End an open round of local steps, if there is one; a collective."""

    def settle(self) -> None:
        """Make all deferred updates."""

    def dropping_gradients(self) -> AbstractContextManager[None]:
        """Return a context in which the script's gradients are dropped."""
        return nullcontext()

    def before_more_parameters(self) -> None:
        """The script is about to add parameters."""

    def before_loading(self) -> None:
        """End what some ranks have begun, because the optimizer is about to load states."""

    def make_whole(self) -> None:
        """Let every rank have whole states, equal where parameters are; a collective."""

    def before_sharing(self) -> None:
        """Let every rank have whole states, which one of them is about to share; a collective."""

    def share(self, root: int) -> None:
        """Let all ranks continue where rank ``root`` is; a collective."""

    def forget_states(self) -> None:
        """Drop states of parts of parameters, because others are about to be loaded."""

    def whole_states(self) -> dict[int, dict[str, Any]]:
        """States that this rank does not have whole: place of the parameter -> its state."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs beside the optimizer's states."""
        return {}

    def load_state_dict(self, entries: dict[str, Any]) -> dict[int, dict[str, Any]] | None:
        """Continue where :meth:`state_dict` was called.

        Returns:
            This rank's optimizer states by place of the parameter, if it had some of its own.
        """
        return None

    def make_exact(self, *, together: bool) -> None:
        """Exchange all gradients uncompressed from now on.

        Args:
            together: Whether all ranks call it, as for a collective; else they load a checkpoint.
        """

    def abandon(self) -> None:
        """Let go of all that is under way, because other ranks are gone; no collective."""

    def detach(self) -> dict[str, Any]:
        """End after a step, with equal parameters and whole states on all ranks; a collective.

        Returns:
            Entries that the next method may continue with.

        Raises:
            ConfigurationError: Ranks have made different numbers of steps; training can go on.
        """
        return {}
