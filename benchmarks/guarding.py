"""Are bad strategies refused in tuning and caught in a training, and good ones left alone?

Twenty strategies that should be as good as the default and twenty that should not are planted in
four trainings on two local ranks (``planted/``), and in one of random labels, where nothing can be
shown. What a strategy is is measured: with five seeds it and the default train to the end, and by
the mean difference of their losses on held-out data it is good (at most half a tolerance worse),
bad (more than two), or neither; the tolerance is 1 % of what the default's has fallen.

Each is judged as a study judges it where nothing gets faster, by pairs of trials with the default
that have the same seed and data; three times, with other seeds. Then it is forced on a whole
training with the guard, which knows trials of the default.

    python benchmarks/guarding.py --jobs lm --only "H = 500;bf16"
    python benchmarks/guarding.py --output guarding.csv
    python benchmarks/guarding.py --show guarding.csv

A file that exists already is gone on with. All of it takes hours, for 20 minutes per job and
judgement; other load does no harm, for no time is measured.
"""

from __future__ import annotations

import csv
import math
import os
import statistics
import subprocess
import sys
from functools import cached_property
from typing import Any

from command_line import add_table, check_names, commit_now, new_parser, open_table, own_part, parse
from planted.strategies import ALL, KINDS, Planted, flawed
from rich.console import Console
from rich.table import Table

from hvd_autosync.search_space import Strategy
from hvd_autosync.search_space.exchange_plan import matrix_shape
from hvd_autosync.search_space.trial import LossPrediction
from hvd_autosync.study.loss_prediction import predict_losses
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.quality import QualityCheck
from hvd_autosync.study.quality_trial import FIRST_SEEDS, QualityTrial
from hvd_autosync.study.verdict import Verdict

_COLUMNS = (
    "commit",
    "job",
    "strategy",
    "seed",
    "steps",
    "guarded",
    "caught_at",
    "held_out_before",
    "held_out",
    "losses",
    "in_round",
)
_DEFAULT = "default"
_JOBS = ("digits", "lm", "ncf", "autocast", "random labels")
#: Where nothing is learnt a single judgement tells.
_NOTHING_LEARNT = "random labels"
_TRIAL_STEPS = 200
_METRIC_SEEDS = range(1, 6)
_JUDGEMENTS = 3
#: Seeds of one judgement are its own.
_APART = 100
_TOLERANCE = 0.01
_GOOD_UP_TO, _BAD_FROM = 0.5, 2.0
#: Of what the default's loss on held-out data has fallen: what a guarded training may lose.
_GUARDED_MAY_LOSE = 0.03

Row = dict[str, Any]
Key = tuple[str, int, bool]


