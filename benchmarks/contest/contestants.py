"""Contestants: our learner in four forms, the same with a wrong related task, and peers.

Each is a class that is created once per game. All get the same default as their first trial, the
same space (in their own notation), and the same measurements.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from contest.emulator import Emulator
from hvd_autosync.learner import BayesianLearner, Learner, Observation, RandomLearner, SobolLearner
from hvd_autosync.learner.points import FloatArray, distinct, encode_all, keys
from hvd_autosync.learner.pool import candidate_pool
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.learner.projection import project_onto_space
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Strategy


class Contestant(Protocol):
    """One learner in one game."""

    def ask(self) -> Strategy:
        """The strategy to measure next."""
        ...

    def tell(self, seen: Observation) -> None:
        """What was measured, the default's trial first."""
        ...


#: Creates a contestant for a table, from the related tables as sources and a seed.
Start = Callable[[Emulator, tuple[Source, ...], int], Contestant]
#: From the true logarithms of the step times to wrong ones.
Distort = Callable[[FloatArray, np.random.Generator], FloatArray]


class Ours:
    """A learner of this project.

    Args:
        learner: The learner.
        problem: Its problem.
        seed: Of the game.
    """

    def __init__(self, learner: Learner, problem: Problem, seed: int) -> None:
        self._learner, self._problem, self._seed = learner, problem, seed
        self._seen: list[Observation] = []

    def ask(self) -> Strategy:
        suggestion = self._learner.suggest(self._problem, self._seen, seed=self._seed)
        return self._problem.space.default if suggestion is None else suggestion.strategy

    def tell(self, seen: Observation) -> None:
        self._seen.append(seen)


def ours(*, cost: bool, transfer: bool) -> Start:
    """Our learner with or without its cost model and related tasks."""

    def start(table: Emulator, sources: tuple[Source, ...], seed: int) -> Contestant:
        if not cost:
            sources = tuple(replace(source, task=None) for source in sources)
        problem = Problem(
            table.space, table.task if cost else None, sources if transfer else (), steps=25
        )
        return Ours(BayesianLearner(), problem, seed)

    return start


def with_wrong_source(distort: Distort, *, cost: bool) -> Start:
    """Our learner with one related task, whose step times are not those that were measured.

    Args:
        distort: From logarithms of the step times, ``(n,)``, to those that the source has instead.
        cost: Whether it has a cost model.
    """

    def start(table: Emulator, _: tuple[Source, ...], seed: int) -> Contestant:
        truth = table.small_study(20)
        log_step = np.array([seen.log_step for seen in truth])
        wrong = np.exp(distort(log_step, np.random.default_rng(seed)))
        observations = tuple(
            Observation(seen.strategy, float(step_s))
            for seen, step_s in zip(truth, wrong, strict=True)
        )
        task = table.task if cost else None
        source = Source("wrong", task, table.space, observations, 0.9)
        return Ours(BayesianLearner(), Problem(table.space, task, (source,), steps=25), seed)

    return start


def adversarial(log_step: FloatArray, _: np.random.Generator) -> FloatArray:
    """An adversarial source: a fast strategy is slow there."""
    return 2 * log_step.mean() - log_step


def unrelated(log_step: FloatArray, rng: np.random.Generator) -> FloatArray:
    """An unrelated source: each strategy has the step time of another."""
    return rng.permutation(log_step)


def plain(learner: Learner) -> Start:
    """A learner of ours that learns nothing."""
    return lambda table, _, seed: Ours(learner, Problem(table.space), seed)


