"""How much slower than the optimum is what a learner recommends after 10, 20 and 30 trials?

Synthetic jobs with eight mixed knobs and 3 % noise; every learner measures the default first and
sees the same noise. Regret is the true step time of the recommended strategy over the true best,
less 1. Learners here recommend by posterior mean, random search and TPE their fastest
measurement.

    python benchmarks/regret.py                       # 10 jobs: a few minutes
    python benchmarks/regret.py --jobs 20 --output regret.csv
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable
from typing import Any

from learner_landscapes import SPACE, Landscape

from hvd_autosync.learner import BayesianLearner, Learner, Observation, RandomLearner, best_tried
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import CategoricalKnob, Strategy

Search = Callable[[Landscape, int, int], list[Observation]]


def with_learner(learner: Learner) -> Search:
    """Trials that one of our learners asks for."""

    def search(job: Landscape, trials: int, seed: int) -> list[Observation]:
        seen = [job.measure(SPACE.default, 0)]
        while len(seen) < trials:
            suggestion = learner.suggest(Problem(SPACE), seen, seed=seed)
            assert suggestion is not None
            seen.append(job.measure(suggestion.strategy, len(seen)))
        return seen

    return search


def with_tpe(optuna: Any) -> Search:
    """Trials that Optuna's TPE asks for, on the unit interval for numbers."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def search(job: Landscape, trials: int, seed: int) -> list[Observation]:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
        first = {
            k.name: k.default if isinstance(k, CategoricalKnob) else k.to_unit(k.default)
            for k in SPACE.knobs
        }
        study.enqueue_trial(first)
        seen: list[Observation] = []
        while len(seen) < trials:
            trial = study.ask()
            seen.append(job.measure(ask_optuna(trial), len(seen)))
            study.tell(trial, seen[-1].step_s)
        return seen

    return search


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


def recommended(seen: list[Observation], by_model: bool) -> Strategy:
    """What a study would name as its best."""
    if by_model:
        return best_tried(Problem(SPACE), seen, 1)[0]
    return min(seen, key=lambda one: one.step_s or 0.0).strategy


def searches(names: list[str]) -> dict[str, Search]:
    """Those of ``names`` that are installed."""
    found = {"bayesian": with_learner(BayesianLearner()), "random": with_learner(RandomLearner())}
    if "tpe" in names:
        try:
            import optuna
        except ImportError:
            print("tpe       not installed (optuna)")
        else:
            found["tpe"] = with_tpe(optuna)
    return {name: search for name, search in found.items() if name in names}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ["bayesian", "random", "tpe"]
    parser.add_argument("--learners", nargs="+", choices=names, default=names, help="which to run")
    parser.add_argument("--jobs", type=int, default=10, help="synthetic jobs (default: 10)")
    parser.add_argument(
        "--trials",
        type=int,
        nargs="+",
        default=[10, 20, 30],
        help="numbers of trials, the default's included (default: 10 20 30)",
    )
    parser.add_argument("--output", metavar="FILE", help="write one CSV row per job and learner")
    options = parser.parse_args()

    rows: list[dict[str, str | int | float]] = []
    for name, search in searches(options.learners).items():
        for seed in range(options.jobs):
            job = Landscape(seed)
            seen = search(job, max(options.trials), seed)
            for trials in options.trials:
                best = recommended(seen[:trials], by_model=name == "bayesian")
                rows.append(
                    {"learner": name, "job": seed, "trials": trials, "regret": job.regret(best)}
                )
        parts = []
        for trials in options.trials:
            regrets = [
                float(r["regret"]) for r in rows if (r["learner"], r["trials"]) == (name, trials)
            ]
            parts.append(
                f"{trials} trials: median {statistics.median(regrets):6.1%}, "
                f"mean {statistics.mean(regrets):6.1%}"
            )
        print(f"{name:10}" + "   ".join(parts), flush=True)
    if options.output:
        with open(options.output, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
