"""Measures many strategies of several tasks: tables to learn from and to compare learners on.

Each task is a workload in a setting. Half of its strategies are spread evenly over the space (a
Sobol sequence), a fifth are the best by the cost model, a fifth are neighbours of the fastest ones,
and a tenth are measured again, so that the noise is known. Each table is an ordinary trace. Trials
are live, in the steps of one training, except where lossy strategies have to be judged.

    python benchmarks/tables.py --output tables
    python benchmarks/tables.py --tasks ncf-100mbit,vgg-100mbit --trials 40 --output few

Takes 6 to 13 minutes per task, more where trials are launched; a task whose trace is in the folder
is not measured again. Needs root for several hosts (``hvd_autosync.testing.Testbed``). Leave the
machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from command_line import check_names, need_hosts, new_parser
from ending import end_training
from gain.workloads import WORKLOADS

from hvd_autosync.testing import Testbed
from hvd_autosync.traces import StudyStatus, TraceStore, export_study

_HOSTS = 2
_BENCHMARKS = Path(__file__).resolve().parent
_LOOK_EVERY_S = 2.0


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
    allow: str = ""

    @property
    def name(self) -> str:
        """Name of the table."""
        where = "loopback" if self.mbit is None else f"{self.mbit}mbit"
        layout = f"-2x{self.slots}" if self.slots > 1 else ""
        return f"{self.workload}-{where}{layout}" + ("-codec" if "codec" in self.allow else "")


SURVEYS = {
    survey.name: survey
    for survey in (
        Survey("vgg", 100),
        Survey("ncf", 100),
        Survey("digits", 100),
        Survey("bert", 100),
        Survey("lm", 100),
        Survey("resnet", 100),
        Survey("vgg-autocast", 100),
        Survey("bert-autocast", 100),
        Survey("lm-autocast", 100),
        Survey("vgg", 300),
        Survey("ncf", 1000),
        Survey("digits", 300),
        Survey("bert", 1000),
        Survey("bert", 100, slots=2),
        Survey("digits", None),
        Survey("vgg", 100, allow="codec"),
        Survey("ncf", 100, allow="codec"),
    )
}


def measure(survey: Survey, args: argparse.Namespace, folder: Path) -> bool:
    """Measure a task, unless the folder has its trace; return whether that went well."""
    path = folder / f"{survey.name}.jsonl.gz"
    if path.exists():
        print(f"{survey.name}: measured already", flush=True)
        return True
    store = folder / f"{survey.name}.db"
    store.unlink(missing_ok=True)
    if survey.mbit is None:
        _run(survey, args, store, None)
    else:
        with Testbed(_HOSTS, float(survey.mbit)) as bed:
            _run(survey, args, store, bed)
    if (study_id := _finished(store)) is None:
        print(f"{survey.name}: not finished; what was measured is in {store}", file=sys.stderr)
        return False
    export_study(TraceStore(store), study_id, path, anonymously=True)
    store.unlink()
    return True


def _run(survey: Survey, args: argparse.Namespace, store: Path, bed: Testbed | None) -> None:
    """Run the job of a task until its study has finished, or it ends."""
    ways = {"mode": "launched", "allow": survey.allow} if survey.allow else {"mode": "live"}
    options = ways | {
        "trials": args.trials,
        "steps": args.steps,
        "warmup": args.warmup,
        "expected-hours": 1000,
        "store": store,
        "reuse": "never",
        "transfer": "never",
    }
    layout = ["-np", "2"] if bed is None else bed.horovodrun_options(survey.slots)
    command = [
        str(Path(sys.executable).parent / "horovodrun"),
        *layout,
        "--gloo",
        "--autosync",
        *(f"--autosync-{name}={value}" for name, value in options.items()),
        *(["--autosync-tune-only"] if survey.allow else []),
        *WORKLOADS[survey.workload].command,
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HVD_AUTOSYNC_EXTENSIONS": str(_BENCHMARKS / "survey" / "extension.py"),
        "HVD_AUTOSYNC_TRIALS": str(args.trials),
        "PYTHONPATH": str(_BENCHMARKS),
    }
    launch = subprocess.Popen if bed is None else bed.popen
    job = launch(command, env=environment, stdin=subprocess.DEVNULL)
    try:
        while job.poll() is None and _finished(store) is None:
            time.sleep(_LOOK_EVERY_S)
    finally:
        if job.poll() is None:
            end_training(job)


def _finished(store: Path) -> str | None:
    """The finished study of a store; ``None``: there is none yet."""
    if not store.exists():
        return None
    studies = TraceStore(store).studies()
    done = (each.study_id for each in studies if each.status is StudyStatus.FINISHED)
    return next(done, None)


def main() -> None:
    """Measures all tasks that were asked for."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--tasks", default=",".join(SURVEYS), metavar="T,...", help="(default: %(default)s)")
    add("--trials", type=int, default=160, help="of each task (default: %(default)s)")
    add("--steps", type=int, default=20, help="measured in each trial (default: %(default)s)")
    add("--warmup", type=int, default=5, help="steps before those (default: %(default)s)")
    add("--output", default="tables", metavar="FOLDER", help="(default: %(default)s)")
    args = parser.parse_args()
    names = check_names(parser, "tasks", args.tasks, list(SURVEYS))
    need_hosts()
    folder = Path(args.output).absolute()
    folder.mkdir(exist_ok=True)
    failed = [name for name in names if not measure(SURVEYS[name], args, folder)]
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
