"""A training beside this process, started by ``hvd_autosync.tune(..., mode="live")``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import deque
from datetime import datetime, timezone
from pathlib import Path

from hvd_autosync.engine.notes_folder import NotesFolder
from hvd_autosync.engine.options import Options, options_environment
from hvd_autosync.engine.training import REFUSAL_FILE
from hvd_autosync.errors import ConfigurationError
from hvd_autosync.launch.job import Job, job_environment
from hvd_autosync.launch.signals import signals_deferred
from hvd_autosync.runtime.live.notes import read_note
from hvd_autosync.traces.location import data_folder
from hvd_autosync.util.packed_text import pack
from hvd_autosync.util.printable import printable
from hvd_autosync.util.program import run_main
from hvd_autosync.util.variables import END_TUNING_NOTE, JOB_VARIABLE, STUDY_NOTE, TUNING_ENDED_NOTE

#: Lines of a job's output that an error shows.
_LAST_LINES = 8


#: The trainings of this process that may still run. What is not held any more ends.
_RUNNING: list[Training] = []


def training_of(study_id: str) -> Training | None:
    """Return the training that this process has started last with this study; ``None``: none."""
    return next((each for each in reversed(_RUNNING) if each.study_id == study_id), None)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class Training:
    """A training that goes on beside this process, and ends with it, however that ends.

    :func:`hvd_autosync.tune` makes it.

    Args:
        job: The job.
        options: The options of its tuning.
        known: Id of the earlier study under whose result it trains; empty: it is tuned.

    Attributes:
        output: File with all that the job prints.

    Raises:
        ConfigurationError: There is no folder for the output, or none for notes.
    """

    def __init__(self, job: Job, options: Options, known: str = "") -> None:
        self._known = known
        variables = job_environment() | options_environment(options)
        variables |= {JOB_VARIABLE: pack(json.dumps(job.to_json()))}
        moment = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S-%f")
        self.output = data_folder() / "trainings" / f"{moment}.log"
        try:
            self._folder = NotesFolder()
            self.output.parent.mkdir(0o700, parents=True, exist_ok=True)
            # An interrupt must not lose what was started.
            with signals_deferred(), open(self.output, "xb", opener=_private) as output:
                self._process = subprocess.Popen(
                    run_main(
                        "hvd_autosync.commands.live_driver",
                        self._folder.name,
                        *(["tuned"] if known else []),
                    ),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=variables,
                    # An interrupt of a notebook's kernel is for the cell.
                    start_new_session=True,
                )
                _RUNNING[:] = [*(each for each in _RUNNING if each.status is None), self]
        except KeyboardInterrupt:
            if self in _RUNNING:  # nobody else knows of it yet
                self.stop()
            raise
        except OSError as error:
            raise ConfigurationError(
                f"the training cannot be started with its output in {self.output}: {error}",
                hint="Set XDG_DATA_HOME and TMPDIR to folders that you may write to.",
            ) from None

    @property
    def status(self) -> int | None:
        """Exit status as of ``horovodrun``, 128 plus the number if a signal ended it.

        ``None`` while it trains.
        """
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def refusal(self) -> str:
        """Why it has ended without having been tuned; empty if it has not."""
        return self._note(REFUSAL_FILE)

    @property
    def study_id(self) -> str:
        """Id of its study; empty as long as there is none."""
        return self._known or self._note(STUDY_NOTE)

    @property
    def tuning_ended(self) -> str:
        """Why its tuning has ended without a result, while it trains on; empty if it has not."""
        return self._note(TUNING_ENDED_NOTE)

    def _note(self, name: str) -> str:
        return read_note(Path(self._folder.name, name))

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end of the training; an interrupt of the kernel ends only the waiting.

        Args:
            timeout_s: Longest wait, seconds; ``None``: without an end.

        Returns:
            :attr:`status`.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.status

    def stop(self) -> int | None:
        """End the training, as Ctrl-C at ``horovodrun`` does; return :attr:`status`."""
        self._process.terminate()
        return self.wait()

    def end_tuning(self) -> None:
        """Let the training go on under the best confirmed strategy, once this trial has ended."""
        Path(self._folder.name, END_TUNING_NOTE).touch()

    def last_lines(self) -> str:
        """Return the last lines that the job has printed, as far as its file is still there."""
        with contextlib.suppress(FileNotFoundError), self.output.open(errors="replace") as file:
            return "\n".join(printable(line.rstrip("\n")) for line in deque(file, _LAST_LINES))
        return f"(its output, {self.output}, was deleted)"

    def __repr__(self) -> str:
        state = "running" if self.status is None else f"ended with status {self.status}"
        return f"<Training {state}, output in {self.output}>"
