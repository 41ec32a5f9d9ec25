"""Trains the digits example between two hosts that this machine emulates, and tunes it meanwhile.

    python tools/demo.py [OPTION OF THE FLAG ...]

Between two hosts there is a gain to find, on one machine alone mostly not. As root the hosts are a
test bed with sshd; other users make them in a user namespace, in which they count as root. Where
neither is possible, the job runs on two ranks of this machine.

Ctrl-C is for the job, which it ends. The hosts end with the job, or with this program.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import NoReturn

from hvd_autosync.testing import Testbed, TestbedError, run_as_namespace_root, testbed_missing

RATE_MBIT = 100
SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "train_digits.py"
#: Trials are shorter than the flag's: the whole demonstration takes less than two minutes.
TUNING = ["--autosync", *"--autosync-trials 8 --autosync-warmup 3 --autosync-steps 10".split()]
#: Long enough to go on under the winner for as long as the tuning took. Tests choose fewer epochs.
TRAINING = ["--hidden", "1024", "--epochs", os.environ.get("DEMO_EPOCHS", "40")]
#: The argument with which this program runs itself in a user namespace.
INSIDE = "--in-user-namespace"
REAL = "horovodrun -np 2 -H a:1,b:1 --autosync python train.py"


class Way(Enum):
    """Where the two ranks run."""

    ROOT = "as root"
    USER = "in a user namespace"
    LOOPBACK = "on this machine"


def choose(root_missing: str | None, user_missing: str | None) -> Way:
    """Return the way that is possible here.

    Args:
        root_missing: Why this user cannot make hosts as root; ``None``: it can.
        user_missing: Why it cannot make them in a user namespace; ``None``: it can.
    """
    if root_missing is None:
        return Way.ROOT
    return Way.USER if user_missing is None else Way.LOOPBACK


def introduction(way: Way, root_missing: str | None, user_missing: str | None) -> str:
    """Return what is emulated, and why not more."""
    if way is not Way.LOOPBACK:
        return f"two hosts on this machine ({way.value}), joined at {RATE_MBIT} Mbit/s"
    reasons = dict.fromkeys(filter(None, (user_missing, root_missing)))
    text = (
        f"two ranks on this machine, because it cannot emulate hosts: {'; '.join(reasons)}\n"
        "demo: without a network between the ranks this shows how a job is tuned; there is little "
        "or nothing to gain"
    )
    if any("not installed" in reason for reason in reasons):
        text += "\ndemo: on Debian `make test-deps`, as root, installs what is missing"
    return text


def command_line(options: Sequence[str], extra: Sequence[str]) -> list[str]:
    """Return the job under the flag.

    Args:
        options: Options that say where the ranks run.
        extra: Further options of the flag, which take precedence.
    """
    script = ["python", os.path.relpath(SCRIPT), *TRAINING]
    return ["horovodrun", *options, "--gloo", *TUNING, *extra, *script]


def run_on_testbed(extra: Sequence[str], *, ssh: bool) -> int:
    """Run the job on two new hosts; return its exit status."""
    with Testbed(2, RATE_MBIT, ssh=ssh) as bed:
        command = command_line(bed.horovodrun_options(), extra)
        _show(command)
        return int(bed.run(command).returncode)


def run_here(extra: Sequence[str]) -> int:
    """Run the job on two ranks of this machine; return its exit status."""
    command = command_line(["-np", "2"], extra)
    _show(command)
    return subprocess.run(command).returncode


def main(arguments: Sequence[str]) -> int:
    """Run the demonstration; return its exit status."""
    if arguments[:1] == [INSIDE]:
        # A handler, unlike SIG_IGN, is not inherited: the job has Ctrl-C for itself.
        signal.signal(signal.SIGINT, _leave_to_the_job)
        return run_on_testbed(arguments[1:], ssh=False)
    signal.signal(signal.SIGTERM, _end)
    root_missing = testbed_missing()
    user_missing = root_missing and testbed_missing(ssh=False)
    way = choose(root_missing, user_missing)
    print(f"demo: {introduction(way, root_missing, user_missing)}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # horovodrun and python of this environment
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if way is Way.USER:
        # What stands between this program and the job must outlive Ctrl-C as well.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        status = run_as_namespace_root([sys.executable, __file__, INSIDE, *arguments])
    else:
        signal.signal(signal.SIGINT, _leave_to_the_job)
        status = run_on_testbed(arguments, ssh=True) if way is Way.ROOT else run_here(arguments)
    if status == 0:
        print(f"demo: on a cluster, with two hosts a and b: {REAL}")
    return status if status >= 0 else 128 - status


def _show(command: Sequence[str]) -> None:
    print(f"demo: $ {shlex.join(command)}", flush=True)


def _leave_to_the_job(number: int, frame: FrameType | None) -> None:
    """The terminal sends Ctrl-C to the job too, which decides what it means."""


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        try:
            sys.exit(main(sys.argv[1:]))
        except TestbedError as error:
            sys.exit(f"demo: {error}")
