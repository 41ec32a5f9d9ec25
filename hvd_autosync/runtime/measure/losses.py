"""The losses of this process's steps, from ``backward()`` or reported by the script.

Several calls of ``backward()`` in one step are parts of its loss: those of an accumulation, or of
several tasks. Their sum is the loss of the step, which ends with the step of an optimizer::

    backward   backward   step | backward   backward   step | ...

The sum means nothing where optimizers have losses of their own, as generator and discriminator do::

    backward   step of one   backward   step of the other | ...

The loss of a step that this rank has skipped counts for nothing: it may be not finite because the
forward pass has overflowed, and has changed no parameter.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Losses:
    """Keeps the loss of the last step.

    The thread that trains uses it; another one reads :attr:`several` only.

    Args:
        in_round: Whether replicas differ now, in a round of local steps.

    Attributes:
        count: Number of losses so far.
        in_round: Whether replicas differed at the last loss, so that it was not their average's.
        late: Whether the script reported the last loss after the step that it belongs to.
    """

    def __init__(self, in_round: Callable[[], bool] = lambda: False) -> None:
        self.count = 0
        self.in_round = self.late = False
        self._in_round_now = in_round
        self._last: torch.Tensor | None = None
        #: The loss of the last ``backward()`` alone.
        self._part: torch.Tensor | None = None
        self._reported = False
        #: Whether the script reports losses whose ``backward()`` was seen before.
        self._reports_follow = False
        #: Whether a step has ended since the last ``backward()``.
        self._ended = True
        #: Whether an optimizer of ours has ever made a step: else nobody tells of any.
        self._stepped = False
        #: Whether this rank has skipped the step that ends now, the last one that has ended, and
        #: the one that the last report belongs to.
        self._skipping = self._skipped = self._skipped_reported = False
        #: Whether the loss of the ``backward()`` before the last one was reported.
        self._before_reported = False
        #: Whether replicas differed at the last ``backward()``; ``None``: none since a report.
        self._at_backward: bool | None = None
        self._optimizers = _Optimizers()

    @property
    def several(self) -> bool:
        """Whether optimizers have losses of their own, and the script reports none.

        The thread of messages reads it too, while this rank trains. That needs no lock, which every
        ``backward()`` would have to take: neither flag is ever taken back, so what is returned was
        true at one of the two moments at which they are read.
        """
        return self._optimizers.have_own_losses and not self._reported

    def seen(self, loss: torch.Tensor) -> None:
        """Record a scalar whose ``backward()`` was called; no loss once the script reports."""
        self._before_reported = self._reported and self._at_backward is None
        self._at_backward = in_round = self._in_round_now()
        if not self._reported:
            # A copy: the script may change its tensor in place before this one is read.
            self._part = part = (loss.reshape(()) if loss.dim() else loss).clone()
            last = None if self._ended else self._last
            self._last = part if last is None else _sum(last, part)
            self.in_round = in_round
            self.count += 1
        self._ended = False

    def report(self, loss: torch.Tensor) -> None:
        """Record the loss that the script reports, before or after the step.

        Replicas are those of the last ``backward()``. If the first report comes before any, that
        may be the one of the step before, and they are those of now.
        """
        if not self._reported:
            self._reported, self._reports_follow = True, self._at_backward is not None
        follows = self._reports_follow and self._at_backward is not None
        self.in_round = bool(self._at_backward) if follows else self._in_round_now()
        self.late = follows and self._ended
        self._skipped_reported = self.late and self._skipped
        self._at_backward = None
        self._last = (loss.reshape(()) if loss.dim() else loss).clone()
        self.count += 1

    def stepped(self, optimizer: Any) -> None:
        """``optimizer`` has made a step; to repeat the call changes nothing."""
        self._ended = self._stepped = True
        self._skipped = self._skipping
        self._optimizers.stepped(optimizer, self.count)

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        """Enter the end of a step that this rank has skipped.

        It may be counted after the next ``backward()``, whose loss belongs to the step after it.
        """
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def may_skip(self) -> None:
        """A step was made or skipped: losses before it are no part of the next one's."""
        if not self._ended and self._stepped:
            self._skipped = True
            if self._reported and self._at_backward is None:
                self._skipped_reported = True
        self._ended = True

    def dropped(self) -> None:
        """What was reduced before the last ``backward()`` was dropped, with its losses."""
        if self._ended:
            return
        if self._part is not None and not self._reported:
            self._last = self._part
        self._skipped_reported = self._skipped_reported or self._before_reported

    def end_step(self, count: int) -> tuple[torch.Tensor | None, int, bool]:
        """End the step, and take its loss.

        Several components may end the same step, each with the ``count`` that it was given at the
        step before.

        Args:
            count: Number of losses that belong to the steps before.

        Returns:
            The loss, without dimensions, if it has one that counts; the number of losses that
            belong to it or to the steps before; and whether it has one that is left out, because
            this rank has skipped the step.
        """
        self._ended = True
        if (self._skipping or self._skipped) and not self.late:
            return None, count, True  # a script that marks its steps ends it after it was counted
        if self.count <= count:
            return None, self.count, False
        if self._skipped_reported:
            return None, self.count, True
        return self._last, self.count, False


class _Optimizers:
    """Finds out whether optimizers have losses of their own.

    Two optimizers may share each loss, as for dense and for sparse parameters, and one may replace
    the other. So the steps of both must begin with a new loss, and one must come back.

    Attributes:
        have_own_losses: Whether they have.
    """

    def __init__(self) -> None:
        self.have_own_losses = False
        # Weak, so that optimizers that the script drops are collected.
        self._with_loss: weakref.WeakSet[Any] = weakref.WeakSet()
        self._last: Callable[[], Any] = lambda: None
        #: Whether the last one's steps have begun with a new loss.
        self._began_with_loss = False
        self._count = 0

    def stepped(self, optimizer: Any, count: int) -> None:
        """An optimizer has made a step, after ``count`` losses."""
        if optimizer is not self._last():
            new = count > self._count
            if new and self._began_with_loss and optimizer in self._with_loss:
                self.have_own_losses = True
            if new:
                self._with_loss.add(optimizer)
            self._last, self._began_with_loss = weakref.ref(optimizer), new
        self._count = count


def _sum(total: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return the sum of two losses, in single precision at least."""
    if "cpu" not in (total.device.type, part.device.type):
        part = part.to(total.device, non_blocking=True)
    return total + (part.float() if part.element_size() < 4 else part)