class BoTorch:
    """BoTorch's mixed GP, its acquisition function and its optimizer of mixed spaces.

    The fit is capped at 75 iterations, which costs little likelihood and saves most of the time;
    the first five trials after the default are a Sobol sequence.
    """

    def __init__(self, table: Emulator, _: tuple[Source, ...], seed: int) -> None:
        self._space, self._seed = table.space, seed
        self._seen: list[Observation] = []

    def ask(self) -> Strategy:
        if len(self._seen) < 6:
            suggestion = SobolLearner().suggest(Problem(self._space), self._seen, seed=self._seed)
            assert suggestion is not None, "the space is not that small"
            return suggestion.strategy
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._propose()

    def tell(self, seen: Observation) -> None:
        self._seen.append(seen)

    def _propose(self) -> Strategy:
        from botorch.acquisition.logei import qLogNoisyExpectedImprovement
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import MixedSingleTaskGP
        from botorch.optim.optimize_mixed import optimize_acqf_mixed_alternating
        from gpytorch.mlls import ExactMarginalLogLikelihood

        torch.manual_seed(self._seed * 1000 + len(self._seen))
        x = torch.from_numpy(encode_all(self._space, [one.strategy for one in self._seen]))
        y = -torch.tensor([[one.log_step] for one in self._seen], dtype=torch.float64)
        lasts = _last_choices(self._space)
        for index, last in lasts.items():
            x[:, index] *= last
        upper = torch.ones(self._space.dimension, dtype=torch.float64)
        for index, last in lasts.items():
            upper[index] = last
        model = MixedSingleTaskGP(x, y, cat_dims=list(lasts))
        fit_gpytorch_mll(
            ExactMarginalLogLikelihood(model.likelihood, model),
            optimizer_kwargs={"options": {"maxiter": 75}},
        )
        point, _ = optimize_acqf_mixed_alternating(
            qLogNoisyExpectedImprovement(model, X_baseline=x),
            bounds=torch.stack([torch.zeros_like(upper), upper]),
            cat_dims={index: list(range(last + 1)) for index, last in lasts.items()},
            q=1,
            num_restarts=8,
            raw_samples=256,
        )
        return self._space.decode((point[0] / upper).numpy())


def _last_choices(space: SearchSpace) -> dict[int, int]:
    """Dimension of each categorical knob -> the number of its last choice."""
    return {
        index: len(knob.choices) - 1
        for index, knob in enumerate(space.knobs)
        if isinstance(knob, CategoricalKnob)
    }


class Optuna:
    """A sampler of Optuna; numbers are searched on the scales of their knobs.

    Args:
        sampler: Makes the sampler from a seed.
    """

    def __init__(self, space: SearchSpace, sampler: Any) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        warnings.filterwarnings("ignore", module="optuna")
        self._space = space
        self._study = optuna.create_study(sampler=sampler)
        self._study.enqueue_trial(
            {
                knob.name: knob.default
                if isinstance(knob, CategoricalKnob)
                else knob.to_unit(knob.default)
                for knob in space.knobs
            }
        )
        self._trial: Any = None

    def ask(self) -> Strategy:
        self._trial = self._study.ask()
        chosen = {}
        for knob in self._space.knobs:
            if isinstance(knob, CategoricalKnob):
                chosen[knob.name] = self._trial.suggest_categorical(knob.name, knob.choices)
            else:
                position = self._trial.suggest_float(knob.name, 0.0, 1.0)
                chosen[knob.name] = knob.from_unit(position)
        return self._space.complete(chosen)

    def tell(self, seen: Observation) -> None:
        if self._trial is None:
            self.ask()  # the default, which is enqueued
        self._study.tell(self._trial, seen.log_step)


def optuna_sampler(name: str) -> Start:
    """Optuna's ``TPESampler`` (multivariate, as its authors advise) or ``GPSampler``."""

    def start(table: Emulator, _: tuple[Source, ...], seed: int) -> Contestant:
        import optuna

        options = {"multivariate": True} if name == "TPESampler" else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            sampler = getattr(optuna.samplers, name)(seed=seed, **options)
        return Optuna(table.space, sampler)

    return start


