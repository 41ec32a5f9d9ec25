"""Does every model on every network need a strategy of its own?

Takes the winners that ``tuning_gain.py`` has written down, and trains every workload under each of
them: its own, those of other workloads on the same network, and its own of other networks. Knobs of
a class of parameters that a model does not have are without effect there.

    python benchmarks/tuning_gain.py --settings 100mbit --workloads ncf,vgg,bert --output gain.csv
    python benchmarks/winners.py gain.csv --output winners.csv
    python benchmarks/winners.py --show winners.csv

Needs what the settings of the first program needed. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from command_line import new_parser
from gain.match import Plan, clock, matches, measure, read
from gain.tables import show
from gain.tuners import Budget, Contender, Found, run_trial, wait_for
from gain.workloads import WORKLOADS

from hvd_autosync.engine.job_line import parse_words, read_job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.search_space.exchange_plan import parameter_classes
from hvd_autosync.testing import Testbed

_OURS = "autosync"
_HOSTS = 2
#: Limit of the first run of a job, which nothing is known of.
_FIRST_S = 120.0


def winners(path: str, contender: str) -> dict[tuple[str, str], str]:
    """(setting, workload) -> the strategy that was found there, as JSON."""
    found = {}
    for match, rows in matches(read(path)).items():
        for row in rows:
            if row["contender"] == contender:
                found[match] = row["strategy"]
    return found


def contenders(
    setting: str, workload: str, found: dict[tuple[str, str], str]
) -> list[tuple[str, str]]:
    """Name and strategy of those whose winners this match compares, its own first."""
    chosen = [("its own", found[setting, workload])]
    for (other_setting, other), strategy in found.items():
        if other_setting == setting and other != workload:
            chosen.append((f"of {other}", strategy))
        elif other_setting != setting and other == workload:
            chosen.append((f"of {other_setting}", strategy))
    return [("default", "{}"), *chosen]


def play(plan: Plan, strategies: Sequence[tuple[str, str]]) -> None:
    """Profile the job, then measure it under every strategy; on the first host of its setting."""
    say = clock(time.monotonic(), f"{plan.setting} {plan.workload}")
    words = [*plan.options, *WORKLOADS[plan.workload].command]
    job, _ = read_job(parse_words(words), words)
    own = [Contender(name, Strategy.from_json(text), Budget()) for name, text in strategies]
    unknown = Found(own[0], SearchSpace(()), Limits(setup_s=_FIRST_S), {})
    default = run_trial(job, Strategy(), plan.length, unknown, profile=True)
    if default.profile is None or default.step_time is None:
        sys.exit(f"{plan.workload} cannot be measured: {default.reason}")
    known = Found(
        own[0], SearchSpace(()), Limits.from_default(default), parameter_classes(default.profile)
    )
    measure(plan, job, own, known, say)


def run(args: argparse.Namespace, found: dict[tuple[str, str], str], folder: str) -> int:
    """Play all matches between the winners that were found; the number of those that failed."""
    failed = 0
    for setting, workload in found:
        rate = None if setting == "loopback" else float(setting.removesuffix("mbit"))
        options = ["-np", "2"] if rate is None else Testbed(_HOSTS).horovodrun_options(args.slots)
        plan = Plan(
            setting,
            workload,
            (*options, "--gloo"),
            0,
            args.steps,
            args.warmup,
            args.rounds,
            0,
            "",
            os.path.abspath(args.output),
            folder,
        )
        match = json.dumps([plan.to_json(), contenders(setting, workload, found)])
        command = [sys.executable, os.path.abspath(__file__), "--match", match]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if rate is None:
            failed += wait_for(subprocess.Popen(command, env=environment)) != 0
            continue
        with Testbed(_HOSTS, rate) as bed:
            failed += wait_for(bed.popen(command, env=environment)) != 0
    return failed


def main() -> None:
    """Runs the benchmark, one match of it, or shows a former run."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("gain", nargs="?", help="CSV file that tuning_gain.py wrote")
    add("--contender", default=_OURS, help="whose winners (default: %(default)s)")
    add("--slots", type=int, default=1, help="ranks on each of two hosts (default: %(default)s)")
    add("--rounds", type=int, default=5, help="(default: %(default)s)")
    add("--steps", type=int, default=40, help="(default: %(default)s)")
    add("--warmup", type=int, default=10, help="(default: %(default)s)")
    add("--output", default="winners.csv", metavar="FILE", help="every measurement, as CSV")
    add("--show", metavar="FILE", help="print the tables of such a file again and end")
    add("--match", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.match:
        text, strategies = json.loads(args.match)
        play(Plan.from_json(text), strategies)
        return
    if args.show:
        show(read(args.show))
        return
    if args.gain is None:
        parser.error("name the file of tuning_gain.py, or --show")
    if os.path.exists(args.output):
        parser.error(f"{args.output} exists already; name another, or --show its measurements")
    if not (found := winners(args.gain, args.contender)):
        parser.error(f"{args.gain} has no winner of {args.contender}")
    with tempfile.TemporaryDirectory(prefix="winners-") as folder:
        failed = run(args, found, folder)
    if os.path.exists(args.output):
        show(read(args.output))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
