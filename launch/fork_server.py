"""The fork server: started once per slot, it forks a child for every warm trial.

It imports torch and Horovod once, never initializes Horovod, and has no threads, so that its
children start as a fresh process would after these imports. The driver
(:mod:`hvd_autosync.launch.warm`) sends its orders through :mod:`hvd_autosync.launch.channel`. The
server answers with messages in the job's output (:mod:`..runtime.driver.wire`), as the ranks of a
trial do:

- ``server``: it listens: ``address, port, secret, rendezvous``.
- ``exit``: a trial's processes have ended: ``trial, status`` (negative: a signal's number).

It ends, with all its children, when the driver closes the connection. It is started without the
working directory on its import path (:mod:`hvd_autosync.util.program`).
"""

from __future__ import annotations

import ctypes
import gc
import os
import selectors
import signal
import sys
import time

from hvd_autosync.launch.channel import ChannelError, ControlReceiver, new_secret
from hvd_autosync.launch.forked_trial import ForkedTrial
from hvd_autosync.launch.preload import Preloader
from hvd_autosync.launch.stage import remove_stages
from hvd_autosync.runtime.driver.environment import KEY_VARIABLE, TRIAL_ID_VARIABLE
from hvd_autosync.runtime.driver.processes import await_daemons, end_descendants
from hvd_autosync.runtime.driver.wire import Message, write_message
from hvd_autosync.search_space.horovod_settings import OWN_INTERFACE, OWN_RANK, RENDEZVOUS_ADDRESS
from hvd_autosync.util.sockets import interface_address

#: Longest time until all servers of a job listen; otherwise none is used. They import torch,
#: possibly from a network file system.
START_S = 120.0
#: Longest wait for the driver, which connects after the last server has started.
_DRIVER_S = START_S + 30.0
_PROBE_S = 1.0
#: Interval of looks at a child of which the kernel does not tell the end.
_LOOK_S = 0.05
#: ``prctl`` options of Linux (``linux/prctl.h``).
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def main() -> None:
    """Serve until the driver closes the connection; in a forked child, run the trial."""
    is_module, words = sys.argv[1] == "-m", sys.argv[2:]
    trial = _Server(words[0] if is_module else "").serve()
    if trial is not None:
        trial.run(is_module, words)


class _Server:
    """The parent of all trials of one slot.

    Args:
        main: As of :class:`Preloader`.
    """

    def __init__(self, main: str) -> None:
        self._rank = int(os.environ[OWN_RANK])
        self._key = os.environ.pop(KEY_VARIABLE)
        self._sent = 0
        self._child: int | None = None
        #: Readable once the child has ended; ``None`` where the kernel has no such descriptors.
        self._child_fd: int | None = None
        self._trial_id = ""
        self._preloader = Preloader(main)

    def serve(self) -> ForkedTrial | None:
        """Execute the driver's orders.

        Returns:
            The trial, in a forked child; ``None`` in the server, after the driver has ended.
        """
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._preloader.load_frameworks()
        secret = new_secret()
        try:
            address = interface_address(os.environ[OWN_INTERFACE])
        except OSError as error:
            raise SystemExit(f"hvd-autosync: {error}") from None
        receiver = ControlReceiver(address, secret)
        self._send(
            {
                "type": "server",
                "secret": secret.hex(),
                "address": address,
                "port": receiver.port,
                "rendezvous": os.environ[RENDEZVOUS_ADDRESS],
            }
        )
        try:
            message: Message | None = _first_message(receiver)
            while True:
                trial = self._execute(message, receiver) if message else None
                if trial is not None:
                    return trial
                message = self._next(receiver)
        except (ChannelError, BrokenPipeError):  # the driver has ended
            self._end_child()
            remove_stages(os.environ[TRIAL_ID_VARIABLE])
            return None

    def _next(self, receiver: ControlReceiver) -> Message | None:
        """Wait for the next message; return ``None`` if the child has ended instead."""
        with selectors.DefaultSelector() as selector:
            selector.register(receiver, selectors.EVENT_READ)
            if self._child_fd is not None:
                selector.register(self._child_fd, selectors.EVENT_READ)
            looks = self._child is not None and self._child_fd is None
            ready: set[object] = set()
            while not ready and not self._has_ended():
                ready = {key.fileobj for key, _ in selector.select(_LOOK_S if looks else None)}
        if self._has_ended():
            self._reap()
            return None
        return receiver.receive()

    def _has_ended(self) -> bool:
        """Return whether there is a child, and it has ended."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._child is not None and os.waitid(os.P_PID, self._child, options) is not None

    def _execute(self, message: Message, receiver: ControlReceiver) -> ForkedTrial | None:
        if message["type"] == "run":
            return self._fork(message, receiver)
        self._end_child()
        return None

    def _fork(self, message: Message, receiver: ControlReceiver) -> ForkedTrial | None:
        gc.freeze()
        server = os.getpid()
        child = os.fork()
        if child == 0:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(0)
            receiver.close()
            return ForkedTrial(message, self._preloader.record)
        self._child, self._child_fd = child, _pidfd(child)
        self._trial_id = message["trial"]
        return None

    def _end_child(self) -> None:
        if self._child is not None:
            os.kill(self._child, signal.SIGKILL)
            self._reap()

    def _reap(self) -> None:
        """Wait for the child's end, end its descendants, and report it after their output."""
        if self._child is None:
            return
        _, status = os.waitpid(self._child, 0)
        if self._child_fd is not None:
            os.close(self._child_fd)
        self._child = self._child_fd = None
        end_descendants()
        await_daemons()
        code = os.waitstatus_to_exitcode(status)
        self._send({"type": "exit", "trial": self._trial_id, "status": code})
        self._preloader.load_what_was_imported()

    def _send(self, message: Message) -> None:
        write_message(2, self._key, self._rank, self._sent, message)
        self._sent += 1


def _first_message(receiver: ControlReceiver) -> Message:
    """Wait for the driver and return its first message.

    Meanwhile empty lines are written, which fails as soon as the driver has closed the pipe.

    Raises:
        ChannelError: The driver did not connect in time.
        BrokenPipeError: The driver has ended.
    """
    deadline = time.monotonic() + _DRIVER_S
    while True:
        try:
            return receiver.accept(_PROBE_S)
        except ChannelError:
            if time.monotonic() > deadline:
                raise
            os.write(2, b"\n")


def _pidfd(pid: int) -> int | None:
    """Return a descriptor that is readable once a process has ended.

    ``None`` where there is none: before Linux 5.3, or where a container's filter forbids it.
    """
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
