"""Messages between rank 0 and the helper, and what rank 0 does where none comes."""

from __future__ import annotations

from time import perf_counter

from hvd_autosync.runtime.live.helper import Helper, Message
from hvd_autosync.runtime.live.live_trial import LiveTrial
from hvd_autosync.runtime.live.vanished import Vanished
from hvd_autosync.search_space.exchange_plan import Classes
from hvd_autosync.search_space.strategy import Strategy

#: The helper answers a result at once. After so long without an answer it is stopped or stuck, as
#: on a file system that hangs, and the training does not stay under the strategy of the trial.
_ANSWERS_S = 5.0
#: Shortest interval of messages about the steps of a trial, seconds.
_REPORT_S = 0.2


class HelperLine:
    """The messages between rank 0 and the helper, none of which is waited for.

    Args:
        helper: The helper process; ``None`` on ranks other than 0.
        vanished: Answers a trial in which ranks have vanished before.
    """

    def __init__(self, helper: Helper | None, vanished: Vanished) -> None:
        self._helper, self._vanished = helper, vanished
        self._result_at: float | None = None
        self._reported_at = 0.0

    def report_step(self, trial: LiveTrial, now: float) -> None:
        """Let the helper see that a trial goes on.

        Args:
            trial: The trial.
            now: Reading of the performance counter, seconds.
        """
        if self._helper is not None and now - self._reported_at > _REPORT_S:
            self._reported_at = now
            self._helper.send({"type": "step", "steps": trial.steps})

    def result_sent(self) -> None:
        """The helper was told the result of a trial."""
        self._result_at = perf_counter()

    def next(self, strategy: Strategy | None, best: tuple[Strategy, Classes]) -> Message | None:
        """Return the next message; ``None`` if there is none.

        Args:
            strategy: What the training is under; ``None``: unknown.
            best: The best strategy that the helper has named, with its parameter classes.
        """
        if self._helper is None:
            return None
        message = self._helper.next()
        known = self._vanished.result_of(message)
        if known is not None:
            self._helper.send({"type": "result", "result": known.to_json()})
            return None
        if message is not None:
            self._result_at = None
        elif self._result_at is not None and perf_counter() - self._result_at > _ANSWERS_S:
            self._result_at = None
            if strategy != best[0]:
                return {"type": "use", "strategy": dict(best[0]), "classes": best[1]}
        return message
