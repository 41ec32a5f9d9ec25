"""Stands for a process that ``forking.py`` forks: ``forked.py SOCKET PROGRAM [ARGUMENT ...]``.

That one has its streams, folder and environment, and gets its signals. Each ends as the other does.
"""

import json
import os
import signal
import socket
import sys

_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1)


def main(address: str, *program: str) -> int:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    request = {"program": program, "folder": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    child = int(connection.recv(64))
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(child, number))
    status = int(connection.recv(64))
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:  # which nobody handles
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
