"""Are bad strategies refused in tuning and caught in a training, and good ones left alone?

Ten bad and ten good lossy strategies are planted in the training of a language model on two local
ranks (``examples/train_lm.py``). Each is judged as a study judges it where nothing gets faster, by
pairs of trials with the default; then it is forced on a whole training by ``hvd-autosync run
--strategy``, whose guard knows these trials of the default from the store. What a codec leaves out
is forgotten instead of added to the next gradient where a name says "no feedback"; that is planted
in the codec itself.

    python benchmarks/guarding.py
    python benchmarks/guarding.py --only "H = 500;bf16" --output guarding.csv
    python benchmarks/guarding.py --show guarding.csv

About 15 minutes; leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import runpy
import subprocess
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import new_parser
from rich.console import Console
from rich.table import Table

from hvd_autosync.launch.auto import AutoRunner
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.options import Options
from hvd_autosync.quality import FIRST_SEEDS, SEEDS, QualityCheck, QualityTrial, Verdict, losses_of
from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    ModelProfile,
    Resources,
    Strategy,
    Task,
    TrialResult,
    TrialSpec,
    Value,
    build_space,
)
from hvd_autosync.search_space.strategy_file import strategy_text
from hvd_autosync.traces import StudyStatus, TraceStore
from hvd_autosync.tuning import tuning_key

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train_lm.py"
#: Two passes of 700 steps: a round of 500 steps fits into one.
_ARGUMENTS = (
    "--width 64 --depth 2 --heads 2 --context 32 --batch-size 4 --epochs 2 --steps-per-epoch 700"
)
_RANKS, _STEPS = 2, 200
_EVERYTHING = {"large": ("*",)}
_COLUMNS = ("strategy", "kind", "verdict", "loss", "default_loss", "allowed", "reason",
            "caught_at_step", "bits_per_byte")  # fmt: skip


@dataclass(frozen=True)
class Planted:
    """A strategy with what is known of it.

    Attributes:
        knobs: Its knobs; the class ``large`` is all parameters.
        flaw: ``forget`` what codecs leave out; ``tiny``: that, and a tenth of the ratio.
    """

    knobs: dict[str, Value]
    flaw: str = ""


def _large(codec: str, **more: Value) -> dict[str, Value]:
    return {"large_codec": codec, **{f"large_{name}": value for name, value in more.items()}}


GOOD = {
    "fp16": Planted(_large("fp16")),
    "bf16": Planted(_large("bf16")),
    "int8": Planted(_large("int8")),
    "int8 in 4 buckets": Planted({"buckets": 4, **_large("int8")}),
    "bf16 in 4 slices": Planted(_large("bf16", slices=4)),
    "PowerSGD 16": Planted(_large("powersgd", rank=16)),
    "PowerSGD 32": Planted(_large("powersgd", rank=32)),
    "H = 2": Planted({"local_steps": 2}),
    "H = 4": Planted({"local_steps": 4}),
    "H = 2, bf16": Planted({"local_steps": 2, **_large("bf16")}),
}
#: With feedback, or few local steps: as good in a long training, but perhaps not in this short one.
ARGUABLE = {
    "top-k 25 %": Planted(_large("topk", ratio=0.25)),
    "top-k 10 %": Planted(_large("topk", ratio=0.1)),
    "H = 8": Planted({"local_steps": 8}),
}
BAD = {
    "top-k 0.01 %, no feedback": Planted(_large("topk", ratio=0.001), "tiny"),
    "top-k 0.1 %, no feedback": Planted(_large("topk", ratio=0.001), "forget"),
    "top-k 0.5 %, no feedback": Planted(_large("topk", ratio=0.005), "forget"),
    "PowerSGD 1, no feedback": Planted(_large("powersgd", rank=1), "forget"),
    "PowerSGD 2, no feedback": Planted(_large("powersgd", rank=2), "forget"),
    "H = 500": Planted({"local_steps": 500}),
    "H = 250": Planted({"local_steps": 250}),
    "H = 500, top-k 0.1 %": Planted({"local_steps": 500, **_large("topk", ratio=0.001)}),
    "H = 16, top-k 0.01 %, no feedback": Planted(
        {"local_steps": 16, **_large("topk", ratio=0.001)}, "tiny"
    ),
    "H = 8, PowerSGD 1, no feedback": Planted(
        {"local_steps": 8, **_large("powersgd", rank=1)}, "forget"
    ),
}  # fmt: skip


_KINDS = {"good": GOOD, "arguable": ARGUABLE, "bad": BAD}


def train(flaw: str) -> None:
    """A rank's part: the example, with a flaw in its codecs."""
    from hvd_autosync.runtime import codecs

    def forgetting(cls: Any) -> None:
        call = cls.__call__

        def without(self: Any, *args: Any) -> Any:
            self._left_out.zero_()
            return call(self, *args)

        cls.__call__ = without

    if flaw:
        forgetting(codecs.TopK)
        forgetting(codecs.PowerSGD)
    if flaw == "tiny":
        make = codecs.TopK.__init__

        def make_tiny(self: Any, size: int, like: Any, ranks: int, ratio: float) -> None:
            make(self, size, like, ranks, ratio / 10)

        codecs.TopK.__init__ = make_tiny  # type: ignore[method-assign]
    sys.argv = [str(_EXAMPLE), *_ARGUMENTS.split()]
    sys.path.insert(0, str(_EXAMPLE.parent))
    runpy.run_path(str(_EXAMPLE), run_name="__main__")


