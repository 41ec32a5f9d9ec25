"""The tuners: the default, a recipe, Horovod's autotune, random search, and us.

Ours goes first; the others get as many steps as it used, confirmation included.
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_autosync.launch.auto import AutoRunner
from hvd_autosync.launch.cold import ColdRunner
from hvd_autosync.launch.job import Job
from hvd_autosync.launch.limits import Limits
from hvd_autosync.launch.runner import TrialRunner
from hvd_autosync.learner import Observation, RandomLearner
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import SearchSpace, Strategy, TrialResult, TrialSpec
from hvd_autosync.search_space.exchange_plan import Classes, parameter_classes
from hvd_autosync.traces import TraceStore, import_autotune_log

Say = Callable[[str], None]

#: The worked example of Horovod's page on tensor fusion (its repository's docs/tensor-fusion.rst):
#: ``--fusion-threshold-mb 32`` and ``--cycle-time-ms 3.5``.
RECIPE = Strategy({"fusion_threshold_bytes": 32 * 1024 * 1024, "cycle_time_ms": 3.5})
#: Horovod's autotune takes the median of so many scores as one sample (parameter_manager.cc).
_SCORES_PER_SAMPLE = 5


@dataclass(frozen=True)
class Budget:
    """What a tuner may use, or has used.

    Attributes:
        trials: Launches, or samples of Horovod's autotune.
        steps: Training steps in all of them.
        minutes: Wall time.
    """

    trials: int = 0
    steps: int = 0
    minutes: float = 0.0


@dataclass(frozen=True)
class Contender:
    """A strategy that goes into the final measurement.

    Attributes:
        name: The tuner that found it.
        strategy: Its knobs.
        cost: The cost of finding it.
    """

    name: str
    strategy: Strategy
    cost: Budget = Budget()


@dataclass(frozen=True)
class Found:
    """What our tuner leaves for the others.

    Attributes:
        contender: Its winner.
        space: What it searched.
        limits: When a run of this job counts as hung.
        classes: The model's parameters by class.
    """

    contender: Contender
    space: SearchSpace
    limits: Limits
    classes: Classes


@dataclass(frozen=True)
class Length:
    """How long a trial is, in steps."""

    warmup: int
    steps: int


def run_trial(
    job: Job,
    strategy: Strategy,
    length: Length,
    ours: Found,
    runner: TrialRunner | None = None,
    *,
    profile: bool = False,
) -> TrialResult:
    """One trial of ``job`` under ``strategy``; a fresh launch unless a runner is given."""
    spec = TrialSpec(
        f"gain-{uuid.uuid4().hex}",
        strategy,
        length.warmup,
        length.steps,
        profile=profile,
        classes=ours.classes,
    )
    return (runner or ColdRunner(job)).run(spec, ours.limits, lambda progress: None)


def steps_of(result: TrialResult | None) -> int:
    """Steps that a trial ran, warm-up included."""
    return min((len(rank.step_s) for rank in result.ranks), default=0) if result else 0


def wait_for(process: subprocess.Popen[Any]) -> int:
    """The exit status of ``process``, which is asked to clean up when the wait is broken off."""
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def contender_name(allow: str) -> str:
    """What our tuner is called, which may use the lossy groups ``allow``."""
    return f"autosync + {allow}" if allow else "autosync"


def autosync(job: Job, length: Length, trials: int, seed: int, allow: str, folder: Path) -> Found:
    """Our winner, by the command that a user would give.

    Raises:
        RuntimeError: The command failed, or left no finished study.
    """
    name = contender_name(allow)
    store = folder / f"{name.replace(' ', '')}.db"
    ours = {
        "trials": trials,
        "steps": length.steps,
        "warmup": length.warmup,
        "seed": seed,
        "store": store,
        "reuse": "never",
        **({"allow": allow} if allow else {}),
    }
    words = [f"--autosync-{option}={value}" for option, value in ours.items()]
    began = time.monotonic()
    status = wait_for(
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "horovod.runner.launch",
                *job.options,
                "--autosync",
                "--autosync-tune-only",
                *words,
                *job.command,
            ],
            stdin=subprocess.DEVNULL,
        )
    )
    minutes = (time.monotonic() - began) / 60
    if status:
        raise RuntimeError(f"horovodrun --autosync ended with status {status}")
    traces = TraceStore(store)
    study = traces.studies()[-1]
    records = traces.trials(study.study_id)
    default = records[0].result
    if study.winner is None or study.task is None or study.space is None or default is None:
        raise RuntimeError(f"study {study.study_id} in {store} did not finish")
    steps = sum(steps_of(record.result) for record in records)
    contender = Contender(name, study.winner, Budget(len(records), steps, minutes))
    classes = parameter_classes(study.task.model)
    return Found(contender, study.space, Limits.from_default(default), classes)


def horovod_autotune(job: Job, ours: Found, length: Length, folder: Path) -> Contender:
    """The best sample of Horovod's autotune, given as many steps as ours used.

    It is helped: the flags that cannot matter here are held, so that all of its samples go into
    fusion threshold and cycle time, and there are as many samples as fit. Otherwise it would
    search again for each combination of flags, with the response cache off to begin with.

    Raises:
        AutosyncError: Its log has no sample.
    """
    log, budget = folder / "autotune.csv", ours.contender.cost
    per_score = max(1, round((length.warmup + length.steps) / _SCORES_PER_SAMPLE))
    samples = max(1, budget.steps // (per_score * _SCORES_PER_SAMPLE) - 1)
    options = [
        "--cache-capacity",
        "1024",
        "--no-hierarchical-allgather",
        "--autotune",
        "--autotune-log-file",
        str(log),
        "--autotune-warmup-samples",
        "1",
        "--autotune-steps-per-sample",
        str(per_score),
        "--autotune-bayes-opt-max-samples",
        str(samples),
    ]
    began = time.monotonic()
    tuned = dataclasses.replace(job, options=(*job.options, *options))
    result = run_trial(tuned, Strategy(), Length(1, max(budget.steps - 1, 1)), ours)
    minutes = (time.monotonic() - began) / 60
    traces = TraceStore(folder / "autotune.db")
    study_id = import_autotune_log(traces, log)
    winner = traces.study(study_id).winner
    assert winner is not None, "an imported log has a best sample"
    seen = len(traces.trials(study_id))
    return Contender("horovod autotune", winner, Budget(seen, steps_of(result), minutes))


def random_search(job: Job, ours: Found, length: Length, seed: int, say: Say) -> Contender:
    """The fastest of as many random strategies, the default first, as ours had trials."""
    began = time.monotonic()
    steps, seen, trials = 0, list[Observation](), ours.contender.cost.trials
    strategy = ours.space.default
    runner = AutoRunner(job, say)
    while len(seen) < trials:
        result = run_trial(job, strategy, length, ours, runner)
        steps += steps_of(result)
        time_s = result.step_time
        seen.append(
            Observation(strategy, time_s.mean_s, time_s.standard_error_s)
            if time_s is not None
            else Observation(strategy, None)
        )
        shown = result.status.value if time_s is None else f"{1e3 * time_s.mean_s:.1f} ms"
        say(f"random search, trial {len(seen)} of {trials}: {shown}")
        suggestion = RandomLearner().suggest(Problem(ours.space), seen, seed=seed)
        if suggestion is None:
            break
        strategy = suggestion.strategy
    runner.close()
    best = min(seen, key=lambda o: math.inf if o.step_s is None else o.step_s)
    used = Budget(len(seen), steps, (time.monotonic() - began) / 60)
    return Contender("random search", best.strategy, used)
