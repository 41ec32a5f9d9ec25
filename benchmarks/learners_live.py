"""What does each learner find in so many real trials? Ours in four forms beside its peers, live.

The task of a measured table is run again: its search space and its related tasks are the table's,
but every trial is a real job on hosts that this machine imitates. All contestants take turns trial
by trial, so that a disturbance meets them all; Horovod's autotune then gets as many steps as each
of them had. What each found, its fastest trial, is measured again in rounds, every time with a
fresh launch; only these measurements are in the table.

    python benchmarks/learners_live.py --table vgg-100mbit-codec
    python benchmarks/learners_live.py --contestants ours,optuna-tpe --trials 8 --rounds 3

Lossy strategies are judged by their speed alone here: the contest is one of learners. Twelve
contestants with 20 trials of 5 s take 25 minutes, and the rounds a quarter of an hour. Needs root;
leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from command_line import new_parser
from contest.contestants import CONTESTANTS, Ours
from gain.match import Plan, clock, measure, read
from gain.tables import show
from gain.tuners import (
    Budget,
    Contender,
    Found,
    Say,
    horovod_autotune,
    run_trial,
    steps_of,
    wait_for,
)
from gain.workloads import WORKLOADS
from learners import TABLES, emulators, installed, related_to
from tables import SURVEYS, Survey

from hvd_autosync.engine.job_line import parse_words, read_job
from hvd_autosync.launch.auto import AutoRunner
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.learner import Observation
from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.exchange_plan import parameter_classes
from hvd_autosync.testing import Testbed, testbed_missing

_HOSTS = 2
_PLAYERS = [name for name, entry in CONTESTANTS.items() if not entry.wrong_source]


def job_of(survey: Survey) -> Job:
    """The job that a table was measured of."""
    layout = ["-np", "2"]
    if survey.mbit is not None:
        layout = Testbed(_HOSTS).horovodrun_options(survey.slots)
    words = [*layout, "--gloo", *WORKLOADS[survey.workload].command]
    job, _ = read_job(parse_words(words), words)
    return job


def play(name: str, names: list[str], trials: int, plan: Plan, say: Say) -> None:
    """All games on one task, then the rounds; runs on its first host."""
    table, job = emulators(str(TABLES))[name], job_of(SURVEYS[name])
    sources = related_to(str(TABLES), name)
    players = {each: CONTESTANTS[each].start(table, sources, plan.seed) for each in names}
    default = Strategy()
    unknown = Found(Contender("", default), table.space, Limits(), {})
    say("the names of the model's parameters, which the table does not have")
    profile = run_trial(job, default, plan.length, unknown, profile=True).profile
    if profile is None:
        raise RuntimeError("the job ended before it could be described")
    classes = parameter_classes(profile)
    task = Found(Contender("", default), table.space, Limits(), classes)
    best: dict[str, Observation] = {}
    used, slowest = dict.fromkeys(names, Budget()), 0.0
    with closing(AutoRunner(job, say)) as runner:
        for trial in range(trials):
            for each, player in players.items():
                began = time.monotonic()
                strategy = player.ask() if trial else table.space.default
                result = run_trial(job, strategy, plan.length, task, runner)
                time_s = result.step_time
                if time_s is not None:
                    seen = Observation(strategy, time_s.mean_s, time_s.standard_error_s)
                    if each not in best or seen.log_step < best[each].log_step:
                        best[each] = seen
                    slowest = max(slowest, time_s.mean_s)
                elif isinstance(player, Ours):
                    seen = Observation(strategy, None)
                else:
                    seen = Observation(strategy, 2 * slowest)  # peers know no failures
                player.tell(seen)
                spent = used[each]
                used[each] = Budget(
                    trial + 1,
                    spent.steps + steps_of(result),
                    spent.minutes + (time.monotonic() - began) / 60,
                )
            say(f"trial {trial + 1} of {trials}: fastest so far " + _shown(best))
    contenders = [Contender("default", table.space.default)]
    contenders += [Contender(each, best[each].strategy, used[each]) for each in names]
    task = Found(contenders[-1], table.space, Limits(), classes)
    contenders.append(horovod_autotune(job, task, plan.length, Path(plan.folder)))
    measure(plan, job, contenders, task, say)


def _shown(best: dict[str, Observation]) -> str:
    return ", ".join(f"{n} {1e3 * (o.step_s or math.nan):.1f} ms" for n, o in best.items())


def main() -> None:
    """Plays the games, or shows former ones."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--table", default="vgg-100mbit-codec", choices=sorted(SURVEYS), help="whose task")
    add("--contestants", default=",".join(_PLAYERS), metavar="C,...", help="(default: all)")
    add("--trials", type=int, default=20, help="with the default's (default: %(default)s)")
    add("--steps", type=int, default=12, help="measured in each (default: %(default)s)")
    add("--warmup", type=int, default=4, help="steps before those (default: %(default)s)")
    add("--rounds", type=int, default=5, help="of the last measurement (default: %(default)s)")
    add("--seed", type=int, default=0, help="(default: %(default)s)")
    add("--output", default="learners_live.csv", metavar="FILE", help="(default: %(default)s)")
    add("--show", metavar="FILE", help="print the table of such a file again and end")
    add("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.show:
        show(read(args.show))
        return
    names = installed(args.contestants.split(","))
    if unknown := set(names) - set(_PLAYERS):
        parser.error(f"unknown: {', '.join(unknown)}; known are {', '.join(_PLAYERS)}")
    if args.table not in emulators(str(TABLES)):
        parser.error(f"{TABLES} has no table {args.table}; measure it with tables.py")
    if args.inside:
        plan = Plan.from_json(args.inside)
        play(args.table, names, args.trials, plan, clock(time.monotonic(), args.table))
        return
    if os.path.exists(args.output):
        parser.error(f"{args.output} exists already; name another, or --show it")
    survey = SURVEYS[args.table]
    if survey.mbit is not None and (missing := testbed_missing()):
        sys.exit(f"this task needs several hosts: {missing}")
    with tempfile.TemporaryDirectory(prefix="learners-live-") as folder:
        plan = Plan(
            args.table,
            survey.workload,
            (),
            args.trials,
            args.steps,
            args.warmup,
            args.rounds,
            args.seed,
            survey.allow,
            os.path.abspath(args.output),
            folder,
        )
        command = [
            sys.executable,
            os.path.abspath(__file__),
            *sys.argv[1:],
            "--inside",
            plan.to_json(),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with Testbed(_HOSTS, survey.mbit and float(survey.mbit)) as bed:
            status = wait_for(bed.popen(command, env=environment))
    if status:
        sys.exit(status)
    show(read(args.output))


if __name__ == "__main__":
    main()
