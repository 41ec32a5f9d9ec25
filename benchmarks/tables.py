"""Measures many strategies of several tasks: tables to learn from and to compare learners on.

Each task is a workload in a setting. Half of its strategies are spread evenly over the space (a
Sobol sequence), a fifth are the best by the cost model, a fifth are neighbours of the fastest ones,
and a tenth are measured again, so that the noise is known. Each table is an ordinary trace.

    python benchmarks/tables.py --output tables
    python benchmarks/tables.py --tasks ncf-100mbit,vgg-100mbit --trials 40 --output few

Takes about 8 minutes per task; a task whose trace is in the folder is not measured again. Needs
root for several hosts (``hvd_autosync.testing.Testbed``). Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from command_line import new_parser
from gain.tuners import wait_for
from gain.workloads import WORKLOADS
from survey.learner import SurveyLearner

from hvd_autosync.engine.job_line import parse_words, read_job
from hvd_autosync.engine.options import Options
from hvd_autosync.engine.tuning import tune
from hvd_autosync.reporting import progress_listener
from hvd_autosync.testing import Testbed
from hvd_autosync.traces import TraceStore, export_study

_HOSTS = 2


@dataclass(frozen=True)
class Survey:
    """One task.

    Attributes:
        workload: What is trained.
        mbit: Rate of the link of each of two hosts; ``None``: one host.
        slots: Ranks on each host, where there are two.
        allow: Lossy groups that are in the space, separated by commas.
    """

    workload: str
    mbit: int | None
    slots: int = 1
    allow: str = "order"

    @property
    def name(self) -> str:
        """Name of the table."""
        where = "loopback" if self.mbit is None else f"{self.mbit}mbit"
        layout = f"-2x{self.slots}" if self.slots > 1 else ""
        return f"{self.workload}-{where}{layout}" + ("-codec" if "codec" in self.allow else "")


SURVEYS = {
    survey.name: survey
    for survey in (
        Survey("ncf", 100),
        Survey("vgg", 100),
        Survey("resnet", 100),
        Survey("bert", 100),
        Survey("lm", 100),
        Survey("ncf", 1000),
        Survey("bert", 1000),
        Survey("vgg", 300),
        Survey("bert", 100, slots=2),
        Survey("ncf", 100, allow="codec,order"),
        Survey("vgg", 100, allow="codec,order"),
        Survey("digits", None),
    )
}


def measure(survey: Survey, trials: int, steps: int, warmup: int, folder: str) -> None:
    """Measure one task; runs on its first host."""
    on_one_host = survey.mbit is None
    layout = ["-np", "2"] if on_one_host else Testbed(_HOSTS).horovodrun_options(survey.slots)
    words = [*layout, "--gloo", *WORKLOADS[survey.workload].command]
    job, _ = read_job(parse_words(words), words)
    store = os.path.join(folder, f"{survey.name}.db")
    options = Options(
        trials=trials,
        steps=steps,
        warmup=warmup,
        allow=tuple(sorted(survey.allow.split(","))),
        store=store,
        reuse="never",
    )
    with closing(progress_listener()) as listener:
        study = tune(job, options, listener, learner=SurveyLearner(trials))
    path = os.path.join(folder, f"{survey.name}.jsonl.gz")
    export_study(TraceStore(store), study.study_id, path, anonymously=True)
    os.unlink(store)


def main() -> None:
    """Measures all tasks that were asked for, or one of them."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--tasks", default=",".join(SURVEYS), metavar="T,...", help="(default: %(default)s)")
    add("--trials", type=int, default=160, help="of each task (default: %(default)s)")
    add("--steps", type=int, default=20, help="measured in each trial (default: %(default)s)")
    add("--warmup", type=int, default=5, help="steps before those (default: %(default)s)")
    add("--output", default="tables", metavar="FOLDER", help="(default: %(default)s)")
    add("--survey", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.survey:
        survey = Survey(**json.loads(args.survey))
        measure(survey, args.trials, args.steps, args.warmup, args.output)
        return
    unknown = set(args.tasks.split(",")) - set(SURVEYS)
    if unknown:
        parser.error(f"unknown tasks: {', '.join(sorted(unknown))}; known: {', '.join(SURVEYS)}")
    folder = Path(args.output).absolute()
    folder.mkdir(exist_ok=True)
    sys.exit(sum(_run(SURVEYS[name], args, folder) for name in args.tasks.split(",")) != 0)


def _run(survey: Survey, args: argparse.Namespace, folder: Path) -> int:
    """Measure a task in a process of its own on its first host; 0 if that went well."""
    if (folder / f"{survey.name}.jsonl.gz").exists():
        print(f"{survey.name}: measured already", flush=True)
        return 0
    command = [
        sys.executable,
        os.path.abspath(__file__),
        "--survey",
        json.dumps(asdict(survey)),
        "--trials",
        str(args.trials),
        "--steps",
        str(args.steps),
        "--warmup",
        str(args.warmup),
        "--output",
        str(folder),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if survey.mbit is None:
        return wait_for(subprocess.Popen(command, env=environment))
    with Testbed(_HOSTS, float(survey.mbit)) as bed:
        return wait_for(bed.popen(command, env=environment))


if __name__ == "__main__":
    main()
