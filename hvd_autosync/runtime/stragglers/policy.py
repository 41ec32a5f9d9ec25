"""Straggler policy: which ranks are stragglers now, with and without a barrier."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from hvd_autosync.runtime.measure.compute_timer import WINDOW
from hvd_autosync.runtime.stragglers.detector import Detector


class StragglerPolicy:
    """Applies the detector to the ranks' speeds under one policy.

    Args:
        policy: One of :data:`hvd_autosync.search_space.protocol.STRAGGLER_POLICIES`.
        ranks: The number of ranks.

    Attributes:
        present: Whether there was a straggler when steps last had a barrier. Without a barrier,
            rank 0 alone checks whether it is still there (:meth:`stepped`).
        windows: Number of windows that all ranks have seen.
    """

    def __init__(self, policy: str, ranks: int) -> None:
        self.present = False
        self._policy = policy
        self._ranks = ranks
        self.forget()

    def forget(self) -> None:
        """Restart: one rank alone has seen steps that the others have not."""
        self.present = False
        self.windows = 0
        self._detector = Detector(self._ranks)
        #: Of each rank, the steps since its last median, and that median; 0: not known.
        self._steps: list[list[float]] = [[] for _ in range(self._ranks)]
        self._medians = [0.0] * self._ranks

    def window(self, seconds: Sequence[float]) -> frozenset[int]:
        """Take all ranks' seconds per step; return the ranks that are too slow.

        The seconds are equal on all ranks, and so is the result.
        """
        if self._policy in ("none", "balance"):
            return frozenset()
        self.windows += 1
        slow = self._detector.window(seconds)
        self.present = bool(slow) and self._policy == "greedy"
        if self._policy == "elastic":
            # It returns at every epoch, and may have recovered meanwhile.
            slow = frozenset(filter(self._detector.stands_out, slow))
        return slow

    def stepped(self, rank: int, seconds: float) -> bool:
        """Take a step of one rank without a barrier; returns whether the straggler has recovered.

        Called on rank 0 alone, which receives the steps of all ranks.
        """
        if not self.present:
            return False
        self._steps[rank].append(seconds)
        # The other ranks may make many steps meanwhile, or none if their epoch is over.
        if any(len(self._steps[each]) < WINDOW for each in self._detector.slow):
            return False
        for each, own in enumerate(self._steps):
            if own:
                self._medians[each] = statistics.median(own)
                own.clear()
        self.present = bool(self._detector.window(self._medians))
        return not self.present