class Ax:
    """Ax's service API with its default strategy of generation."""

    def __init__(self, table: Emulator, _: tuple[Source, ...], seed: int) -> None:
        import logging

        from ax.service.ax_client import AxClient, ObjectiveProperties

        logging.getLogger("ax").setLevel(logging.ERROR)
        self._space = table.space
        self._client = AxClient(random_seed=seed, verbose_logging=False)
        parameters = [
            {
                "name": knob.name,
                "type": "choice",
                "values": [str(c) for c in knob.choices],
                "is_ordered": False,
                "value_type": "str",
            }
            if isinstance(knob, CategoricalKnob)
            else {"name": knob.name, "type": "range", "bounds": [0.0, 1.0], "value_type": "float"}
            for knob in self._space.knobs
        ]
        self._client.create_experiment(
            parameters=parameters, objectives={"log_step": ObjectiveProperties(minimize=True)}
        )
        self._trial: int | None = None

    def ask(self) -> Strategy:
        parameters, self._trial = self._client.get_next_trial()
        chosen = {}
        for knob in self._space.knobs:
            value = parameters[knob.name]
            if isinstance(knob, CategoricalKnob):
                chosen[knob.name] = next(c for c in knob.choices if str(c) == value)
            else:
                chosen[knob.name] = knob.from_unit(float(value))
        return self._space.complete(chosen)

    def tell(self, seen: Observation) -> None:
        if self._trial is None:
            default = {
                knob.name: str(knob.default)
                if isinstance(knob, CategoricalKnob)
                else knob.to_unit(knob.default)
                for knob in self._space.knobs
            }
            _, self._trial = self._client.attach_trial(default)
        self._client.complete_trial(self._trial, raw_data={"log_step": (seen.log_step, None)})


class Smac:
    """SMAC3's facade for hyperparameters: a random forest and its own acquisition."""

    def __init__(self, table: Emulator, _: tuple[Source, ...], seed: int) -> None:
        import tempfile

        from ConfigSpace import Categorical, ConfigurationSpace, Float
        from smac import HyperparameterOptimizationFacade, Scenario

        self._space = table.space
        configurations = ConfigurationSpace(seed=seed)
        for knob in self._space.knobs:
            configurations.add(
                Categorical(knob.name, [str(c) for c in knob.choices], default=str(knob.default))
                if isinstance(knob, CategoricalKnob)
                else Float(knob.name, (0.0, 1.0), default=knob.to_unit(knob.default))
            )
        self._folder = tempfile.TemporaryDirectory(prefix="smac-")
        scenario = Scenario(
            configurations,
            deterministic=True,
            n_trials=200,
            seed=seed,
            output_directory=self._folder.name,
        )
        design = HyperparameterOptimizationFacade.get_initial_design(
            scenario, n_configs=5, additional_configs=[configurations.get_default_configuration()]
        )
        self._facade = HyperparameterOptimizationFacade(
            scenario,
            lambda config, seed=0: 0.0,
            initial_design=design,
            overwrite=True,
            logging_level=False,
        )
        self._default = configurations.get_default_configuration()
        self._info: Any = None

    def ask(self) -> Strategy:
        self._info = self._facade.ask()
        chosen = {}
        for knob in self._space.knobs:
            value = self._info.config[knob.name]
            if isinstance(knob, CategoricalKnob):
                chosen[knob.name] = next(c for c in knob.choices if str(c) == value)
            else:
                chosen[knob.name] = knob.from_unit(float(value))
        return self._space.complete(chosen)

    def tell(self, seen: Observation) -> None:
        from smac.runhistory.dataclasses import TrialInfo, TrialValue

        info = self._info or TrialInfo(self._default, seed=0)
        self._facade.tell(info, TrialValue(cost=seen.log_step))