class Known:
    """What was measured of one job.

    Args:
        rows: Of the file.
        job: Its name.
    """

    def __init__(self, rows: list[Row], job: str) -> None:
        self._job = job
        self._rows: dict[Key, Row] = {}
        self._trials: dict[tuple[str, int], list[Row]] = {}
        for row in rows:
            if row["job"] == job:
                self.add(row)

    def add(self, row: Row) -> None:
        """One more; the longest training of a strategy and seed counts."""
        key = (row["strategy"], int(row["seed"]), row["guarded"] == "1")
        if key not in self._rows or int(self._rows[key]["steps"]) <= int(row["steps"]):
            self._rows[key] = row
        if not key[2] and int(row["steps"]) >= _TRIAL_STEPS:
            self._trials.setdefault(key[:2], []).append(row)

    def row(self, name: str, seed: int, steps: int, guarded: bool = False) -> Row | None:
        """The training of so many steps, or more."""
        row = self._rows.get((name, seed, guarded))
        return row if row is not None and int(row["steps"]) >= steps else None

    def losses(self, name: str, seed: int) -> tuple[float, ...] | None:
        """Losses of the steps of a trial."""
        row = self.row(name, seed, _TRIAL_STEPS)
        return None if row is None else _losses(row)

    def check(self, name: str, judgement: int) -> QualityCheck:
        """The test of one strategy, as far as its trials go."""
        default = Strategy()
        knobs = Strategy(ALL[name].knobs)
        trials = []
        for own, strategy in ((_DEFAULT, default), (name, knobs)):
            local = "local_steps" in strategy
            for seed in range(1, _APART):
                for row in self._trials.get((own, judgement * _APART + seed), ()):
                    # Of a whole training the steps of a trial count.
                    steps = _TRIAL_STEPS if row["held_out"] else int(row["steps"])
                    trial = QualityTrial(
                        strategy,
                        seed,
                        steps,
                        _losses(row),
                        local_steps=local,
                        in_round=frozenset(map(int, row["in_round"].split())),
                    )
                    trials.append(trial)
        return QualityCheck(
            default, [knobs], trials, lambda *_: knobs, steps=_TRIAL_STEPS, tolerance=_TOLERANCE
        )

    def verdict(self, name: str, judgement: int) -> Verdict | None:
        """The verdict of a study; ``None`` while it needs more trials."""
        check = self.check(name, judgement)
        verdicts = check.verdicts() if check.next() is None else []
        return verdicts[0] if verdicts else None

    @cached_property
    def fall(self) -> float:
        """What the default's loss on held-out data has fallen."""
        rows = [self._rows[_DEFAULT, seed, False] for seed in _METRIC_SEEDS]
        return statistics.fmean(float(r["held_out_before"]) - float(r["held_out"]) for r in rows)

    def worse(self, name: str, *, guarded: bool = False) -> float | None:
        """Held-out loss above the default's after whole trainings, as a share of the fall.

        Mean over the seeds; of a guarded training that of its seed. ``None`` before it is known.
        """
        seeds = [_METRIC_SEEDS[0]] if guarded else list(_METRIC_SEEDS)
        rows = [
            (self._rows.get((name, seed, guarded)), self._rows.get((_DEFAULT, seed, False)))
            for seed in seeds
        ]
        apart = [_held_out(own) - _held_out(default) for own, default in rows if own and default]
        if len(apart) < len(seeds) or any(map(math.isnan, apart)):
            return None
        return statistics.fmean(apart) / self.fall

    def kind(self, name: str) -> str:
        """What a strategy is by its final metrics; empty before it is known."""
        worse = self.worse(name)
        if worse is None:
            return ""
        worse /= _TOLERANCE
        return "good" if worse <= _GOOD_UP_TO else "bad" if worse > _BAD_FROM else "neither"


def _losses(row: Row) -> tuple[float, ...]:
    """Of the steps of a trial."""
    return tuple(map(float, row["losses"].split()))


def _held_out(row: Row) -> float:
    """Of a whole training; infinite where it is no number, NaN where it is a trial's."""
    if row["held_out"] == "":
        return math.nan
    value = float(row["held_out"])
    return value if math.isfinite(value) else math.inf


def _classes(planted: Planted, model: Any) -> dict[str, tuple[str, ...]]:
    """The class ``large``: all parameters on which the planted codec works."""
    if not any(knob.startswith("large_") for knob in planted.knobs):
        return {}
    rank = int(planted.knobs.get("large_rank", 0))
    return {
        "large": tuple(
            name
            for name, parameter in model.named_parameters()
            if parameter.dim() < 2 or min(matrix_shape(parameter.shape)) >= rank
        )
    }


