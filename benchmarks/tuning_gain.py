"""How much faster does training get, by which tuner, and what does the tuning cost?

Every tuner tunes the same job: a recipe from Horovod's documentation (which costs nothing),
Horovod's own autotune, random search, and ``horovodrun --autosync``, whose number of steps the
others get too. Then all their strategies and Horovod's default are measured again, in turn, round
by round, with fresh launches of the job. What the tuners themselves saw does not count.

    python benchmarks/tuning_gain.py --quick
    python benchmarks/tuning_gain.py --output gain.csv

Two ranks train on one host, or one (``--slots``) on each of two hosts made of this machine (see
``hvd_autosync.testing.Testbed``; needs root) whose links have the rate that the setting names.
Leave the machine alone meanwhile: the tables show what is measured, disturbances included.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from command_line import rates_of
from gain.match import Plan, clock, is_finished, matches, play, read
from gain.tables import show
from gain.tuners import wait_for
from gain.workloads import WORKLOADS

from hvd_autosync.testing import Testbed, testbed_missing

_HOSTS = 2
_FULL = {
    "settings": "loopback,100mbit,300mbit",
    "workloads": "resnet,bert,digits",
    "trials": "20",
    "steps": "40",
    "warmup": "10",
    "rounds": "5",
}
_QUICK = {
    "settings": "loopback,100mbit",
    "workloads": "resnet",
    "trials": "6",
    "steps": "20",
    "warmup": "5",
    "rounds": "2",
}
_EPILOG = f"""
workloads:
{chr(10).join(f"  {name:17}{workload.help}" for name, workload in WORKLOADS.items())}

columns of the tables:
  step ms        median step time, the median of all rounds
  of rounds      least and greatest median of a round
  speedup        the default's step time over the strategy's, the geometric mean of all rounds;
                 above 1 it is faster than the default
  90 % interval  of the speedup, from the spread between rounds and within them
  bytes          that leave a host, as a share of the default's
  bound          the speedup if ranks waited that share of what they wait under the default
  trials, steps, min   what finding the strategy cost

A match launches the job about 3 x trials + 5 x rounds times, which takes 15 to 30 minutes with
the usual settings; the table appears when all matches have been played, or by --show meanwhile.
An existing output file is continued with the same options: matches that it has whole are left out,
one that was broken off is played again.
"""


def _workloads(text: str) -> list[str]:
    for word in text.split(","):
        if word not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(WORKLOADS)}")
    return text.split(",")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


_PARSERS: dict[str, Callable[[str], Any]] = {
    "settings": rates_of,
    "workloads": _workloads,
    "trials": _count,
    "steps": _count,
    "warmup": _count,
    "rounds": _count,
}


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    about, _, usage = (__doc__ or "").partition("\n\n    python")
    parser = argparse.ArgumentParser(
        description=about,
        epilog=f"examples:\n    python{usage}{_EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    def add(name: str, metavar: str, text: str) -> None:
        usual = f" (default: {_FULL[name]}; quick: {_QUICK[name]})"
        parser.add_argument(f"--{name}", type=_PARSERS[name], metavar=metavar, help=text + usual)

    add("settings", "S,...", "loopback, or rates of links such as 100mbit")
    add("workloads", "W,...", "what is trained, see below")
    add("trials", "N", "most trials of --autosync before it confirms what it found")
    add("steps", "N", "steps measured in each trial and in each final measurement")
    add("warmup", "N", "steps before those")
    add("rounds", "N", "rounds of the final measurement")
    more = parser.add_argument
    more(
        "--slots",
        type=_count,
        default=1,
        metavar="N",
        help="ranks on each host, where there are several (default: 1)",
    )
    more("--seed", type=int, default=0, help="of all tuners (default: 0)")
    more(
        "--controller",
        choices=("gloo", "mpi", "any"),
        default="gloo",
        help="option for horovodrun; any: none, so that --autosync may choose",
    )
    more(
        "--allow",
        default="",
        metavar="GROUP,...",
        help="tune with --autosync-allow GROUP too, as one more contender",
    )
    more("--quick", action="store_true", help="a small run that only shows that all works")
    more("--output", metavar="FILE", help="keep every measurement as CSV")
    more("--keep", metavar="FOLDER", help="keep the tuners' traces and logs in this new folder")
    more("--show", metavar="FILE", help="print the tables of such a file again and end")
    more("--match", metavar="PLAN", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, usual in (_QUICK if args.quick else _FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, _PARSERS[name](usual))
    if args.keep and os.path.exists(args.keep):
        parser.error(f"{args.keep} exists already; name another")
    return args


def run_match(plan: Plan, rate_mbit: float | None) -> int:
    """Play one match in a process of its own, where its setting is; its exit status."""
    command = [sys.executable, os.path.abspath(__file__), "--match", plan.to_json()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if rate_mbit is None:
        return wait_for(subprocess.Popen(command, env=environment))
    with Testbed(_HOSTS, rate_mbit) as bed:
        return wait_for(bed.popen(command, env=environment))


def make_plan(args: argparse.Namespace, setting: str, workload: str, folder: Path) -> Plan:
    """The plan of one match."""
    on_one_host = args.settings[setting] is None
    options = ["-np", "2"] if on_one_host else Testbed(_HOSTS).horovodrun_options(args.slots)
    if args.controller != "any":
        options.append(f"--{args.controller}")
    own = folder / f"{setting}-{workload}"
    own.mkdir()
    return Plan(
        setting,
        workload,
        tuple(options),
        args.trials,
        args.steps,
        args.warmup,
        args.rounds,
        args.seed,
        args.allow,
        args.output or str(folder / "gain.csv"),
        str(own),
    )


def run_all(args: argparse.Namespace, folder: Path) -> int:
    """Play all matches, print their tables, and return the number of matches that failed."""
    missing = testbed_missing()
    known = matches(read(args.output)) if args.output and os.path.exists(args.output) else {}
    began, failed = time.monotonic(), 0
    for setting, rate_mbit in args.settings.items():
        if rate_mbit is not None and missing is not None:
            print(f"{setting} is left out: {missing}", flush=True)
            failed += len(args.workloads)
            continue
        for workload in args.workloads:
            plan = make_plan(args, setting, workload, folder)
            if is_finished(known.get((setting, workload), []), plan):
                print(f"{setting} {workload}: in {args.output} already", flush=True)
                continue
            status = run_match(plan, rate_mbit)
            say = clock(began, f"{setting} {workload}")
            say("done" if status == 0 else f"failed with status {status}")
            failed += status != 0
    output = args.output or str(folder / "gain.csv")
    if os.path.exists(output):
        show(read(output))
    return failed


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Unwinds, so that the job and its hosts are ended too."""
    sys.exit(f"stopped by {signal.Signals(number).name}")


def main() -> None:
    """Runs the benchmark, one match of it, or shows a former run."""
    args = parse_args()
    signal.signal(signal.SIGTERM, _stop)
    if args.show:
        show(read(args.show))
    elif args.match:
        plan = Plan.from_json(args.match)
        play(plan, clock(time.monotonic(), f"{plan.setting} {plan.workload}"))
    else:
        with tempfile.TemporaryDirectory(prefix="tuning-gain-") as passing:
            folder = Path(args.keep or passing)
            folder.mkdir(exist_ok=args.keep is None)
            sys.exit(1 if run_all(args, folder) else 0)


if __name__ == "__main__":
    main()