class MultiTask:
    """BoTorch's ``MultiTaskGP`` over the table and the related tasks, on the table's space.

    Its fit is capped at 75 iterations; times are standardized per task, and choices are inputs of
    0 and 1. The acquisition function is maximized over the pool of candidates of our own learner.
    """

    def __init__(self, table: Emulator, sources: tuple[Source, ...], seed: int) -> None:
        self._space, self._seed = table.space, seed
        self._seen: list[Observation] = []
        #: Numeric inputs and categories of related tasks, and their standardized speed.
        self._known: list[tuple[FloatArray, FloatArray]] = []
        for source in sources:
            points = encode_all(source.space, [one.strategy for one in source.observations])
            log_step = np.array([one.log_step for one in source.observations])
            scaled = (log_step - log_step.mean()) / max(float(log_step.std()), 1e-6)
            own = project_onto_space(source.space, points, self._space)
            self._known.append((self._inputs(own), -scaled))

    def ask(self) -> Strategy:
        from botorch.acquisition.logei import qLogNoisyExpectedImprovement
        from botorch.acquisition.objective import GenericMCObjective
        from botorch.fit import fit_gpytorch_mll
        from botorch.models import MultiTaskGP
        from gpytorch.mlls import ExactMarginalLogLikelihood

        tried = encode_all(self._space, [one.strategy for one in self._seen])
        log_step = np.array([one.log_step for one in self._seen])
        unit = max(float(log_step.std()), 0.1)
        parts = [(self._inputs(tried), -(log_step - log_step.mean()) / unit), *self._known]
        x = np.concatenate(
            [np.c_[points, np.full(len(points), task)] for task, (points, _) in enumerate(parts)]
        )
        y = np.concatenate([values for _, values in parts])
        torch.manual_seed(self._seed * 1000 + len(self._seen))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = MultiTaskGP(
                torch.from_numpy(x),
                torch.from_numpy(y)[:, None],
                task_feature=-1,
                output_tasks=[0],
                outcome_transform=None,
            )
            fit_gpytorch_mll(
                ExactMarginalLogLikelihood(model.likelihood, model),
                optimizer_kwargs={"options": {"maxiter": 75}},
            )
            baseline = torch.from_numpy(self._inputs(tried))
            acquisition = qLogNoisyExpectedImprovement(
                model, X_baseline=baseline, objective=GenericMCObjective(lambda y, X: y[..., 0])
            )
            best = tried[np.argsort(log_step)][:8]
            pool, _ = candidate_pool(self._space, best, self._seed * 1000 + len(self._seen))
            pool = distinct(pool, keys(tried))
            with torch.no_grad():
                scores = acquisition(torch.from_numpy(self._inputs(pool)).unsqueeze(-2))
        return self._space.decode(pool[int(scores.argmax())])

    def _inputs(self, points: FloatArray) -> FloatArray:
        """Positions of numbers, and one input of 0 and 1 for each choice."""
        columns = []
        for index, knob in enumerate(self._space.knobs):
            column = points[:, index]
            if isinstance(knob, CategoricalKnob):
                columns += [column == knob.to_unit(choice) for choice in knob.choices]
            else:
                columns.append(column)
        return np.stack(columns, axis=1).astype(np.float64)

    def tell(self, seen: Observation) -> None:
        self._seen.append(seen)


CONTESTANTS: dict[str, Start] = {
    "random": plain(RandomLearner()),
    "sobol": plain(SobolLearner()),
    "optuna-tpe": optuna_sampler("TPESampler"),
    "optuna-gp": optuna_sampler("GPSampler"),
    "ax": Ax,
    "smac": Smac,
    "botorch": BoTorch,
    "botorch-multitask": MultiTask,
    "ours: gp": ours(cost=False, transfer=False),
    "ours: gp + cost": ours(cost=True, transfer=False),
    "ours: gp + transfer": ours(cost=False, transfer=True),
    "ours": ours(cost=True, transfer=True),
}

#: Ours with a related task that is wrong: the cost of negative transfer.
WITH_WRONG_SOURCE: dict[str, Start] = {
    "ours: gp + adversarial": with_wrong_source(adversarial, cost=False),
    "ours: gp + unrelated": with_wrong_source(unrelated, cost=False),
    "ours: gp + cost + adversarial": with_wrong_source(adversarial, cost=True),
    "ours: gp + cost + unrelated": with_wrong_source(unrelated, cost=True),
}