class Bench:
    """Trains on all ranks what is missing of one job.

    Args:
        job: Its name.
        commit: Written down beside what is measured.
        output: The file.
    """

    def __init__(self, job: str, commit: str, output: str) -> None:
        import horovod.torch as hvd
        from planted.trainings import STEPS, TRAININGS

        self._job, self._commit, self._output = job, commit, output
        self._make, self._steps = TRAININGS[job], STEPS
        self._first = hvd.rank() == 0
        rows = hvd.broadcast_object(_rows(output) if self._first else None, name="known")
        self._known = Known(rows, job)

    def measure(self, names: list[str], judgements: int) -> None:
        """All of it, what tells most first."""
        for seed in _METRIC_SEEDS if self._job != _NOTHING_LEARNT else ():
            self._train(_DEFAULT, seed, self._steps)
        for judgement in range(judgements):
            for name in names:
                check = self._known.check(name, judgement)
                while (wanted := check.next()) is not None:
                    strategy, seed = wanted
                    own = _DEFAULT if strategy == Strategy() else name
                    self._train(own, judgement * _APART + seed, check.steps)
                    check = self._known.check(name, judgement)
                for seed in _METRIC_SEEDS if self._job != _NOTHING_LEARNT else ():
                    self._train(name, seed, self._steps)
            if self._job == _NOTHING_LEARNT:
                return
            for name in names if judgement == 0 else ():
                self._train(name, _METRIC_SEEDS[0], self._steps, guarded=True)

    def _train(self, name: str, seed: int, steps: int, *, guarded: bool = False) -> None:
        if seed in _METRIC_SEEDS and self._job != _NOTHING_LEARNT:
            steps = self._steps
        if self._known.row(name, seed, steps, guarded) is not None:
            return
        row = self._trained(ALL.get(name, Planted({})), seed, steps, guarded)
        full = dict(zip(_COLUMNS, (self._commit, self._job, name, seed, steps, *row), strict=True))
        full = {column: str(value) for column, value in full.items()}
        self._known.add(full)
        if self._first:
            with open(self._output, "a", newline="") as file:
                csv.DictWriter(file, _COLUMNS).writerow(full)
            print(self._job, name, seed, steps, *row[:-2], sep=" | ", flush=True)

    def _trained(
        self, planted: Planted, seed: int, steps: int, guarded: bool
    ) -> tuple[int, str, str, str, str, str]:
        """The last columns of a row."""
        import horovod.torch as hvd
        import torch
        from scheduled.jobs import rate_factor

        import hvd_autosync.torch
        from hvd_autosync.runtime import current
        from hvd_autosync.runtime.guard import handler

        training = self._make(seed)
        before = training.held_out()
        handler._GUARDS.clear()  # each training is the only one of its process
        current.loss_prediction = self._prediction if guarded else LossPrediction()
        optimizer: Any = hvd_autosync.torch.DistributedOptimizer(
            training.optimizer,
            training.model.named_parameters(),
            strategy=planted.knobs,
            classes=_classes(planted, training.model),
        )
        if not guarded and hasattr(optimizer, "_sync"):  # the default is Horovod's own optimizer
            optimizer._sync.guard.end()
        rates = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: rate_factor(step, self._steps)
        )
        losses: list[torch.Tensor] = []
        in_round: list[int] = []
        caught = ""
        with flawed(planted.flaw):
            for batch in training.batches:
                optimizer.zero_grad()
                loss = training.loss(batch)
                loss.backward()
                if hasattr(optimizer, "_sync") and optimizer._sync.method.in_round:
                    in_round.append(len(losses))
                optimizer.step()
                rates.step()
                losses.append(loss.detach())
                if guarded and not caught and not optimizer._sync.guard.watches:
                    caught = str(len(losses))
                if len(losses) == steps:
                    break
        whole = steps == self._steps
        kept = _TRIAL_STEPS if whole else steps
        means = hvd.allreduce(torch.stack(losses[:kept]).double(), name="losses").tolist()
        after = f"{training.held_out():.6g}" if whole else ""
        levels = " ".join(f"{mean:.5g}" for mean in means)
        rounds = " ".join(str(step) for step in in_round if step < kept)
        return int(guarded), caught, f"{before:.6g}", after, levels, rounds

    @cached_property
    def _prediction(self) -> LossPrediction:
        """What a forced training's guard knows: the default's trials of a study."""
        found = (self._known.losses(_DEFAULT, seed) for seed in range(1, FIRST_SEEDS + 1))
        trials = [losses for losses in found if losses is not None]
        return predict_losses(trials, tolerance=_TOLERANCE)


def work(job: str, names: list[str], judgements: int, commit: str, output: str) -> None:
    """A rank's part: all that is missing of one job."""
    import horovod.torch as hvd
    import torch
    from soaked.waiting import wait_asleep

    wait_asleep()
    hvd.init()
    torch.set_num_threads(1)
    Bench(job, commit, output).measure(names, judgements)


