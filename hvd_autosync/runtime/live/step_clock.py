"""The time of the training's steps, and what tuning adds to it."""

from __future__ import annotations


class StepClock:
    """Times steps on one rank, and sums what the training has spent while it is tuned.

    The sum is compared with typical steps of the default. So steps with an evaluation, a checkpoint
    or the begin of an epoch are left out; boundaries between steps, with all that is done there,
    are not.

    Args:
        now: Clock reading, seconds, as all others.

    Attributes:
        step_s: Seconds of the last typical step; 0 before the first.
        tuned: Whether tuning has begun.
        steps: Typical steps since then.
    """

    def __init__(self, now: float) -> None:
        self.step_s = 0.0
        self.tuned = False
        self.steps = 0
        self._last, self._spent_s = now, 0.0

    def begin_tuning(self, now: float) -> None:
        """Sum from now on."""
        self.tuned = True
        self.steps = 0
        self._last, self._spent_s = now, 0.0

    def end_step(self, now: float, *, typical: bool) -> None:
        """A step has ended."""
        if typical:
            self.step_s = now - self._last
            self._spent_s += self.step_s
            self.steps += 1
        self._last = now

    def restart(self, now: float) -> None:
        """Restart the current step: what was before, as a wait in ``join()``, is in none."""
        self._last = now

    def end_boundary(self, now: float) -> None:
        """What followed the step has ended; the next step begins."""
        self._spent_s += now - self._last
        self._last = now

    def spent_s(self, now: float) -> float:
        """Return the seconds of these steps and of the boundaries, the present one included."""
        return self._spent_s + now - self._last

    def steps_in(self, seconds: float, *, most: int) -> int:
        """Return how many typical steps take so long; at least 1."""
        return round(min(max(seconds / max(self.step_s, 1e-9), 1), most))
