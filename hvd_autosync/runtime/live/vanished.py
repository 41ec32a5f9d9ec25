"""Trials of an elastic job in which ranks have vanished, as one process has seen."""

from __future__ import annotations

from hvd_autosync.runtime.live.helper import Message
from hvd_autosync.search_space.strategy import Strategy
from hvd_autosync.search_space.sync_plan import beyond_horovod
from hvd_autosync.search_space.trial import VANISHED, TrialResult, TrialStatus


class Vanished:
    """Remembers the strategies, beyond Horovod's own, in whose trials ranks have vanished.

    Attributes:
        in_a_row: So many since the last such trial that had a step time.
    """

    def __init__(self) -> None:
        self.in_a_row = 0
        self._strategies: set[Strategy] = set()
        self._tried = Strategy()

    def trial_begins(self, strategy: Strategy) -> None:
        """A strategy is about to be attached for its trial."""
        self._tried = strategy

    def trial_ends(self, *, measured: bool) -> None:
        """The trial has ended.

        Args:
            measured: Whether it has a step time.
        """
        if measured and beyond_horovod(self._tried):
            self.in_a_row = 0
        self._tried = Strategy()

    def ranks_change(self, *, failed: bool) -> bool:
        """Return whether ranks have vanished in a trial.

        Args:
            failed: Whether an operation has failed.
        """
        vanished = failed and beyond_horovod(self._tried)
        if vanished:
            self.in_a_row += 1
            self._strategies.add(self._tried)
        self._tried = Strategy()
        return vanished

    def result_of(self, message: Message | None) -> TrialResult | None:
        """Return the result of a trial that is not made again; ``None`` for all else.

        Other ranks are another study, in whose store it is not.

        Args:
            message: The next message of the helper, if there is one.
        """
        if message is None or message["type"] != "trial":
            return None
        known = Strategy(message["spec"]["strategy"]) in self._strategies
        return TrialResult(TrialStatus.CRASHED, VANISHED) if known else None
