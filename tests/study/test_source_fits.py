"""Fits of related studies that the store keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sqlalchemy import text

from hvd_autosync.learner import Observation, gp
from hvd_autosync.learner.gp import fit
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.runtime.measure import arithmetic
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.search_space.knobs import categorical_knob, float_knob
from hvd_autosync.study.source_fits import _key, keep_fits, with_known_fits
from hvd_autosync.traces import TraceStore
from hvd_autosync.traces.source_fits import find_fit


@pytest.fixture
def space() -> SearchSpace:
    return SearchSpace(
        (
            float_knob("cycle", 0.1, 100.0, 1.0, help="", scale="log"),
            categorical_knob("order", ("a", "b", "c"), "a", help=""),
        )
    )


def observed(space: SearchSpace, count: int) -> tuple[Observation, ...]:
    rng = np.random.default_rng(0)
    seen = []
    for point in sobol_points(space, count, seed=1):
        log_step = (point[0] - 0.3) ** 2 + 0.2 * point[1] + 0.02 * rng.standard_normal()
        seen.append(Observation(space.decode(point), math.exp(log_step), 0.01))
    return tuple(seen)


@pytest.fixture
def problem(space: SearchSpace) -> Problem:
    return Problem(space, sources=(Source("s0", None, space, observed(space, 20), 0.9),))


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    return TraceStore(f"sqlite:///{tmp_path / 'store.db'}")


def optimizations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each optimization of hyperparameters from now on."""
    made: list[int] = []
    original = gp._optimize

    def counted(model: gp.MultiTaskGP) -> None:
        made.append(1)
        original(model)

    monkeypatch.setattr(gp, "_optimize", counted)
    for cached in (gp._fit, gp._fit_source, gp._own_functions):
        cached.cache_clear()
    return made


def test_a_source_is_fitted_once_and_then_never(
    store: TraceStore, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = [Observation(problem.space.default, 1.0)]
    first = fit(problem, default).mean_at(sobol_points(problem.space, 30, seed=2))
    keep_fits(store, problem)
    made = optimizations(monkeypatch)
    known = with_known_fits(store, problem)
    again = fit(known, default)
    assert len(made) == 1  # the target's own
    monkeypatch.setattr(store, "keep_source_fit", None)  # nothing is written again
    keep_fits(store, known)
    assert np.array_equal(again.mean_at(sobol_points(problem.space, 30, seed=2)), first)


def test_other_trials_of_a_source_are_fitted_again(store: TraceStore, problem: Problem) -> None:
    keep_fits(store, problem)
    (source,) = problem.sources
    more = replace(source, observations=observed(problem.space, 21))
    changed = with_known_fits(store, replace(problem, sources=(more,)))
    assert changed.sources[0].hyperparameters == ()
    keep_fits(store, changed)
    kept = with_known_fits(store, changed).sources[0].hyperparameters
    assert kept and kept != with_known_fits(store, problem).sources[0].hyperparameters


@pytest.mark.parametrize("damaged", [[], ["x"], {"a": 1}, 3, [1.0]])
def test_a_damaged_fit_is_made_again(
    store: TraceStore, problem: Problem, damaged: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_fits(store, problem)
    from hvd_autosync.traces.schema import SOURCE_FITS

    with store._database.writing() as connection:
        connection.execute(SOURCE_FITS.update().values(hyperparameters=damaged))
    made = optimizations(monkeypatch)
    known = with_known_fits(store, problem)
    fit(known, [Observation(problem.space.default, 1.0)])
    assert len(made) == 2  # the source's and the target's
    keep_fits(store, known)
    assert len(with_known_fits(store, problem).sources[0].hyperparameters) == 7


@pytest.mark.parametrize(
    "damaged", ["garbage", f"[{'9' * 400}]", *(str(7 * [each]) for each in (700.0, -1e200))]
)
def test_a_fit_whose_text_is_damaged_is_made_again(
    store: TraceStore, problem: Problem, damaged: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is no JSON, and numbers of the right count that give no covariance."""
    keep_fits(store, problem)
    assert len(with_known_fits(store, problem).sources[0].hyperparameters) == 7
    points = sobol_points(problem.space, 5, seed=2)
    default = [Observation(problem.space.default, 1.0)]
    expected = fit(problem, default).mean_at(points)
    with store._database.writing() as connection:
        connection.execute(
            text("UPDATE hvd_autosync_source_fits SET hyperparameters = :damaged"),
            {"damaged": damaged},
        )
    made = optimizations(monkeypatch)
    again = fit(with_known_fits(store, problem), default)
    assert np.array_equal(again.mean_at(points), expected)
    assert len(made) == 2  # the source's and the target's


def test_a_fit_with_another_number_or_key_is_not_used(store: TraceStore, problem: Problem) -> None:
    keep_fits(store, problem)
    from hvd_autosync.traces.schema import SOURCE_FITS

    with store._database.writing() as connection:
        kept = connection.execute(SOURCE_FITS.select()).one().hyperparameters
        for values in ([kept["values"][0] * (1 + 1e-9), *kept["values"][1:]], kept["values"][:-1]):
            damaged = {**kept, "values": values}
            connection.execute(SOURCE_FITS.update().values(hyperparameters=damaged))
            assert find_fit(connection, "s0", _key(problem.sources[0])) is None
        connection.execute(SOURCE_FITS.update().values(hyperparameters=kept, key="0" * 64))
        assert find_fit(connection, "s0", "0" * 64) is None


def test_a_fit_of_another_processor_is_not_used(
    store: TraceStore, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where another one is made to be used; their kernels may differ in the last bits."""
    keep_fits(store, problem)
    changes = (
        lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other"),
        lambda patch: patch.setattr(arithmetic, "_processor", lambda: "other"),
        lambda patch: patch.setenv("OPENBLAS_CORETYPE", "other"),
    )
    for change in changes:
        assert with_known_fits(store, problem).sources[0].hyperparameters
        with monkeypatch.context() as patch:
            change(patch)
            assert with_known_fits(store, problem).sources[0].hyperparameters == ()


def test_a_deleted_study_leaves_no_fit(store: TraceStore, problem: Problem) -> None:
    study = store.create_study(job_key="k", command=["train.py"], settings={}, versions={})
    source = replace(problem.sources[0], study_id=study.study_id)
    mine = replace(problem, sources=(source,))
    keep_fits(store, mine)
    assert with_known_fits(store, mine).sources[0].hyperparameters
    store.delete(study.study_id)
    assert with_known_fits(store, mine).sources[0].hyperparameters == ()


def test_a_source_that_cannot_be_fitted_is_left_out(store: TraceStore, space: SearchSpace) -> None:
    wrong = (Observation(Strategy({"order": "z"}), 1.0),)
    problem = Problem(space, sources=(Source("s0", None, space, wrong, 0.9),))
    keep_fits(store, problem)
    assert with_known_fits(store, problem).sources[0].hyperparameters == ()
