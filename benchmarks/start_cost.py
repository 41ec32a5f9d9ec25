"""What having this package installed costs where it has nothing to do.

Three questions, each answered by whole processes, timed in turn (A, B, A, B, ...) so that both
sides see the same machine:

- ``python``: any Python program, with ``hvd_autosync.pth`` in its environment and without. A
  second environment without it (``control``) shows how far equal things differ here.
- ``launcher``: ``horovodrun --version``, with the hook and with ``HVD_AUTOSYNC_DISABLE=1``.
- ``worker``: ``import torch, horovod.torch`` in a worker of a trial, and outside of one.

The last two need an environment with torch, Horovod and this package (``make setup``).

    .venv/bin/python benchmarks/start_cost.py --csv start_cost.csv
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
#: Aims in milliseconds of median extra time.
AIMS_MS = {"python": 1.0, "launcher": 100.0, "worker": 100.0}


@dataclass(frozen=True)
class Case:
    """One kind of process to start."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]

    def run(self) -> tuple[float, float]:
        """Start it once, wait for its end, and return (elapsed, processor) milliseconds."""
        with tempfile.TemporaryFile() as errors:
            start = time.perf_counter()
            process = subprocess.Popen(
                self.command,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            _, status, usage = os.wait4(process.pid, 0)
            elapsed_ms = 1e3 * (time.perf_counter() - start)
            process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode:
                errors.seek(0)
                text = errors.read().decode(errors="replace")
                sys.exit(f"error: {self.name}: {' '.join(self.command)} failed:\n{text}")
        return elapsed_ms, 1e3 * (usage.ru_utime + usage.ru_stime)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        question: What is asked; see the module.
        case: Which side.
        clock: ``elapsed``, or ``processor``: the time a processor worked on it, which other
            programs on the machine disturb less.
        runs: How often it was started.
        median_ms: Median of its times.
        extra_ms: Median of its differences to the question's first case, round by round.
        low_ms: Lower end of ``extra_ms`` with 95 % confidence.
        high_ms: Upper end.
        ratio: ``median_ms`` over that of the first case.
        aim_ms: What ``extra_ms`` should stay below.
    """

    question: str
    case: str
    clock: str
    runs: int
    median_ms: float
    extra_ms: float
    low_ms: float
    high_ms: float
    ratio: float
    aim_ms: float


def measure(question: str, cases: Sequence[Case], runs: int) -> list[Row]:
    """Run ``cases`` in turn, ``runs`` times each, after two rounds that are not counted."""
    samples: list[list[tuple[float, float]]] = [[] for _ in cases]
    for round_ in range(-2, runs):
        first = round_ % len(cases)
        for index in [*range(first, len(cases)), *range(first)]:
            sample = cases[index].run()
            if round_ >= 0:
                samples[index].append(sample)
        show_progress(question, round_ + 1, runs)
    rows = []
    for clock, name in enumerate(("elapsed", "processor")):
        base_ms = [sample[clock] for sample in samples[0]]
        for case, own in zip(cases, samples, strict=True):
            own_ms = [sample[clock] for sample in own]
            rows.append(compare(question, case.name, name, own_ms, base_ms))
    return rows


def compare(
    question: str, case: str, clock: str, own_ms: Sequence[float], base_ms: Sequence[float]
) -> Row:
    """The row of one case on one clock."""
    differences_ms = [own - base for own, base in zip(own_ms, base_ms, strict=True)]
    low_ms, high_ms = interval_of_median(differences_ms)
    return Row(
        question=question,
        case=case,
        clock=clock,
        runs=len(own_ms),
        median_ms=statistics.median(own_ms),
        extra_ms=statistics.median(differences_ms),
        low_ms=low_ms,
        high_ms=high_ms,
        ratio=statistics.median(own_ms) / statistics.median(base_ms),
        aim_ms=AIMS_MS[question],
    )


def interval_of_median(values: Sequence[float], samples: int = 1000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(values, k=len(values))) for _ in range(samples)
    )
    return medians[int(0.025 * samples)], medians[int(0.975 * samples)]


def show_progress(question: str, done: int, runs: int) -> None:
    """A line that is overwritten, where somebody looks."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{question}: {max(done, 0)}/{runs} " + "\n" * (done == runs))


