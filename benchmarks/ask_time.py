"""How long does a learner take to propose the next trial?

Seconds of one ask after 5, 20, 50 and 100 observations, for ours beside BoTorch used as its
tutorials do (``MixedSingleTaskGP`` fitted without a cap, ``optimize_acqf_mixed_alternating``),
Optuna's TPE and random search. "ours-priors" has a cost model and five related studies of up to 60
trials, from the tables in ``traces/``, in the larger space of one of them; "ours-200" the same of a
simulated model of 200 tensors. Each ask sees new measurements of the target, to which the models
are fitted again. The first ask is not counted: it loads libraries, and fits the models of related
studies, which stay as they are after that. "CPU s" is the median of the processor time of all
threads: on a machine that does other things, too, it is the fairer column.

    python benchmarks/ask_time.py                         # stock BoTorch takes minutes
    python benchmarks/ask_time.py --learners ours random  # a few seconds
    python benchmarks/ask_time.py --output ask_time.csv
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from contest.emulator import Emulator
from contest.hypothetical import HypotheticalTask, problem

from hvd_autosync.learner import BayesianLearner, Observation, RandomLearner
from hvd_autosync.learner.points import encode_all, sobol_points
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Strategy
from hvd_autosync.search_space.knobs import categorical_knob, float_knob, integer_knob

_TABLES = Path(__file__).resolve().parent / "traces"
_TARGET, _SOURCE_TRIALS, _SOURCES = "bert-100mbit", 60, 5

#: Eight mixed knobs, named as Horovod's.
SPACE = SearchSpace(
    (
        integer_knob(
            "fusion_threshold_bytes",
            0,
            1 << 28,
            1 << 27,
            help="",
            scale="log",
            log_offset=65536.0,
            multiple=65536,
        ),
        float_knob("cycle_time_ms", 0.1, 100.0, 1.0, help="", scale="log"),
        integer_knob("buckets", 0, 128, 0, help="", scale="log", log_offset=1.0),
        float_knob("share", 0.0, 1.0, 0.5, help=""),
        integer_knob("num_nccl_streams", 1, 4, 1, help=""),
        categorical_knob("hierarchical_allreduce", (False, True), False, help=""),
        categorical_knob("cache_capacity", (0, 1024, 4096), 1024, help=""),
        categorical_knob("compression", ("none", "fp16", "int8"), "none", help=""),
    )
)

#: Proposes a strategy from observations and a seed.
Ask = Callable[[Sequence[Observation], int], Strategy]


def ask_ours(seen: Sequence[Observation], seed: int) -> Strategy:
    """Our learner."""
    suggestion = BayesianLearner().suggest(Problem(SPACE), seen, seed=seed)
    assert suggestion is not None and suggestion.kind == "model"
    return suggestion.strategy


@cache
def tables() -> dict[str, Emulator]:
    """The measured tables by name."""
    return {table.name: table for table in map(Emulator, sorted(_TABLES.glob("*.jsonl*")))}


@cache
def problem_with_priors() -> Problem:
    """The target's task, a cost model of it, and five related studies, one of the same task."""
    target = tables()[_TARGET]
    related = [target, *(each for each in tables().values() if each is not target)][:_SOURCES]
    sources = tuple(
        Source(each.study_id, each.task, each.space, each.small_study(_SOURCE_TRIALS), 0.9)
        for each in related
    )
    return Problem(target.space, target.task, sources)


def ask_ours_with_priors(seen: Sequence[Observation], seed: int) -> Strategy:
    """Our learner with all that it can know beforehand."""
    suggestion = BayesianLearner().suggest(problem_with_priors(), seen, seed=seed)
    assert suggestion is not None and suggestion.kind == "model"
    return suggestion.strategy


@cache
def large_problem() -> tuple[HypotheticalTask, Problem]:
    """A model of 200 tensors, and five related studies."""
    return problem(200, _SOURCES, _SOURCE_TRIALS)


def ask_ours_of_large(seen: Sequence[Observation], seed: int) -> Strategy:
    """Our learner with cost model and sources, on a model of many tensors."""
    suggestion = BayesianLearner().suggest(large_problem()[1], seen, seed=seed)
    assert suggestion is not None and suggestion.kind == "model"
    return suggestion.strategy


def ask_random(seen: Sequence[Observation], seed: int) -> Strategy:
    """Random search."""
    suggestion = RandomLearner().suggest(Problem(SPACE), seen, seed=seed)
    assert suggestion is not None
    return suggestion.strategy


