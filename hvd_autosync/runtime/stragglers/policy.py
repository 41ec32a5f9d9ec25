"""Who is a straggler now, in phases with and without a barrier."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hvd_autosync.runtime.measure.compute_timer import WINDOW
from hvd_autosync.runtime.stragglers.detector import Detector


class StragglerPolicy:
    """What is known of the ranks' speeds.

    Args:
        policy: One of :data:`hvd_autosync.search_space.protocol.STRAGGLER_POLICIES`.
        ranks: How many there are.

    Attributes:
        present: Whether there was one when ranks last waited for each other; as long as they do
            not, rank 0 alone looks whether it is still there (:meth:`stepped`).
        windows: Of how many all ranks know.
    """

    def __init__(self, policy: str, ranks: int) -> None:
        self.present = False
        self._policy = policy
        self._ranks = ranks
        self.forget()

    def forget(self) -> None:
        """Begin anew: what one rank has seen alone, the others have not."""
        self.present = False
        self.windows = 0
        self._detector = Detector(self._ranks)
        #: Of each rank the steps since its last median, and that; 0: not known.
        self._steps: list[list[float]] = [[] for _ in range(self._ranks)]
        self._medians = [0.0] * self._ranks

    def window(self, seconds: Sequence[float]) -> frozenset[int]:
        """All ranks' seconds per step, as all of them know them; those that are too slow."""
        if self._policy in ("none", "balance"):
            return frozenset()
        self.windows += 1
        slow = self._detector.window(seconds)
        self.present = bool(slow) and self._policy == "greedy"
        if self._policy == "elastic":
            # It is back at every pass, and may have recovered meanwhile.
            slow = frozenset(filter(self._detector.stands_out, slow))
        return slow

    def stepped(self, rank: int, seconds: float) -> bool:
        """A step of one rank, where none waits; whether there is no straggler any more.

        On one rank alone, which hears of all.
        """
        if not self.present:
            return False
        self._steps[rank].append(seconds)
        # The others make many steps meanwhile, or none, as where their pass is over.
        if any(len(self._steps[each]) < WINDOW for each in self._detector.slow):
            return False
        for each, own in enumerate(self._steps):
            if own:
                self._medians[each] = statistics.median(own)
                own.clear()
        self.present = bool(self._detector.window(self._medians))
        return not self.present
