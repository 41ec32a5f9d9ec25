"""BoTorch's models as contestants: one task, and several by ``MultiTaskGP``.

``n``: number of trials; ``d``: dimension of the space; ``k``: inputs of a model. They play on the
table's space without its conditions: numbers are positions between 0 and 1, and each choice is an
input of 0 or 1. Fits are capped at 75 iterations, which costs little likelihood and saves most of
the time. ``qLogNoisyExpectedImprovement`` is maximized as our own learner does it, over the same
candidates; :class:`Mixed` uses BoTorch's own optimizer of mixed spaces instead.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from botorch.acquisition.logei import qLogNoisyExpectedImprovement
from botorch.exceptions.errors import ModelFittingError
from botorch.fit import fit_gpytorch_mll
from botorch.models.gp_regression import SingleTaskGP
from botorch.models.gp_regression_mixed import MixedSingleTaskGP
from botorch.models.model import Model
from botorch.models.multitask import MultiTaskGP
from botorch.models.transforms.outcome import StratifiedStandardize
from botorch.optim.optimize_mixed import optimize_acqf_mixed_alternating
from botorch.posteriors.gpytorch import GPyTorchPosterior
from botorch.sampling.normal import SobolQMCNormalSampler
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from contest.contestant import Contestant
from contest.emulator import Emulator
from hvd_autosync.learner import Observation, SobolLearner
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.points import FloatArray, distinct, encode_all, keys
from hvd_autosync.learner.pool import candidate_pool, one_knob_away
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.learner.projection import project_onto_space
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Strategy

#: Trials, the default's among them, before a model without related tasks proposes; they are a
#: Sobol sequence.
_INITIAL = 6
_FIT_ITERATIONS = 75
_SAMPLES = 128
#: Tried points around which candidates are drawn; points whose neighbours each round of local
#: search scores, and the step lengths of the rounds: as in :mod:`hvd_autosync.learner.acquisition`.
_CENTERS, _TOP = 8, 5
_ROUNDS = ((0.1, 0.03), (0.03, 0.01), (0.01, 0.003))


class Modeller(Protocol):
    """Makes a model of a task's speed, minus the logarithm of the step time."""

    def inputs(self, points: FloatArray) -> Tensor:
        """The inputs of the model at points, ``n x d``; shape ``n x k``."""
        ...

    def model(self, points: FloatArray, log_step: FloatArray) -> Model:
        """The model of trials at points, ``n x d``, with these logarithms, ``(n,)``."""
        ...


class OnPool:
    """A contestant that maximizes the acquisition function of a model over our candidates.

    Args:
        space: The space.
        modeller: Makes the model before each trial.
        seed: Of the game.
        initial: Trials before the model is asked.
    """

    def __init__(self, space: SearchSpace, modeller: Modeller, seed: int, initial: int) -> None:
        self._space, self._modeller, self._seed, self._initial = space, modeller, seed, initial
        self._seen: list[Observation] = []

    def ask(self) -> Strategy:
        if len(self._seen) < self._initial:
            return sobol_strategy(self._space, self._seen, self._seed)
        points, log_step = trials_of(self._space, self._seen)
        seed = self._seed * 1000 + len(self._seen)
        with isolated(seed):
            model = self._modeller.model(points, log_step)
            with torch.no_grad():
                return self._space.decode(self._best(model, points, seed))

    def tell(self, seen: Observation) -> None:
        self._seen.append(seen)

    def _best(self, model: Model, tried: FloatArray, seed: int) -> FloatArray:
        """The untried candidate of the highest acquisition, after a local search; ``(d,)``."""
        inputs = self._modeller.inputs
        baseline = inputs(tried)
        acquisition = qLogNoisyExpectedImprovement(
            model,
            X_baseline=baseline,
            sampler=SobolQMCNormalSampler(torch.Size([_SAMPLES]), seed=seed),
            prune_baseline=True,
        )

        def score(points: FloatArray) -> FloatArray:
            values: FloatArray = acquisition(inputs(points).unsqueeze(-2)).numpy()
            return np.nan_to_num(values, nan=-np.inf)

        posterior = model.posterior(baseline)
        assert isinstance(posterior, GPyTorchPosterior), "all models here are Gaussian processes"
        speed = posterior.mean.squeeze(-1).numpy()
        centers = tried[np.argsort(-speed, kind="stable")][:_CENTERS]
        excluded = set(keys(tried))
        pool = distinct(candidate_pool(self._space, centers, seed)[0], excluded)
        scores = score(pool)
        for steps in _ROUNDS:
            order = np.argsort(-scores, kind="stable")[:_TOP]
            excluded.update(keys(pool))
            pool, scores = pool[order], scores[order]
            neighbours = distinct(one_knob_away(self._space, pool, steps), excluded)
            if len(neighbours):
                pool = np.concatenate([pool, neighbours])
                scores = np.concatenate([scores, score(neighbours)])
        best: FloatArray = pool[int(np.argmax(scores))]
        return best


