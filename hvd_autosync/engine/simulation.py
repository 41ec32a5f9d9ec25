"""Prediction of a tuned job on another cluster, by the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvd_autosync.cost import Calibration, CostModel, calibrate
from hvd_autosync.cost.hypothetical import hypothetical_resources
from hvd_autosync.cost.timeline import FloatArray
from hvd_autosync.errors import StudyError
from hvd_autosync.learner.points import distinct, sobol_points
from hvd_autosync.learner.pool import one_knob_away
from hvd_autosync.search_space import (
    ModelProfile,
    Resources,
    SearchSpace,
    Strategy,
    Value,
    build_space,
)
from hvd_autosync.search_space.catalogue import is_exact
from hvd_autosync.search_space.knobs import LOSSY_GROUPS, CategoricalKnob, Knob
from hvd_autosync.search_space.restrictions import fixed_knob
from hvd_autosync.study.related_studies import observations_of
from hvd_autosync.traces import StudyRecord, TrialRecord

_POINTS, _ROUNDS, _SCALES = 4096, 12, (0.3, 0.1, 0.03)
#: Number of posterior draws, and the quantiles of the reported interval.
_DRAWS, _INTERVAL = 200, (0.05, 0.95)


@dataclass(frozen=True)
class Range:
    """A prediction: the most likely value and a 90 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Simulation:
    """The predictions for one cluster.

    Attributes:
        resources: The cluster.
        compute_s: Seconds of a step without communication.
        default_s: Seconds of a step under the default strategy.
        best: The fastest strategy.
        best_s: Seconds of a step under it.
        speedup: The default's step time over that of the fastest strategy.
        space: The space that was searched.
        trials: Number of trials that calibrated the model.
        misfit: Standard deviation of the logarithm of measured over predicted step times.
        asked_s: Seconds of a step under the requested strategy, if there is one.
        asked_speedup: The default's step time over that of the requested strategy.
    """

    resources: Resources
    compute_s: float
    default_s: Range
    best: Strategy
    best_s: Range
    speedup: Range
    space: SearchSpace
    trials: int
    misfit: float
    asked_s: Range | None = None
    asked_speedup: Range | None = None


def simulate(
    study: StudyRecord,
    trials: Sequence[TrialRecord],
    resources: Resources,
    seed: int = 0,
    asked: Mapping[str, Value] | None = None,
) -> Simulation:
    """Predict the default's step time and the fastest strategy of a job on another cluster.

    Args:
        study: A study of the job.
        trials: Its trials, which calibrate the model on the cluster that they ran on.
        resources: The other cluster, with its links.
        seed: Seed of the search and the draws.
        asked: A further strategy to predict; it may be lossy.

    Raises:
        StudyError: The study has no measured trial.
        ConfigurationError: The study has no times of the model, or no links.
    """
    fixed = dict(study.space.fixed) if study.space is not None else {}
    observations = observations_of(study.space, trials) if study.space is not None else []
    seen = [
        ({**fixed, **one.strategy}, one.step_s)
        for one in observations
        if one.measured and one.step_s is not None
    ]
    if study.task is None or not seen:
        raise StudyError(
            f"study {study.study_id} has no measured trial",
            hint="Choose another study; hvd-autosync traces list shows them.",
        )
    model = study.task.model
    calibration = calibrate(
        CostModel(model, study.task.resources), [s for s, _ in seen], [t for _, t in seen]
    )
    space = _space(study, model, resources, fixed)
    elsewhere = CostModel(model, resources)
    best = _search(elsewhere, space, calibration, seed)
    one_rank = CostModel(model, hypothetical_resources(resources, 1, 1))
    alone = one_rank.predict([fixed], calibration.coefficients)
    draws = calibration.draws(_DRAWS, seed)
    default = {**fixed, **space.default}
    some = [default, {**fixed, **best}, *([] if asked is None else [{**fixed, **asked}])]
    drawn = np.array([elsewhere.predict(some, each) for each in draws])
    noise = calibration.misfit * np.random.default_rng(seed).standard_normal(drawn.shape)
    likely, drawn = elsewhere.predict(some, calibration.coefficients), drawn * np.exp(noise)
    times = [_range(likely[i], drawn[:, i]) for i in range(len(some))]
    gains = [_range(likely[0] / likely[i], drawn[:, 0] / drawn[:, i]) for i in range(len(some))]
    return Simulation(
        resources,
        float(alone[0]),
        times[0],
        best,
        times[1],
        gains[1],
        space,
        len(seen),
        calibration.misfit,
        *((times[2], gains[2]) if asked is not None else ()),
    )


