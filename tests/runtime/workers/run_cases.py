"""Runs cases on all ranks, with measuring switched on.

``run_cases.py FOLDER SECONDS TIMES MODULE.CASE ...``: Horovod is initialized again so many times
first. Each rank appends one JSON line per case to ``FOLDER/RANK``: ``[name, traceback or "",
seconds]``, and says after SECONDS where it hangs. A case ends by returning, by
``unittest.SkipTest``, or by failing. With ``CASES_DEVICE=cuda`` in the environment they compute on
GPUs, which ranks share if there are fewer.
"""

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
import unittest
import warnings
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives import over_horovod
from hvd_autosync.runtime.collectives.initialization import record_initialization
from hvd_autosync.runtime.collectives.levels import prepare_levels
from hvd_autosync.runtime.collectives.messaging import prepare_messaging
from hvd_autosync.runtime.collectives.reinitialize import reinitialize
from hvd_autosync.runtime.exchange import dispatcher
from hvd_autosync.search_space.horovod_settings import OURS_ALONE, PROCESS_SETS_VARIABLE

#: Longest wait of a rank for those that have cases left.
OTHERS_S = 120.0
#: How long a rank sleeps between two looks at an operation.
LOOK_S = 0.001
#: In milliseconds. With its default of 1 Horovod's own thread takes a fifth of a processor.
CYCLE_TIME = {"HOROVOD_CYCLE_TIME": "5"}
#: Files whose cases initialize Horovod again.
INITIALIZING = {"cases_levels_again", "cases_reinitialize"}
#: Files whose cases send messages, as protocols do.
MESSAGING = {
    "cases_lossy_methods",
    "cases_messages",
    "cases_methods",
    "cases_protocols",
    "cases_stragglers",
}


def wait_asleep() -> None:
    """Let ranks sleep while they wait for operations.

    Horovod's own waiting never sleeps (``WaitAndClear`` in its ``torch/mpi_ops_v2.cc``), and a
    pause of microseconds costs more than it waits. On two processors both hold up the very threads
    that are waited for, and the tests beside these.
    """
    waits = mpi_ops.synchronize

    def synchronize(handle: int) -> object:
        while handle in mpi_ops._handle_map and not mpi_ops.poll(handle):
            time.sleep(LOOK_S)
        return waits(handle)

    # Whoever has it by name already, Horovod's own optimizer and our collectives, too.
    for name, module in [*sys.modules.items()]:
        if name.startswith("horovod.torch") and getattr(module, "synchronize", None) is waits:
            module.synchronize = synchronize
    dispatcher._PAUSE_S = over_horovod._PAUSE_S = LOOK_S


def await_others(folder: str, ranks: int, cases: int) -> None:
    """Wait until all ranks have run all cases: who ends shuts Horovod down for the others, too."""
    files = [Path(folder, str(rank)) for rank in range(ranks)]
    deadline = time.monotonic() + OTHERS_S
    while time.monotonic() < deadline:
        if all(file.exists() and file.read_text().count("\n") == cases for file in files):
            return
        time.sleep(0.05)


def run(case) -> str:
    torch.manual_seed(1234)
    try:
        with warnings.catch_warnings():
            case()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except BaseException:
        return traceback.format_exc()
    return ""


def compute_on(device: str) -> None:
    """Let whatever the cases make be there, and what they do twice have the same bits."""
    torch.set_default_device(device)
    if device == "cuda":
        number = int(os.environ.get("HOROVOD_LOCAL_RANK", "0"))
        torch.cuda.set_device(number % torch.cuda.device_count())
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS keeps its order of sums with it
    torch.use_deterministic_algorithms(True, warn_only=True)


def initialize_again(times: int) -> None:
    """Initialize Horovod again and again, with the variables that live tuning changes."""
    from cases_reinitialize import VARIABLES

    for number in range(times):
        reinitialize(VARIABLES[number % len(VARIABLES)])


def main(folder: str, limit_s: str, times: str, *names: str) -> None:
    modules = {name.partition(".")[0] for name in names}
    if device := os.environ.get("CASES_DEVICE"):
        compute_on(device)
    faulthandler.dump_traceback_later(float(limit_s))
    torch.set_num_threads(1)
    wait_asleep()
    if int(times) or modules & INITIALIZING:
        record_initialization()  # whose variables Horovod's own cycle time is one of
    else:
        os.environ.update(CYCLE_TIME)  # until Horovod has read it: cases look at variables
    # Sets that may be added later hold up who starts operations: not where time matters.
    if modules & MESSAGING:
        prepare_messaging()
        hvd.init()
    elif "cases_two_levels" in modules:
        os.environ[PROCESS_SETS_VARIABLE] = OURS_ALONE
        prepare_levels()
        hvd.init()
    else:
        hvd.init(process_sets="dynamic")
    for name in CYCLE_TIME:
        os.environ.pop(name, None)
    initialize_again(int(times))
    current.run._sender.stop()  # the cases look at news themselves
    ranks = hvd.size()  # cases may end Horovod
    with open(os.path.join(folder, str(hvd.rank())), "w") as out:
        for name in names:
            module, _, case = name.partition(".")
            function, began = getattr(importlib.import_module(module), case), time.monotonic()
            report = run(function)
            took_s = time.monotonic() - began
            print(json.dumps([name, report, took_s]), file=out, flush=True)
    await_others(folder, ranks, len(names))


if __name__ == "__main__":
    main(*sys.argv[1:])
