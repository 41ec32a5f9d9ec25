"""Contestants: our learner in four forms, the same with a wrong related task, and peers.

Each is a class that is created once per game. All get the same default as their first trial, the
same space (in their own notation), and the same measurements.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from contest.botorch_peers import Mixed, multi_task, single_task
from contest.contestant import Contestant, Start
from contest.emulator import Emulator
from contest.ranking_ensemble import ranking_ensemble
from hvd_autosync.learner import (
    BayesianLearner,
    Learner,
    Observation,
    RandomLearner,
    SobolLearner,
    gp,
)
from hvd_autosync.learner.points import FloatArray
from hvd_autosync.learner.prior_functions import PriorFunction, source_task_prior
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Strategy

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


class OursAtMeans(Ours):
    """Ours as it was before sources counted with their covariance: as sure of them everywhere."""

    def ask(self) -> Strategy:
        def certain(*args: Any) -> PriorFunction:
            return replace(source_task_prior(*args), source=None)

        with patch.object(gp, "source_task_prior", certain):
            self._forget()
            try:
                return super().ask()
            finally:
                self._forget()

    @staticmethod
    def _forget() -> None:
        """Fits of the one form are not those of the other; sources have neither."""
        gp._fit.cache_clear()
        gp._own_functions.cache_clear()


def ours(*, cost: bool, transfer: bool, form: type[Ours] = Ours) -> Start:
    """Our learner with or without its cost model and related tasks."""

    def start(table: Emulator, sources: tuple[Source, ...], seed: int) -> Contestant:
        if not cost:
            sources = tuple(replace(source, task=None) for source in sources)
        problem = Problem(
            table.space, table.task if cost else None, sources if transfer else (), steps=25
        )
        return form(BayesianLearner(), problem, seed)

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
    return 2 * float(log_step.mean()) - log_step


def unrelated(log_step: FloatArray, rng: np.random.Generator) -> FloatArray:
    """An unrelated source: each strategy has the step time of another."""
    return rng.permutation(log_step)


def plain(learner: Learner) -> Start:
    """A learner of ours that learns nothing."""
    return lambda table, _, seed: Ours(learner, Problem(table.space), seed)


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


@dataclass(frozen=True)
class Entry:
    """How a contestant enters.

    Attributes:
        start: Creates it for a game.
        alone: The contestant that plays the very same games where no table is related.
        library: What must be installed.
        wrong_source: Whether it has a related task that is wrong: the cost of negative transfer.
    """

    start: Start
    alone: str = ""
    library: str = ""
    wrong_source: bool = False


CONTESTANTS: dict[str, Entry] = {
    "random": Entry(plain(RandomLearner())),
    "sobol": Entry(plain(SobolLearner())),
    "optuna-tpe": Entry(optuna_sampler("TPESampler"), library="optuna"),
    "optuna-gp": Entry(optuna_sampler("GPSampler"), library="optuna"),
    "ax": Entry(Ax, library="ax"),
    "smac": Entry(Smac, library="smac"),
    "botorch": Entry(Mixed),
    "botorch-single": Entry(single_task),
    "botorch-multitask": Entry(multi_task, alone="botorch-single"),
    "rgpe": Entry(ranking_ensemble, alone="botorch-single"),
    "ours: gp": Entry(ours(cost=False, transfer=False)),
    "ours: gp + cost": Entry(ours(cost=True, transfer=False)),
    "ours: gp + transfer": Entry(ours(cost=False, transfer=True), alone="ours: gp"),
    "ours": Entry(ours(cost=True, transfer=True), alone="ours: gp + cost"),
    "ours: sources at means": Entry(
        ours(cost=True, transfer=True, form=OursAtMeans), alone="ours: gp + cost"
    ),
    "ours: gp + adversarial": Entry(with_wrong_source(adversarial, cost=False), wrong_source=True),
    "ours: gp + unrelated": Entry(with_wrong_source(unrelated, cost=False), wrong_source=True),
    "ours: gp + cost + adversarial": Entry(
        with_wrong_source(adversarial, cost=True), wrong_source=True
    ),
    "ours: gp + cost + unrelated": Entry(
        with_wrong_source(unrelated, cost=True), wrong_source=True
    ),
}
