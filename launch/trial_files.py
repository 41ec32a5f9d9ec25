"""Separates the files of trials from later trials and from the training: the driver's part.

A trial's files are private if the system allows it (:mod:`hvd_autosync.launch.private_files`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from hvd_autosync.launch.collector import Collector
from hvd_autosync.launch.private_files import FILES_VARIABLE, FilesOrder, NotPrivateError
from hvd_autosync.runtime.driver.messages import Files, Refused
from hvd_autosync.search_space import TrialResult, TrialSpec

#: An overlay copies a file that is opened for writing; above this size that is reported.
_LARGE_BYTES = 256 << 20
#: Errors that overlays or a user namespace can cause in a script.
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
    """The driver's settings for, and reports of, the files of a job's trials.

    Args:
        say: Prints a line for the user.
        keep: Folder that keeps the files that trials write; "": they are discarded.

    Attributes:
        private: Whether overlays keep the files private.
        cleared: Whether a trial that failed with private files has failed without them, too.
    """

    def __init__(self, say: Callable[[str], None], keep: str = "") -> None:
        self._say = say
        self._keep = keep
        self._runs: list[str] = []
        self._reports: list[Files] = []
        self._printed: set[str] = set()
        self.private = True
        self.cleared = False

    def variables(self, spec: TrialSpec) -> dict[str, str]:
        """Return the environment variables for the ranks of the next run."""
        self._reports = []
        if spec.probe:
            return {}
        offline = offline_trackers()
        shown = [f"{name}={value}" for name, value in offline.items() if _is_used(name)]
        if shown:
            self._say_once(f"trials report to no tracking server: they run with {', '.join(shown)}")
        if not self.private:
            return offline
        again = sum(name.startswith(spec.trial_id) for name in self._runs)
        self._runs.append(f"{spec.trial_id}-again{again}" if again else spec.trial_id)
        order = FilesOrder(self._runs[-1], spec.key, self._keep)
        return offline | {FILES_VARIABLE: order.to_text()}

    def process_messages(self, collector: Collector) -> None:
        """Process the messages of ranks and files daemons about the last run's files.

        Raises:
            NotPrivateError: The files could not be made private.
        """
        own = self._runs[-1:]
        for message in collector.files:
            if [message.trial] != own:
                continue
            if isinstance(message, Refused):
                raise NotPrivateError(message.reason)
            self._reports.append(message)
            if message.copied_bytes > _LARGE_BYTES:
                size = message.copied_bytes / 1e9
                self._say_once(
                    f"each trial copies {message.copied} ({size:.1f} GB), because the script "
                    "opens it for writing; open it for reading to avoid the copy"
                )

    def suspicion(self, result: TrialResult, hosts: int) -> str:
        """Return a sign that a trial failed only because its files were private; "" if none.

        Args:
            result: The trial's result.
            hosts: Number of the trial's hosts.
        """
        for report in self._reports:
            if report.full:
                limit = report.limit_bytes >> 20
                return f"it wrote more than the {limit} MiB of memory that its files may take"
        for text in _REFUSALS:
            if text in result.stderr_tail or text in result.reason:
                return f"its output has {text!r}"
        if hosts > 1 and any(report.files for report in self._reports):
            return "its hosts do not see each other's files"
        return ""

    def _say_once(self, line: str) -> None:
        if line not in self._printed:
            self._printed.add(line)
            self._say(line)


def offline_trackers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return variables that keep known trackers from reporting each trial to a server.

    A user's own mode of Weights & Biases is kept. A tracking server of MLflow is meant for the
    training, so trials write into a folder instead.
    """
    variables = {}
    if "WANDB_MODE" not in environment:
        variables["WANDB_MODE"] = "offline"
    if "://" in environment.get("MLFLOW_TRACKING_URI", ""):
        variables["MLFLOW_TRACKING_URI"] = str(Path("mlruns").absolute())
    return variables


def _is_used(variable: str) -> bool:
    """Return whether an installed tracker may read ``variable``."""
    return variable != "WANDB_MODE" or importlib.util.find_spec("wandb") is not None