class SingleTask:
    """``SingleTaskGP`` with its defaults; related tasks are not used."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space

    def inputs(self, points: FloatArray) -> Tensor:
        return zero_one(self._space, points)

    def model(self, points: FloatArray, log_step: FloatArray) -> Model:
        speed = -torch.from_numpy(log_step).unsqueeze(-1)
        return fitted(SingleTaskGP(self.inputs(points), speed))


class MultiTask:
    """``MultiTaskGP`` with its defaults, over the task and the related ones.

    Outcomes are standardized per task, as its documentation advises, so the inputs have the task's
    number as a last column.
    """

    def __init__(self, space: SearchSpace, sources: Sequence[Source]) -> None:
        self._space, self._sources = space, sources

    def inputs(self, points: FloatArray) -> Tensor:
        return self._of_task(zero_one(self._space, points), 0)

    def model(self, points: FloatArray, log_step: FloatArray) -> Model:
        x = torch.cat([self.inputs(points), *(x for x, _ in self._related)])
        y = torch.cat([-torch.from_numpy(log_step), *(y for _, y in self._related)])
        standardize = StratifiedStandardize(
            stratification_idx=-1, all_task_values=torch.arange(len(self._related) + 1)
        )
        return fitted(
            MultiTaskGP(
                x, y.unsqueeze(-1), task_feature=-1, output_tasks=[0], outcome_transform=standardize
            )
        )

    @cached_property
    def _related(self) -> list[tuple[Tensor, Tensor]]:
        """Inputs and speed of the trials of each related task."""
        trials = [related_trials(source, self._space) for source in self._sources]
        return [(self._of_task(x, task), y) for task, (x, y) in enumerate(trials, start=1)]

    @staticmethod
    def _of_task(inputs: Tensor, task: int) -> Tensor:
        return torch.cat([inputs, torch.full_like(inputs[:, :1], task)], dim=1)


def single_task(table: Emulator, _: tuple[Source, ...], seed: int) -> Contestant:
    """BoTorch's ``SingleTaskGP``."""
    return OnPool(table.space, SingleTask(table.space), seed, _INITIAL)


def multi_task(table: Emulator, sources: tuple[Source, ...], seed: int) -> Contestant:
    """BoTorch's ``MultiTaskGP``; without related tasks there is a single one."""
    if not sources:
        return single_task(table, sources, seed)
    return OnPool(table.space, MultiTask(table.space, sources), seed, initial=1)


class Mixed:
    """BoTorch's mixed GP, its acquisition function and its optimizer of mixed spaces."""

    def __init__(self, table: Emulator, _: tuple[Source, ...], seed: int) -> None:
        self._space, self._seed = table.space, seed
        self._seen: list[Observation] = []

    def ask(self) -> Strategy:
        if len(self._seen) < _INITIAL:
            return sobol_strategy(self._space, self._seen, self._seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self._propose()

    def tell(self, seen: Observation) -> None:
        self._seen.append(seen)

    def _propose(self) -> Strategy:
        torch.manual_seed(self._seed * 1000 + len(self._seen))
        points, log_step = trials_of(self._space, self._seen)
        lasts = _last_choices(self._space)
        upper = torch.ones(self._space.dimension, dtype=torch.float64)
        for index, last in lasts.items():
            upper[index] = last
        x = torch.from_numpy(points) * upper
        speed = -torch.from_numpy(log_step).unsqueeze(-1)
        model = fitted(MixedSingleTaskGP(x, speed, cat_dims=list(lasts)))
        point, _ = optimize_acqf_mixed_alternating(
            qLogNoisyExpectedImprovement(model, X_baseline=x),
            bounds=torch.stack([torch.zeros_like(upper), upper]),
            cat_dims={index: list(range(last + 1)) for index, last in lasts.items()},
            q=1,
            num_restarts=8,
            raw_samples=256,
        )
        return self._space.decode((point[0] / upper).numpy())


def fitted(model: SingleTaskGP | MultiTaskGP) -> SingleTaskGP | MultiTaskGP:
    """Fit a model in place; if that fails, its hyperparameters stay as they were."""
    with contextlib.suppress(ModelFittingError):
        fit_gpytorch_mll(
            ExactMarginalLogLikelihood(model.likelihood, model),
            optimizer_kwargs={"options": {"maxiter": _FIT_ITERATIONS}},
        )
    return model.eval()


def trials_of(
    space: SearchSpace, observations: Sequence[Observation]
) -> tuple[FloatArray, FloatArray]:
    """Points, ``n x d``, and logarithms of the step times, ``(n,)``."""
    points = encode_all(space, [one.strategy for one in observations])
    return points, np.array([one.log_step for one in observations])


def related_trials(source: Source, space: SearchSpace) -> tuple[Tensor, Tensor]:
    """Inputs, ``n x k``, and speed, ``(n,)``, of a related task's trials, in ``space``."""
    points, log_step = trials_of(source.space, source.observations)
    here = project_onto_space(source.space, points, space)
    return zero_one(space, here), -torch.from_numpy(log_step)


def zero_one(space: SearchSpace, points: FloatArray) -> Tensor:
    """Positions of numbers, and one input of 0 and 1 for each choice; ``n x k``."""
    columns = []
    for index, knob in enumerate(space.knobs):
        column = points[:, index]
        if isinstance(knob, CategoricalKnob):
            columns += [column == knob.to_unit(choice) for choice in knob.choices]
        else:
            columns.append(column)
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.float64))


def sobol_strategy(space: SearchSpace, seen: Sequence[Observation], seed: int) -> Strategy:
    """The next of a Sobol sequence."""
    suggestion = SobolLearner().suggest(Problem(space), seen, seed=seed)
    assert suggestion is not None, "the space is not that small"
    return suggestion.strategy


def _last_choices(space: SearchSpace) -> dict[int, int]:
    """Dimension of each categorical knob -> the number of its last choice."""
    return {
        index: len(knob.choices) - 1
        for index, knob in enumerate(space.knobs)
        if isinstance(knob, CategoricalKnob)
    }