class Bench:
    """The job of one flaw, its trials of the default, and a store that has them.

    Args:
        flaw: As of :class:`Planted`.
        folder: Where to keep the store and strategy files.
    """

    def __init__(self, flaw: str, folder: Path) -> None:
        self.store = folder / f"{flaw or 'none'}.db"
        self._folder = folder
        script = [sys.executable, str(Path(__file__).resolve()), "--train", flaw or "none"]
        options = ("-np", str(_RANKS), "--gloo")
        self.job = Job(options, tuple(script), (Host("localhost", _RANKS),), "gloo")
        self._trials: list[QualityTrial] = []
        self._runner = AutoRunner(self.job, lambda text: None, cold=True)
        store = TraceStore(str(self.store))
        study = store.create_study(
            job_key=tuning_key(self.job, Options(), {}), command=self.job.display(),
            settings={}, versions={},
        )
        resources = Resources(self.job.hosts, "cpu", HorovodBuild("", gloo=True, mpi=False))
        task = Task(ModelProfile(), resources)
        space = build_space(task.model, resources)
        store.describe_task(study.study_id, task, space)
        for seed in SEEDS[:FIRST_SEEDS]:
            result = self._train_default(seed)
            number = store.ask(study.study_id, space.default, "quality", {"seed": seed})
            store.tell(study.study_id, number, result)
        store.finish(study.study_id, StudyStatus.FINISHED, {}, space.default)

    def _train_default(self, seed: int) -> TrialResult:
        """A trial of the default, which all strategies are compared with."""
        result = self._run(Strategy(), _STEPS, seed)
        self._trials.append(QualityTrial(Strategy(), seed, losses_of(result)))
        return result

    def judge(self, strategy: Strategy) -> Verdict:
        """What a study would say of ``strategy``."""
        length = int(strategy.get("local_steps", 1))
        own: list[QualityTrial] = []

        def check() -> QualityCheck:
            trials = [*self._trials, *own]
            return QualityCheck(Strategy(), [strategy], trials, lambda *_: strategy)

        while (wanted := check().next()) is not None and not check().verdicts():
            seed = wanted[1]
            if wanted[0] == Strategy():
                self._train_default(seed)
                continue
            result = self._run(strategy, max(_STEPS, int(2.2 * length)), seed)
            own.append(QualityTrial(strategy, seed, losses_of(result), False, length))
        (verdict,) = check().verdicts()
        return verdict

    def force(self, strategy: Strategy) -> tuple[str, str]:
        """Run the whole training: the step at which the guard ended it, and bits per byte."""
        file = self._folder / f"{uuid.uuid4().hex}.toml"
        file.write_text(strategy_text(strategy, _EVERYTHING))
        run = [os.path.join(os.path.dirname(sys.executable), "hvd-autosync"), "run", "--strategy",
               str(file), *self.job.options, "--", *self.job.command]  # fmt: skip
        done = subprocess.run(
            run, capture_output=True, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HVD_AUTOSYNC_STORE": str(self.store)},
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"{dict(strategy)} ended with status {done.returncode}:\n{done.stderr}")
        caught = re.search(r"has left its band at step (\d+)", done.stderr)
        bits = re.findall(r"([\d.]+) bits", done.stdout)
        return caught[1] if caught else "", bits[-1] if bits else ""

    def _run(self, strategy: Strategy, steps: int, seed: int) -> TrialResult:
        spec = TrialSpec(
            uuid.uuid4().hex, strategy, warmup_steps=5, measured_steps=steps - 5, seed=seed,
            classes=_EVERYTHING,
        )  # fmt: skip
        result = self._runner.run(spec, Limits(), lambda progress: None)
        if not result.status.measured:
            print(f"{dict(strategy)}: {result.reason}", file=sys.stderr)
        return result


