"""The helper process of rank 0, in which the study runs, and the pipe to it.

The helper proposes strategies and keeps the store. Ranks import nothing of that. It is started
before the script initializes Horovod, without the launcher's variables, so that it is no rank. Its
messages are lines of JSON on its standard input and output; nobody else can open these, so there is
no port and no secret.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

from hvd_autosync.runtime.live.waiting import waits_in_exchange
from hvd_autosync.search_space.exchange_plan import Classes
from hvd_autosync.search_space.horovod_settings import is_elastic, without_rank
from hvd_autosync.search_space.strategy import Strategy
from hvd_autosync.util.program import run_main
from hvd_autosync.util.variables import LIVE_VARIABLE

#: Values of JSON by name; ``"type"`` says what it is.
Message: TypeAlias = dict[str, Any]
#: What a rank gets in place of a message once the helper has ended.
LOST: Message = {"type": "lost"}
#: Sent while there is nothing else to say, unless this rank waits for others in an exchange.
ALIVE: Message = {"type": "alive"}
_ALIVE_EVERY_S = 1.0
#: Longest wait for the helper to take the last message, seconds.
_CLOSE_S = 1.0
#: The helper computes at this priority, the lowest.
_NICE = 19
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Helper:
    """A started helper. No method waits for it.

    Args:
        process: Its process, with pipes.
        waits: Whether this rank waits in an exchange.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], waits: Callable[[], bool] = waits_in_exchange
    ) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._waits = waits
        self._received: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._to_send: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._writer = _start(self._write, process.stdin)
        _start(self._read, process.stdout)

    @classmethod
    def start(cls, folder: str, environment: Mapping[str, str] = os.environ) -> Helper:
        """Start the helper process.

        Args:
            folder: The folder in which the job was started, which identifies it, together with the
                files that its command names from there. If this host lacks it, the helper starts in
                the folder of this process.
            environment: The environment of rank 0.

        Raises:
            OSError: The process cannot be started.
        """
        own = without_rank(environment)
        own.pop(LIVE_VARIABLE, None)
        own |= dict.fromkeys(_ONE_THREAD, "1") | {"CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            ["nice", "-n", str(_NICE), *run_main("hvd_autosync.commands.live_study")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=own,
            cwd=folder if folder and Path(folder).is_dir() else None,
            # Signals of the terminal are the job's; the helper ends with its standard input.
            start_new_session=True,
        )
        _end_before_ranks(process.pid)
        _leave_core(process.pid)
        try:
            return cls(process)
        except RuntimeError as error:  # no further thread, as under a limit of processes
            process.kill()
            process.wait()
            raise OSError(str(error)) from error

    def send(self, message: Message) -> None:
        """Queue a message for the helper."""
        self._to_send.put(message)

    def next(self) -> Message | None:
        """Return the next message from the helper, ``LOST`` after its end; ``None``: none yet."""
        try:
            return self._received.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """Let the helper end, once it has received what was sent; waits for that a moment."""
        self._to_send.put(None)
        self._writer.join(_CLOSE_S)

    def _read(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in stream:
                self._received.put(json.loads(line))
        self._process.wait()
        self._received.put(LOST)

    def _next_to_send(self) -> Message | None:
        """Wait for a message to send; ``None``: there is none any more."""
        while True:
            with contextlib.suppress(queue.Empty):
                return self._to_send.get(timeout=_ALIVE_EVERY_S)
            if not self._waits():
                return ALIVE

    def _write(self, stream: IO[bytes]) -> None:
        with contextlib.suppress(OSError):  # it has ended; _read notices
            while (message := self._next_to_send()) is not None:
                stream.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
                stream.flush()
        with contextlib.suppress(OSError):
            stream.close()


def _end_before_ranks(process: int) -> None:
    """Let the kernel end a process, and no rank, where memory is short."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/oom_score_adj").write_text("1000")


def _leave_core(process: int) -> None:
    """Let a process run where this rank's launcher may, which may have bound the rank to a core.

    Not on all processors: the whole job may be meant for some of them, as by ``taskset``.
    """
    with contextlib.suppress(OSError):
        os.sched_setaffinity(process, os.sched_getaffinity(os.getppid()))


def begin_message(hosts: list[str], abilities: Mapping[str, bool]) -> Message:
    """Return what the helper has to know of the job, whose rank 0 is this process.

    Args:
        hosts: The host of each rank.
        abilities: What can be changed in this training: :meth:`Attacher.abilities`.
    """
    return {
        "type": "begin",
        "hosts": hosts,
        "command": [sys.executable, *sys.argv],
        "process": os.getpid(),
        **abilities,
        "elastic": is_elastic(os.environ),
    }


def strategy_of(message: Message) -> tuple[Strategy, Classes]:
    """Return the strategy of a message, with its parameter classes."""
    classes = {name: tuple(names) for name, names in message["classes"].items()}
    return Strategy(message["strategy"]), classes


def _start(target: Callable[[IO[bytes]], None], stream: IO[bytes]) -> threading.Thread:
    thread = threading.Thread(
        target=target, args=(stream,), name="hvd-autosync-helper", daemon=True
    )
    thread.start()
    return thread
