"""Learners by name, and the part of the problem that each of them uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hvd_autosync.errors import ConfigurationError
from hvd_autosync.learner.base import Learner
from hvd_autosync.learner.baseline import RandomLearner
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.sobol import SobolLearner


@dataclass(frozen=True)
class LearnerSpec:
    """A learner that can be chosen by name.

    Attributes:
        help: A few words of description.
        make: Creates it.
        cost_model: Whether it uses the task, and so the cost model.
        sources: Whether it uses related studies.
    """

    help: str
    make: Callable[[], Learner]
    cost_model: bool = False
    sources: bool = False

    def restrict_problem(self, problem: Problem) -> Problem:
        """Return ``problem`` without what this learner does not use."""
        task = problem.task if self.cost_model else None
        sources = problem.sources if self.sources else ()
        if not self.cost_model:
            sources = tuple(replace(source, task=None) for source in sources)
        return replace(problem, task=task, sources=sources)


def _ours() -> Learner:
    from hvd_autosync.learner.bayesian import BayesianLearner

    return BayesianLearner()


def _optuna(sampler: str) -> Learner:
    from hvd_autosync.learner.optuna_samplers import OptunaLearner

    return OptunaLearner(sampler)


LEARNERS = {
    "transfer": LearnerSpec(
        "ours: cost model, related studies, GP", _ours, cost_model=True, sources=True
    ),
    "cost-model": LearnerSpec("ours without related studies", _ours, cost_model=True),
    "botorch": LearnerSpec("ours without cost model and related studies: a GP alone", _ours),
    "optuna-tpe": LearnerSpec("Optuna's multivariate TPE", lambda: _optuna("tpe")),
    "optuna-gp": LearnerSpec("Optuna's Gaussian process", lambda: _optuna("gp")),
    "sobol": LearnerSpec("a Sobol sequence", SobolLearner),
    "random": LearnerSpec("random search", RandomLearner),
}


def learner_spec(name: str) -> LearnerSpec:
    """Return the specification of the learner of that name.

    Raises:
        ConfigurationError: No learner has this name.
    """
    if name not in LEARNERS:
        raise ConfigurationError(
            f"no learner is called {name!r}", hint=f"Choose from {', '.join(LEARNERS)}."
        )
    return LEARNERS[name]