def show(output: str) -> None:
    """Print the tables of a file of measurements."""
    with open(output) as file:
        rows = list(csv.DictReader(file))
    table = Table(title="planted strategies: in tuning, and forced on a whole training")
    for column in ("strategy", "", "in tuning", "loss", "default's", "allowed above",
                   "guard at step", "bits per byte"):  # fmt: skip
        table.add_column(column)
    for row in rows:
        table.add_row(
            row["strategy"], row["kind"], row["verdict"],
            *(f"{float(row[name]):.3f}" for name in ("loss", "default_loss", "allowed")),
            row["caught_at_step"] or "-", row["bits_per_byte"],
        )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    for kind in _KINDS:
        own = [row for row in rows if row["kind"] == kind]
        refused = sum(row["verdict"] not in ("admitted", "may be used") for row in own)
        caught = sum(bool(row["caught_at_step"]) for row in own)
        console.print(f"{kind}: {refused} of {len(own)} refused, {caught} ended by the guard")


def main() -> None:
    """Runs the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--only", default="", metavar="S;...", help="of the strategies, these (default: all)")
    add("--output", default="guarding.csv", metavar="FILE", help="(default: %(default)s)")
    add("--show", metavar="FILE", help="print the table of such a file again and end")
    add("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train.replace("none", ""))
        return
    if args.show:
        show(args.show)
        return
    if os.path.exists(args.output):
        parser.error(f"{args.output} exists already; name another, or --show it")
    os.environ["OMP_NUM_THREADS"] = "1"
    with open(args.output, "w", newline="") as file, tempfile.TemporaryDirectory() as folder:
        writer = csv.writer(file)
        writer.writerow(_COLUMNS)
        benches: dict[str, Bench] = {}
        every = [(kind, *each) for kind, some in _KINDS.items() for each in some.items()]
        for kind, name, planted in [("default", "default", Planted({})), *every]:
            if args.only and name not in args.only.split(";"):
                continue
            if planted.flaw not in benches:
                benches[planted.flaw] = Bench(planted.flaw, Path(folder))
            bench, strategy = benches[planted.flaw], Strategy(planted.knobs)
            verdict = bench.judge(strategy)
            row = (
                name, kind, verdict.outcome.value,
                verdict.loss, verdict.default_loss, verdict.allowed, verdict.reason,
                *bench.force(strategy),
            )  # fmt: skip
            print(*row, sep=" | ", flush=True)
            writer.writerow(row)
            file.flush()
    show(args.output)


if __name__ == "__main__":
    main()
