"""The helper process of a training that is tuned live; its rank 0 starts it.

Messages travel over standard input and output (:mod:`hvd_autosync.runtime.live.helper`); lines for
the user go to the error output, which is that of rank 0.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hvd_autosync.errors import AutosyncError, LiveTuningError
from hvd_autosync.util.log import start_log
from hvd_autosync.util.printable import printable
from hvd_autosync.util.variables import STOPPED_VARIABLE

if TYPE_CHECKING:
    from hvd_autosync.engine.live import Cost
    from hvd_autosync.traces import StudyRecord

#: Longest time of this process after the end of the training, seconds: its error output is that of
#: rank 0, whose launcher waits for its end.
_LONGEST_S = 20.0
_RESUMED = "the training ended before its tuning; the next run of this job resumes it"


def main() -> None:
    """Tune the training whose rank 0 has started this process; end with it."""
    # What libraries print must not reach the messages.
    sent = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    start_log("helper")
    # Imported while the script prepares its training: these libraries take seconds to load.
    from hvd_autosync.engine.live import LiveStudy, live_job, live_options
    from hvd_autosync.launch.live_runner import Training, TrainingEnded, TrainingLost
    from hvd_autosync.reporting import closing_lines, progress_listener
    from hvd_autosync.reporting.live import cost_line
    from hvd_autosync.search_space.horovod_settings import launch_knobs

    # Not sys.stdin, which Python closes in the end: while it is being read that is an error.
    received = os.fdopen(os.dup(0), "rb")
    training = Training(received, sent, on_end=_end_soon, stopped=_watch_for_stop())
    concluded: list[str] = []
    try:
        options = live_options()
        begin = training.wait("begin")

        def on_switch(study: StudyRecord, cost: Cost) -> None:
            concluded.append(study.study_id)
            for line in (*closing_lines(study, options.store), cost_line(study, cost)):
                if line:
                    _say(line)

        with closing(progress_listener()) as listener:
            fixed = launch_knobs(reinitializes=begin["reinitializes"])
            LiveStudy(training, live_job(begin), options, listener, fixed, on_switch).run()
    except TrainingEnded:
        if not training.process:
            _say(
                "nothing was tuned: all ranks together made no step of an optimizer that "
                "hvd.DistributedOptimizer has wrapped"
            )
        elif not concluded:
            _say(_RESUMED)
    except TrainingLost as end:
        if not training.stopped:
            _say(end.message)
        elif training.process and not concluded:
            _say(_RESUMED)
    except LiveTuningError:
        pass  # rank 0 has said why
    except AutosyncError as error:
        for line in (*str(error).splitlines(), "the training goes on untuned"):
            _say(line.strip())
        training.stop(error.message)


def _watch_for_stop() -> Callable[[], bool]:
    """Return whether the job has been stopped from outside since.

    The flag says so by a file. A scheduler sends its signal to every process of the job, which is
    what tells it from a launcher: one that ends the other ranks after a failure does not know of
    this process.
    """
    received: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(number)
        _end_soon()

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, receive)
    marker = os.environ.pop(STOPPED_VARIABLE, "")
    return lambda: bool(received) or bool(marker and Path(marker).exists())


def _end_soon() -> None:
    """Nobody listens any more, or soon nobody will: end, also in the middle of a calculation."""
    timer = threading.Timer(_LONGEST_S, os._exit, [0])
    timer.daemon = True
    timer.start()


def _say(line: str) -> None:
    print(f"hvd-autosync: {printable(line)}", file=sys.stderr, flush=True)