def _rows(output: str) -> list[Row]:
    with open(output, newline="") as file:
        return list(csv.DictReader(file))


def show(output: str) -> None:
    """Print the tables of a file of measurements."""
    rows = _rows(output)
    console = Console(width=None if sys.stdout.isatty() else 130)
    for job in dict.fromkeys(row["job"] for row in rows):
        known = Known(rows, job)
        if job == _NOTHING_LEARNT:
            verdicts = [v for name in ALL if (v := known.verdict(name, 0)) is not None]
            admitted = sum(v.admissible for v in verdicts)
            console.print(f"{job}: {admitted} of {len(verdicts)} admitted")
            continue
        _show_job(console, job, known)


def _show_job(console: Console, job: str, known: Known) -> None:
    table = Table(title=f"{job}: planted strategies, in tolerances of 1 % of the default's fall")
    for column in (
        "strategy",
        "meant as",
        "is",
        "worse after training",
        "in tuning",
        "guard at step",
        "worse under the guard, % of the fall",
    ):
        table.add_column(column)
    judged: dict[str, list[Outcome]] = {"good": [], "bad": [], "neither": []}
    saved = caught = bad = 0
    ended, good = [], 0
    for meant, names in KINDS.items():
        for name in names:
            kind, worse = known.kind(name), known.worse(name)
            outcomes = [v.outcome for i in range(_JUDGEMENTS) if (v := known.verdict(name, i))]
            if not kind or worse is None:
                continue
            judged[kind] += outcomes
            forced = known.row(name, _METRIC_SEEDS[0], 1, guarded=True)
            under = known.worse(name, guarded=True)
            if kind == "bad" and forced is not None and under is not None:
                bad += 1
                caught += bool(forced["caught_at"])
                saved += under <= _GUARDED_MAY_LOSE
            if kind == "good" and forced is not None:
                good += 1
                ended += [name] * bool(forced["caught_at"])
            table.add_row(
                name,
                meant,
                kind,
                f"{worse / _TOLERANCE:.2f}",
                ", ".join(outcome.value for outcome in outcomes),
                "" if forced is None else forced["caught_at"] or "-",
                "" if under is None else f"{100 * under:.1f}",
            )
    console.print(table)
    for kind, outcomes in judged.items():
        admitted = outcomes.count(Outcome.ADMITTED)
        console.print(f"{job}, {kind}: {admitted} of {len(outcomes)} judgements admit")
    console.print(
        f"{job}, bad ones forced: the guard ends {caught} of {bad}; after {saved} the loss is at "
        f"most {_GUARDED_MAY_LOSE:.0%} of the fall worse"
    )
    which = f": {'; '.join(ended)}" if ended else ""
    console.print(f"{job}, good ones forced: the guard ends {len(ended)} of {good}{which}")


def main() -> None:
    """Runs the benchmark, or a rank's part of it."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--jobs", default=",".join(_JOBS), metavar="J,...", help="(default: %(default)s)")
    add("--only", default="", metavar="S;...", help="of the strategies, these (default: all)")
    add("--judgements", type=int, default=_JUDGEMENTS, help="(default: %(default)s)")
    add_table(parser, "guarding.csv", "every training")
    args = parse(parser, show, work)
    names = args.only.split(";") if args.only else list(ALL)
    if unknown := [name for name in names if name not in ALL]:
        parser.error(f"unknown strategies: {'; '.join(unknown)}; known are {'; '.join(ALL)}")
    output = open_table(parser, args, _COLUMNS, goes_on=True)
    commit = commit_now()
    for job in check_names(parser, "jobs", args.jobs, _JOBS):
        part = own_part(
            __file__, job=job, names=names, judgements=args.judgements, commit=commit, output=output
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(["horovodrun", "-np", "2", "--gloo", *part], env=environment)
        if done.returncode:
            sys.exit(f"{job} ended with status {done.returncode}")
    show(output)


if __name__ == "__main__":
    main()
