"""The driver of a training that a notebook has started, to be tuned in its own steps.

It is the flag without a command line: job and options come from the notebook's process, and it ends
the training if that process ends.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from hvd_autosync import extensions
from hvd_autosync.commands.auto_train import train_live_or_tuned
from hvd_autosync.commands.flag import guarded
from hvd_autosync.commands.live_train import train_live
from hvd_autosync.engine.mode import only_trains
from hvd_autosync.engine.options import resolve_options
from hvd_autosync.launch.job import Job
from hvd_autosync.util.log import start_log
from hvd_autosync.util.variables import JOB_VARIABLE


def main() -> None:
    """Train; the argument is the folder of the notes on the training.

    Standard input is a pipe that ends with the notebook's process; nobody writes to it.
    """
    start_log("driver")
    notebook = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with, args=(notebook,), daemon=True).start()
    sys.exit(guarded(lambda: _train(Path(sys.argv[1]))))


def _train(folder: Path) -> int:
    extensions.load()
    job = Job.from_json(os.environ.pop(JOB_VARIABLE))
    options = replace(resolve_options(argparse.Namespace(), os.environ), mode="live")
    if only_trains(job, options):
        return train_live_or_tuned(job, options)
    return train_live(job, options, may_refuse=True, folder=folder).status


def _end_with(notebook: int) -> None:
    os.read(notebook, 1)
    os.kill(os.getpid(), signal.SIGTERM)
