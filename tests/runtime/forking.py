"""Forks ranks of tests' jobs from one process, which has imported torch and Horovod.

``forking.py DESCRIPTOR PARENT``: the listening socket at which ``forked.py`` asks for a process and
waits for its end, and the process with which this one ends. A rank that is started as a program
imports torch and Horovod for four seconds of a processor.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from typing import NamedTuple

import numpy as np

from hvd_autosync.launch.preload import Preloader
from hvd_autosync.runtime.driver.environment import TRIAL_VARIABLE
from hvd_autosync.util.variables import LIVE_VARIABLE

#: ``prctl`` option of Linux (``linux/prctl.h``).
_PR_SET_PDEATHSIG = 1
_LONGEST_REQUEST = 1 << 20
_STREAMS = 3


class _Child(NamedTuple):
    """A forked process: its number, a descriptor of it, and the connection of who asked for it."""

    number: int
    ended: int
    connection: socket.socket


class _Server:
    """Forks processes until it is ended itself."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)

    def serve(self) -> list[str]:
        """Return only in a forked process: the program that it has to run, and its arguments."""
        while True:
            # One at a time: another event may be of the same child.
            for key, _ in self._selector.select()[:1]:
                if key.fileobj is self._listening:
                    if program := self._answer():
                        return program
                elif key.fileobj == key.data.ended:
                    self._reap(key.data)
                else:  # who asked has been killed
                    os.kill(key.data.number, signal.SIGKILL)
                    self._selector.unregister(key.fileobj)

    def _answer(self) -> list[str] | None:
        connection, _ = self._listening.accept()
        request, streams, *_ = socket.recv_fds(connection, _LONGEST_REQUEST, _STREAMS)
        if len(streams) < _STREAMS:  # who asked has been killed before it has
            connection.close()
            return None
        gc.freeze()
        server, number = os.getpid(), os.fork()
        if number == 0:
            _end_with(server)
            for key in self._selector.get_map().values():
                os.close(key.fd)
            self._selector.close()
            connection.close()
            return _become(json.loads(request), streams)
        for stream in streams:
            os.close(stream)
        child = _Child(number, os.pidfd_open(number), connection)
        self._selector.register(child.ended, selectors.EVENT_READ, child)
        self._selector.register(connection, selectors.EVENT_READ, child)
        _tell(connection, number)
        return None

    def _reap(self, child: _Child) -> None:
        _, status = os.waitpid(child.number, 0)
        self._selector.unregister(child.ended)
        os.close(child.ended)
        if child.connection in self._selector.get_map():
            self._selector.unregister(child.connection)
            _tell(child.connection, status)
        child.connection.close()


def _end_with(parent: int) -> None:
    """End this process whenever its parent ends or is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _tell(connection: socket.socket, number: int) -> None:
    """Tell who asked, unless that process has been killed meanwhile."""
    with contextlib.suppress(ConnectionError):
        connection.send(b"%d" % number)


def _become(request: dict, streams: list[int]) -> list[str]:
    """Be the process that was asked for, as if it had been started there; return its program."""
    os.setsid()
    for stream, given in enumerate(streams):
        os.dup2(given, stream)
        os.close(given)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.stdout.reconfigure(line_buffering=True)  # Horovod asks for it by PYTHONUNBUFFERED
    np.random.seed()  # Python's own generator does so after each fork
    return request["program"]


if __name__ == "__main__":
    _end_with(int(sys.argv[2]))
    Preloader().load_frameworks()
    sys.argv = _Server(socket.socket(fileno=int(sys.argv[1]))).serve()
    sys.path[0] = os.path.dirname(sys.argv[0])
    if os.environ.get(TRIAL_VARIABLE) or os.environ.get(LIVE_VARIABLE):
        importlib.import_module("hvd_autosync.bootstrap")  # as hvd_autosync.pth does
    runpy.run_path(sys.argv[0], run_name="__main__")