def python_cases(folder: Path, environment: Mapping[str, str]) -> list[Case]:
    """Python's start in three fresh environments, one of them with the ``.pth`` file."""
    cases = []
    for name in ("without", "with", "control"):
        root = folder / name
        venv.create(root, symlinks=True)
        if name == "with":
            (site_packages,) = (root / "lib").glob("python*/site-packages")
            shutil.copy(CHECKOUT / "hvd_autosync.pth", site_packages)
            (site_packages / "hvd_autosync").symlink_to(CHECKOUT / "hvd_autosync")
        cases.append(Case(name, [str(root / "bin" / "python"), "-c", "pass"], environment))
    return cases


def launcher_cases(environment: Mapping[str, str]) -> list[Case]:
    """The launcher's start without the hook and with it."""
    command = [f"{sysconfig.get_path('scripts')}/horovodrun", "--version"]
    return [
        Case("without", command, {**environment, "HVD_AUTOSYNC_DISABLE": "1"}),
        Case("with", command, environment),
    ]


def worker_cases(environment: Mapping[str, str]) -> list[Case]:
    """The imports of a training script outside of a trial and in one."""
    from hvd_autosync.runtime.driver.environment import worker_environment
    from hvd_autosync.search_space import Strategy, TrialSpec

    # Without a rank a process is no worker, and imports nothing of this package.
    ranked = {**environment, "HOROVOD_RANK": "0"}
    trial = worker_environment(TrialSpec("start-cost", Strategy({})))
    imports = "import sys, torch, horovod.torch"
    active = "'hvd_autosync.runtime.install.activation' in sys.modules"
    return [
        Case("without", [sys.executable, "-c", f"{imports}; assert not {active}"], ranked),
        Case("with", [sys.executable, "-c", f"{imports}; assert {active}"], {**ranked, **trial}),
    ]


def print_table(rows: Sequence[Row]) -> None:
    """The rows as aligned text."""
    print(
        f"{'question':9} {'case':8} {'clock':10} {'runs':>4} {'median':>9} {'extra':>9} "
        f"{'95 % interval':>19} {'ratio':>6} {'aim':>7}   (ms)"
    )
    for row in rows:
        print(
            f"{row.question:9} {row.case:8} {row.clock:10} {row.runs:4} {row.median_ms:9.2f} "
            f"{row.extra_ms:+9.2f} {row.low_ms:+9.2f} {row.high_ms:+9.2f} "
            f"{row.ratio:6.3f} {row.aim_ms:7.1f}"
        )


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """The rows as CSV, one column for each field."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(AIMS_MS), action="append", help="one question")
    parser.add_argument("--runs", type=int, default=200, help="Python starts of each case (200)")
    parser.add_argument("--slow-runs", type=int, default=20, help="runs of the other cases (20)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write the table there")
    arguments = parser.parse_args()
    questions = arguments.only or list(AIMS_MS)
    # What is installed has been compiled; a checkout is compiled in the rounds that do not count.
    left_out = ("HVD_AUTOSYNC_", "PYTHONDONTWRITEBYTECODE")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
    rows: list[Row] = []
    if "python" in questions:
        with tempfile.TemporaryDirectory(prefix="start-cost-") as folder:
            cases = python_cases(Path(folder), environment)
            rows += measure("python", cases, arguments.runs)
    if "launcher" in questions:
        rows += measure("launcher", launcher_cases(environment), arguments.slow_runs)
    if "worker" in questions:
        rows += measure("worker", worker_cases(environment), arguments.slow_runs)
    print_table(rows)
    if arguments.csv:
        write_csv(arguments.csv, rows)


if __name__ == "__main__":
    main()
