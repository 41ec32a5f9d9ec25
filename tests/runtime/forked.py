"""Stands for a process that ``forking.py`` forks: ``forked.py FOLDER PROGRAM [ARGUMENT ...]``.

That one has its streams, folder and environment, and gets its signals, but for SIGSTOP. Each ends
as the other does. Neighbouring ranks come from different servers, whose sockets are in ``FOLDER``:
they hash differently, as processes that are started do.
"""

import contextlib
import json
import os
import signal
import socket
import sys

_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1)


def main(folder: str, *program: str) -> int:
    rank = os.environ.get("HOROVOD_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(os.path.join(folder, str(int(rank) % 2)))
    request = {"program": program, "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    child = int(connection.recv(64))

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(child, number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    status = int(connection.recv(64))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:  # which nobody handles
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