def ask_stock_botorch(seen: Sequence[Observation], seed: int) -> Strategy:
    """BoTorch's own mixed model, fit and optimizer, with their defaults."""
    from botorch.acquisition.logei import qLogNoisyExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models.gp_regression_mixed import MixedSingleTaskGP
    from botorch.optim.optimize_mixed import optimize_acqf_mixed_alternating
    from gpytorch.mlls import ExactMarginalLogLikelihood

    torch.manual_seed(seed)
    x = torch.from_numpy(encode_all(SPACE, [one.strategy for one in seen]))
    y = -torch.tensor([[one.log_step] for one in seen], dtype=torch.float64)
    categories = SPACE.categorical_dimensions
    counts = {
        index: len(knob.choices) - 1
        for index, knob in enumerate(SPACE.knobs)
        if isinstance(knob, CategoricalKnob)
    }
    for index, last in counts.items():
        x[:, index] *= last
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = MixedSingleTaskGP(x, y, cat_dims=categories)
        fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
        upper = torch.tensor([float(counts.get(i, 1)) for i in range(SPACE.dimension)]).double()
        point, _ = optimize_acqf_mixed_alternating(
            qLogNoisyExpectedImprovement(model, X_baseline=x),
            bounds=torch.stack([torch.zeros_like(upper), upper]),
            cat_dims={index: list(range(last + 1)) for index, last in counts.items()},
            q=1,
            num_restarts=20,
            raw_samples=1024,
        )
    return SPACE.decode((point[0] / upper).numpy())


def ask_optuna(trial: Any) -> Strategy:
    """The strategy of one Optuna trial."""
    return SPACE.complete(
        {
            k.name: trial.suggest_categorical(k.name, k.choices)
            if isinstance(k, CategoricalKnob)
            else k.from_unit(trial.suggest_float(k.name, 0.0, 1.0))
            for k in SPACE.knobs
        }
    )


def ask_tpe(seen: Sequence[Observation], seed: int) -> Strategy:
    """Optuna's TPE, which gets all observations each time (not timed separately: it is cheap)."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        k.name: optuna.distributions.CategoricalDistribution(k.choices)
        if isinstance(k, CategoricalKnob)
        else optuna.distributions.FloatDistribution(0.0, 1.0)
        for k in SPACE.knobs
    }
    for one in seen:
        values = {
            k.name: v if isinstance(k, CategoricalKnob) else k.to_unit(v)
            for k in SPACE.knobs
            for v in [one.strategy[k.name]]
        }
        study.add_trial(
            optuna.trial.create_trial(params=values, distributions=distributions, value=one.step_s)
        )
    return ask_optuna(study.ask())


LEARNERS: dict[str, Ask] = {
    "ours": ask_ours,
    "ours-priors": ask_ours_with_priors,
    "ours-200": ask_ours_of_large,
    "stock-botorch": ask_stock_botorch,
    "tpe": ask_tpe,
    "random": ask_random,
}


def measure_synthetic(strategy: Strategy, trial: int) -> Observation:
    """A step time that falls towards the middle of each knob, with 3 % noise."""
    distance = np.abs(SPACE.encode(strategy) - 0.5)
    noise = np.random.default_rng(trial).normal(0, 0.03)
    return Observation(strategy, math.exp(0.3 * float(distance.sum()) - 2 + noise))


def job_of(ask: Ask) -> tuple[SearchSpace, Callable[[Strategy, int], Observation]]:
    """The space that ``ask`` proposes from, and what measures its strategies."""
    if ask is ask_ours_with_priors:
        table = tables()[_TARGET]
        return table.space, lambda strategy, seed: table.measure(strategy, 0, seed)
    if ask is ask_ours_of_large:
        task = large_problem()[0]
        return task.space, task.measure
    return SPACE, measure_synthetic


def timed(ask: Ask, count: int, repeats: int) -> tuple[list[float], list[float]]:
    """Seconds, and processor seconds, of ``repeats`` asks, after one that is not counted."""
    space, measure = job_of(ask)
    strategies = [space.decode(point) for point in sobol_points(space, count, seed=0)]
    wall, cpu = [], []
    for seed in range(repeats + 1):
        seen = [measure(s, seed * count + trial) for trial, s in enumerate(strategies)]
        start, cpu_start = time.perf_counter(), time.process_time()
        ask(seen, seed)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
    return wall[1:], cpu[1:]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--learners", nargs="+", choices=LEARNERS, default=list(LEARNERS), help="which to time"
    )
    parser.add_argument(
        "--observations",
        type=int,
        nargs="+",
        default=[5, 20, 50, 100],
        help="numbers of observations (default: 5 20 50 100)",
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="timed asks of each, after a first (default: 5)"
    )
    parser.add_argument("--output", metavar="FILE", help="write one CSV row per ask")
    options = parser.parse_args()

    rows: list[dict[str, str | int | float]] = []
    print(f"{'learner':15}{'observations':>13}{'median s':>11}{'min s':>9}{'max s':>9}{'CPU s':>9}")
    for name in options.learners:
        for count in options.observations:
            try:
                wall, cpu = timed(LEARNERS[name], count, options.repeats)
            except ImportError as missing:
                print(f"{name:15}not installed ({missing.name})")
                break
            rows += [
                {"learner": name, "observations": count, "ask_s": a, "cpu_s": b}
                for a, b in zip(wall, cpu, strict=True)
            ]
            print(
                f"{name:15}{count:13d}{statistics.median(wall):11.3f}{min(wall):9.3f}"
                f"{max(wall):9.3f}{statistics.median(cpu):9.3f}",
                flush=True,
            )
    if options.output:
        with open(options.output, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=["learner", "observations", "ask_s", "cpu_s"])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