def _space(
    study: StudyRecord, model: ModelProfile, resources: Resources, fixed: dict[str, Value]
) -> SearchSpace:
    """Return the space on the other cluster, as the script and the user restrict it."""
    if study.space is None or study.task is None:
        return build_space(model, resources, held=fixed)
    own = {knob.name: knob for knob in study.space.knobs}
    # A lossy default stays it, as that of a space file or of a training that was tuned live.
    lossy = {knob.group for knob in own.values() if not knob.exact}
    groups = () if is_exact(study.space.default) else tuple(sorted(lossy & set(LOSSY_GROUPS)))
    space = build_space(model, resources, held=fixed, allow=groups)
    known = build_space(model, study.task.resources, held=fixed, allow=groups)
    # The script or the user fixed the knobs that the study's cluster offers and its space lacks.
    offered = {knob.name: knob for knob in known.knobs}
    absent = offered.keys() - own.keys()
    knobs: dict[str, Knob] = {}
    for knob in space.knobs:
        parent_gone = knob.condition is not None and knob.condition.knob not in {*knobs, *fixed}
        if knob.name in absent or parent_gone or not (knob.exact or knob.name in own):
            continue
        here = offered.get(knob.name)
        knobs[knob.name] = knob if here is None else _as_restricted(knob, here, own[knob.name])
    return SearchSpace(tuple(knobs.values()), space.fixed, holds_job=study.space.holds_job)


def _as_restricted(knob: Knob, offered: Knob, own: Knob) -> Knob:
    """Return ``knob`` with the restrictions that lead from ``offered`` to ``own``, where possible.

    Args:
        knob: A knob of the other cluster.
        offered: The knob of the study's cluster.
        own: The knob of the study; a lossy one keeps its default.
    """
    own = own if own.exact else fixed_knob(own, own.default)
    default = knob.default if own.default == offered.default else own.default
    if isinstance(knob, CategoricalKnob):
        assert isinstance(offered, CategoricalKnob) and isinstance(own, CategoricalKnob)
        removed = [choice for choice in offered.choices if choice not in own.choices]
        kept = [choice for choice in knob.choices if choice not in removed] or [knob.default]
        restricted = knob.restrict(kept)
        return replace(restricted, default=default) if default in kept else restricted
    assert not isinstance(offered, CategoricalKnob) and not isinstance(own, CategoricalKnob)
    low = knob.low if own.low == offered.low else own.low
    high = knob.high if own.high == offered.high else own.high
    low, high, nearest = np.clip([low, high, float(default)], knob.low, knob.high).tolist()
    moved = replace(knob, default=type(knob.default)(nearest))
    return moved.restrict(low, high)


def _search(model: CostModel, space: SearchSpace, calibration: Calibration, seed: int) -> Strategy:
    """Return the model's fastest strategy: the best of a Sobol set, then a local search from it."""

    def seconds(points: FloatArray) -> FloatArray:
        strategies = [{**dict(space.fixed), **space.decode(point)} for point in points]
        return model.predict(strategies, calibration.coefficients)

    default = space.encode(space.default)[None, :]
    if not space.dimension:
        return space.default
    points = distinct(np.concatenate([default, sobol_points(space, _POINTS, seed)]))
    times = seconds(points)
    best, least = points[times.argmin()], times.min()
    for _ in range(_ROUNDS):
        near = one_knob_away(space, best[None, :], _SCALES)
        times = seconds(near)
        if not len(times) or times.min() >= least:
            break
        best, least = near[times.argmin()], times.min()
    return space.decode(best)


def _range(value: float, draws: FloatArray) -> Range:
    low, high = np.quantile(draws, _INTERVAL)
    return Range(float(value), float(low), float(high))
