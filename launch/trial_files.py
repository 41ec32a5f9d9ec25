"""Keeps what trials write away from later trials and from the training: the driver's part.

Where it can be, a trial's files are private (:mod:`..launch.private_files`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hvd_autosync.launch.collector import Collector
from hvd_autosync.launch.private_files import FILES_VARIABLE, FilesOrder, NotPrivateError
from hvd_autosync.runtime.driver.wire import Message
from hvd_autosync.search_space import TrialResult, TrialSpec

#: A file of that size that is copied because it is opened for writing costs a trial time.
_LARGE_BYTES = 256 << 20
#: What overlays refuse, or what a script may do outside and not in a user namespace.
_REFUSALS = (
    "Invalid cross-device link",
    "Read-only file system",
    "No space left on device",
    "Permission denied",
    "Operation not permitted",
    "failed writing file",
    "Value too large for defined data type",
)


class TrialFiles:
    """What is known of the files of a job's trials.

    Args:
        say: Takes a line for the user.
        keep: Folder in which what trials write stays; "": nowhere.

    Attributes:
        private: Whether they are kept apart by overlays.
        cleared: Whether a trial that failed with private files has failed without, too.
    """

    def __init__(self, say: Callable[[str], None], keep: str = "") -> None:
        self._say = say
        self._keep = keep
        self._runs: list[str] = []
        self._reports: list[Message] = []
        self._said: set[str] = set()
        self.private = True
        self.cleared = False

    def variables(self, spec: TrialSpec) -> dict[str, str]:
        """Variables of the ranks of the next run."""
        self._reports = []
        if spec.probe:
            return {}
        offline = offline_trackers()
        told = [f"{name}={value}" for name, value in offline.items() if _is_used(name)]
        if told:
            self._say_once(f"trials report to no tracking server: they run with {', '.join(told)}")
        if not self.private:
            return offline
        again = sum(name.startswith(spec.trial_id) for name in self._runs)
        self._runs.append(f"{spec.trial_id}-again{again}" if again else spec.trial_id)
        order = FilesOrder(self._runs[-1], spec.key, self._keep)
        return offline | {FILES_VARIABLE: order.to_text()}

    def receive(self, collector: Collector) -> None:
        """Take what ranks and keepers of a run have told.

        Raises:
            NotPrivateError: The files could not be made private.
        """
        own = self._runs[-1:]
        for message in collector.files:
            if [message["trial"]] != own:
                continue
            if message["type"] == "refused":
                raise NotPrivateError(message["reason"])
            self._reports.append(message)
            if message["copied_bytes"] > _LARGE_BYTES:
                size = message["copied_bytes"] / 1e9
                self._say_once(
                    f"each trial copies {message['copied']} ({size:.1f} GB), for the script opens "
                    "it for writing; opened for reading it costs nothing"
                )

    def suspicion(self, result: TrialResult, hosts: int) -> str:
        """Why a trial may have failed only because its files were private; "" if nothing says so.

        Args:
            result: The trial's.
            hosts: How many hosts it ran on.
        """
        for report in self._reports:
            if report["full"]:
                limit = report["limit_bytes"] >> 20
                return f"it wrote more than the {limit} MiB that are held in memory for it"
        for text in _REFUSALS:
            if text in result.stderr_tail or text in result.reason:
                return f"its output has {text!r}"
        if hosts > 1 and any(report["files"] for report in self._reports):
            return "its hosts do not see each other's files"
        return ""

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)


def offline_trackers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that keep known trackers from telling a server of each trial.

    What the user has chosen for Weights & Biases stands. A tracking server of MLflow is chosen for
    the training; trials write into a folder.
    """
    variables = {}
    if "WANDB_MODE" not in environment:
        variables["WANDB_MODE"] = "offline"
    if "://" in environment.get("MLFLOW_TRACKING_URI", ""):
        variables["MLFLOW_TRACKING_URI"] = str(Path("mlruns").absolute())
    return variables


def _is_used(variable: str) -> bool:
    """Whether a tracker may read ``variable``."""
    return variable != "WANDB_MODE" or importlib.util.find_spec("wandb") is not None
