"""The driver of a training that a notebook has started, to be tuned in its own steps.

It is the flag without a command line: job and options come from the notebook's process, and it ends
the training if that process ends.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path

from hvd_autosync import extensions
from hvd_autosync.commands.flag import guarded
from hvd_autosync.commands.live_stage import train_on
from hvd_autosync.commands.live_train import train_live
from hvd_autosync.commands.tune_and_train import tune_and_train
from hvd_autosync.engine.option_values import variable_name
from hvd_autosync.engine.options import Options, resolve_options
from hvd_autosync.launch.job import Job
from hvd_autosync.util.log import start_log
from hvd_autosync.util.packed_text import unpack
from hvd_autosync.util.variables import JOB_VARIABLE


def main() -> None:
    """Train; the arguments are the folder of the notes, and ``tuned`` if nothing is to be tried.

    Standard input is a pipe that ends with the notebook's process; nobody writes to it.
    """
    start_log("driver")
    notebook = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_end_with, args=(notebook,), daemon=True).start()
    sys.exit(guarded(lambda: _train(Path(sys.argv[1]), tuned=sys.argv[2:] == ["tuned"])))


def _train(folder: Path, *, tuned: bool) -> int:
    extensions.load()
    job = Job.from_json(json.loads(unpack(os.environ.pop(JOB_VARIABLE))))
    options = resolve_options(argparse.Namespace(), os.environ)
    # Horovod writes its environment on the command lines of ranks, and the address of the store may
    # have a password. Those of a training that is tuned get options; such an address is refused.
    for each in fields(Options):
        os.environ.pop(variable_name(each.name), None)
    if tuned:
        known = replace(options, mode="launched", reuse="only")
        return tune_and_train(job, known, train_on) if options.allow else tune_and_train(job, known)
    return train_live(job, replace(options, mode="live"), may_refuse=True, folder=folder).status


def _end_with(notebook: int) -> None:
    os.read(notebook, 1)
    os.kill(os.getpid(), signal.SIGTERM)
