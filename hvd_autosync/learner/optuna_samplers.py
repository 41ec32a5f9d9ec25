"""Optuna's samplers as learners, for comparison on the same space and trials.

A sampler's proposals depend on the trials of its own study, so each call adds all trials to a new
study. Numeric knobs are searched on their scales, from 0 to 1.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.learner.base import Suggestion
from hvd_autosync.learner.baseline import RandomLearner
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.points import encode_all, keys
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.untried import excluded_keys
from hvd_autosync.search_space import CategoricalKnob, SearchSpace, Strategy, Value

#: Attempts to get a strategy that was not tried yet; after them a random one is proposed.
_ATTEMPTS = 20
#: A failed trial counts as twice as slow as the slowest measured one.
_FAILED = math.log(2.0)


class OptunaLearner:
    """Proposes with ``TPESampler`` (multivariate, as its authors recommend) or ``GPSampler``.

    Args:
        sampler: ``"tpe"`` or ``"gp"``.

    Raises:
        ConfigurationError: Optuna is not installed.
    """

    def __init__(self, sampler: str) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigurationError(
                f"optuna-{sampler} needs Optuna, which is not installed",
                hint="Install it: pip install optuna",
            ) from None
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.name = f"optuna-{sampler}"
        self._optuna = optuna
        self._sampler = sampler

    def suggest(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        pending: Sequence[Strategy] = (),
        *,
        seed: int,
    ) -> Suggestion | None:
        """See :class:`hvd_autosync.learner.base.Learner`."""
        space = problem.space
        excluded = excluded_keys(space, observations, pending)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna warns about experimental features
            study = self._study(space, observations, seed)
            for _ in range(_ATTEMPTS):
                strategy = self._strategy(space, study.ask())
                if excluded.isdisjoint(keys(encode_all(space, [strategy]))):
                    return Suggestion(strategy, self.name)
        return RandomLearner().suggest(problem, observations, pending, seed=seed)

    def _study(self, space: SearchSpace, observations: Sequence[Observation], seed: int) -> Any:
        optuna = self._optuna
        # Each call makes a new study, so the seed must differ; NumPy takes at most 32 bits.
        seed = (seed * 1000 + len(observations)) % 2**32
        sampler = (
            optuna.samplers.TPESampler(seed=seed, multivariate=True)
            if self._sampler == "tpe"
            else optuna.samplers.GPSampler(seed=seed)
        )
        study = optuna.create_study(sampler=sampler)
        slowest = max((o.log_step for o in observations if o.measured), default=0.0)
        for seen in observations:
            study.add_trial(
                optuna.trial.create_trial(
                    params=_parameters(space, seen.strategy),
                    distributions=self._distributions(space),
                    value=seen.log_step if seen.measured else slowest + _FAILED,
                )
            )
        return study

    def _distributions(self, space: SearchSpace) -> dict[str, Any]:
        kinds = self._optuna.distributions
        return {
            knob.name: kinds.CategoricalDistribution(knob.choices)
            if isinstance(knob, CategoricalKnob)
            else kinds.FloatDistribution(0.0, 1.0)
            for knob in space.knobs
        }

    def _strategy(self, space: SearchSpace, trial: Any) -> Strategy:
        chosen: dict[str, Value] = {}
        for knob in space.knobs:
            if isinstance(knob, CategoricalKnob):
                chosen[knob.name] = trial.suggest_categorical(knob.name, knob.choices)
            else:
                chosen[knob.name] = knob.from_unit(trial.suggest_float(knob.name, 0.0, 1.0))
        return space.complete(chosen)


def _parameters(space: SearchSpace, strategy: Strategy) -> dict[str, Value]:
    values = {}
    for knob in space.knobs:
        value = strategy.get(knob.name, knob.default)
        values[knob.name] = value if isinstance(knob, CategoricalKnob) else knob.to_unit(value)
    return values
