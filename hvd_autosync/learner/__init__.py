"""The learner: proposes strategies, decides when to stop and what to confirm, explains the winner.

A Gaussian process of the log step time over the mixed space (:func:`fit`) predicts every strategy
from the observations; the cost model and related tasks are its prior mean.
:class:`BayesianLearner` proposes the strategy with the highest expected improvement, weighted by
the probability that its trial can be measured and divided by the seconds of the trial.
:func:`expected_gain`, :func:`best_tried` and :func:`knob_effects` use the same model. Everything
here is a pure function of the observations and a seed.

Names are imported at first use, because importing the model's libraries takes seconds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_autosync.learner.base import Learner, Suggestion
    from hvd_autosync.learner.baseline import RandomLearner
    from hvd_autosync.learner.bayesian import BayesianLearner
    from hvd_autosync.learner.candidates import best_tried, expected_savings, worth_confirming
    from hvd_autosync.learner.effects import KnobEffect, knob_effects
    from hvd_autosync.learner.gp import fit
    from hvd_autosync.learner.importance import knob_importance
    from hvd_autosync.learner.observation import Observation
    from hvd_autosync.learner.problem import Problem, Source
    from hvd_autosync.learner.sobol import SobolLearner
    from hvd_autosync.learner.stopping import expected_gain
    from hvd_autosync.learner.surrogate import Surrogate

_MODULES = {
    "BayesianLearner": "bayesian",
    "KnobEffect": "effects",
    "Learner": "base",
    "Observation": "observation",
    "Problem": "problem",
    "RandomLearner": "baseline",
    "SobolLearner": "sobol",
    "Suggestion": "base",
    "Source": "problem",
    "Surrogate": "surrogate",
    "best_tried": "candidates",
    "expected_gain": "stopping",
    "expected_savings": "candidates",
    "fit": "gp",
    "knob_effects": "effects",
    "knob_importance": "importance",
    "worth_confirming": "candidates",
}
__all__ = [
    "BayesianLearner",
    "KnobEffect",
    "Learner",
    "Observation",
    "Problem",
    "RandomLearner",
    "SobolLearner",
    "Source",
    "Suggestion",
    "Surrogate",
    "best_tried",
    "expected_gain",
    "expected_savings",
    "fit",
    "knob_effects",
    "knob_importance",
    "worth_confirming",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
