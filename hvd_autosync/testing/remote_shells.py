"""How processes start on another host of a test bed: by its ``sshd``, or by a stand-in for ssh.

``sshd`` needs root. In a user namespace a script named ``ssh`` takes the place of ssh: it enters
the other host's namespaces, which it finds by a process of that host.
"""

from __future__ import annotations

import os
import pwd
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvd_autosync.testing.namespaces import TOOL_PATH, Box, TestbedError, run_tool

#: Each host's own folder for what the test bed writes.
FOLDER = "/run/testbed"
KEY = f"{FOLDER}/key"
STAND_IN_FOLDER = f"{FOLDER}/bin"
#: All hosts number processes from 1 and share ``/tmp``, where Open MPI names its files by host and
#: process. Files of a killed process would stop a later one (PMIx's listener fails to start).
ENVIRONMENT = {"PRTE_MCA_prte_tmpdir_base": FOLDER}
SSH_TOOLS = ("ssh", "ssh-keygen", "sshd")
#: Longest time until all hosts answer by ssh, which takes long on a busy machine.
_SSHD_S = 60.0

#: A root account with a locked password cannot log in by key either, hence the separate shadow.
_START = f"""
mount --bind {FOLDER}/shadow /etc/shadow
mount --bind {FOLDER}/ssh /etc/ssh
[ ! -d "$1/.ssh" ] || mount -t tmpfs -o mode=700 tmpfs "$1/.ssh"
$(command -v sshd) -f {FOLDER}/ssh/sshd_config -E {FOLDER}/sshd.log || {{
    cat {FOLDER}/sshd.log >&2
    exit 1
}}
"""
_SSHD_CONFIG = f"""
HostKey {KEY}
AuthorizedKeysFile {KEY}.pub
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
PidFile none
MaxStartups 100
SetEnv {{environment}}
"""
_SSH_CONFIG = f"""
IdentityFile {KEY}
GlobalKnownHostsFile {FOLDER}/known_hosts
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
#: Options may follow the host, as with ssh; the command is what follows both.
_STAND_IN = """#!/bin/sh
host=
while :; do
    case $1 in
    -[iop]) shift 2 ;;
    -*) shift ;;
    *) [ -z "$host" ] || break; host=$1; shift ;;
    esac
done
case $host in
{hosts}
*) echo "ssh: unknown host $host" >&2; exit 255 ;;
esac
exec nsenter --target=$pid --mount --uts --ipc --net $processors env --chdir="$HOME" sh -c "$*"
"""


def start_sshd(boxes: Sequence[Box]) -> None:
    """Start an ``sshd`` on every host, all with one key.

    Raises:
        TestbedError: A daemon does not start.
    """
    for box in boxes:
        run_tool(box, "mkdir", "-p", "/run/sshd", f"{FOLDER}/ssh")
    first = boxes[0]
    run_tool(first, "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "testbed", "-f", KEY)
    key, public = first.read(KEY), first.read(f"{KEY}.pub")
    # The PATH on which Open MPI's daemon on another host finds its programs.
    path = f"{Path(sys.executable).parent}{os.pathsep}{TOOL_PATH}"
    files = {
        "shadow": "root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n",
        "known_hosts": f"testhost*,198.18.0.* {public}",
        "key": key,
        "key.pub": public,
        "ssh/ssh_config": _SSH_CONFIG,
        "ssh/sshd_config": _SSHD_CONFIG.format(
            environment=" ".join(
                f'{name}="{value}"' for name, value in {"PATH": path, **ENVIRONMENT}.items()
            )
        ),
    }
    for box in boxes:
        for name, text in files.items():
            box.write(f"{FOLDER}/{name}", text, 0o600 if name in ("key", "shadow") else 0o644)
        run_tool(box, "sh", "-ec", _START, "sh", pwd.getpwuid(0).pw_dir)
    deadline = time.monotonic() + _SSHD_S
    while any(22 not in box.listening_ports for box in boxes):
        if time.monotonic() > deadline:
            logs = "".join(box.read(f"{FOLDER}/sshd.log") for box in boxes)
            raise TestbedError(f"sshd does not listen: {logs.strip()}", hint="Try sshd -t.")
        time.sleep(0.01)


def install_stand_in(hosts: Mapping[str, Box]) -> None:
    """Write an ``ssh`` that enters the other hosts of the same process namespace to each host."""
    lines = "\n".join(
        f"{name}) pid={box.pid} processors='{' '.join(box.on_processors)}' ;;"
        for name, box in hosts.items()
    )
    for box in hosts.values():
        run_tool(box, "mkdir", "-p", STAND_IN_FOLDER)
        box.write(f"{STAND_IN_FOLDER}/ssh", _STAND_IN.format(hosts=lines), 0o755)
