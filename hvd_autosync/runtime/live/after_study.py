"""The steps of a training after its study, which are only watched for drift."""

from __future__ import annotations

from collections.abc import Callable

from hvd_autosync.runtime import current
from hvd_autosync.runtime.live.helper import Message
from hvd_autosync.runtime.measure.drift import DriftWatch


class AfterStudy:
    """Watches the same steps as the trials were made of.

    A watch that looked for the training's steps by itself could take another optimizer's for them.

    Args:
        send: Composes a message for the helper where there is one, and sends it.

    Attributes:
        now: Whether the study has ended.
    """

    def __init__(self, send: Callable[[Callable[[], Message]], None]) -> None:
        self.now = False
        self._send = send
        self._watch: DriftWatch | None = None
        current.watch = None

    def begin(self, expected_step_s: float) -> None:
        """The study has ended.

        Args:
            expected_step_s: Step time as tuning measured it, seconds; 0: unknown.
        """
        self.now = True
        if expected_step_s > 0:
            current.watch = self._watch = DriftWatch(
                expected_step_s, "", on_drift=self._drifted, counts=False
            )

    def end(self) -> None:
        """A further study begins, or the training goes on as it began."""
        self.now = False
        self.watch_no_longer()

    def watch_no_longer(self) -> None:
        """The script trains another model, whose steps have other times."""
        self._watch = current.watch = None

    def end_step(self, *, typical: bool) -> None:
        """End a step.

        Args:
            typical: Whether it is like the others: no evaluation, no checkpoint, no new epoch.
        """
        if self._watch is not None and current.watch is not None:  # the loss guard ends it
            self._watch.end_step(typical=typical)

    def _drifted(self, text: str) -> None:
        """Steps have become slower or faster for good, as rank 0 has seen."""
        self._send(lambda: {"type": "drift", "text": text})
