"""``benchmarks/acquisition_search.py``: both searches maximize the same function."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import acquisition_search
from acquisition_search import Arena, State, measure, show
from contest.alternating import Coordinates, OverCoordinates, alternating

from hvd_autosync.learner import Observation, acquisition
from hvd_autosync.learner.gp import fit
from hvd_autosync.learner.numerics import isolated
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.learner.problem import Problem
from hvd_autosync.learner.surrogate import Surrogate
from hvd_autosync.search_space import Condition, SearchSpace
from hvd_autosync.search_space.knobs import categorical_knob, float_knob, integer_knob

TABLES = Path(__file__).parents[1] / "benchmarks" / "traces"
SPACE = SearchSpace(
    (
        float_knob("cycle", 0.1, 100.0, 1.0, help="", scale="log"),
        integer_knob("fusion", 0, 1 << 28, 1 << 27, help="", scale="log", log_offset=65536.0),
        integer_knob("streams", 1, 4, 1, help=""),
        categorical_knob("codec", ("none", "fp16", "int8"), "none", help=""),
        float_knob("rate", 0.0, 1.0, 0.5, help="", condition=Condition("codec", ("int8",))),
        categorical_knob("only", ("one",), "one", help=""),
    )
)


@pytest.fixture
def surrogate() -> Surrogate:
    """Of a parabola in the logarithm of the cycle, lower for int8."""
    seen = []
    for point in sobol_points(SPACE, 12, 0):
        strategy = SPACE.decode(point)
        log_step = 2 * (point[0] - 0.3) ** 2 - 0.5 * (strategy["codec"] == "int8")
        seen.append(Observation(strategy, math.exp(log_step)))
    return fit(Problem(SPACE), seen)


@pytest.fixture
def over(surrogate: Surrogate) -> OverCoordinates:
    with isolated(), torch.no_grad():
        return OverCoordinates(surrogate, sobol_points(SPACE, 12, 0), 0)


def test_coordinates_and_points_are_the_same_strategies() -> None:
    coordinates = Coordinates(SPACE)
    points = sobol_points(SPACE, 50, 3)
    assert np.array_equal(coordinates.points(coordinates.of(points).numpy()), points)
    assert coordinates.bounds[1].tolist() == [1, 1, 1, 2, 1, 1]
    assert coordinates.categories == {3: [0, 1, 2]}
    assert coordinates.fixed == {5: 0.0}
    assert coordinates.discrete == {2: pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])}


def test_choices_are_rounded_and_numbers_are_not() -> None:
    default = SPACE.encode(SPACE.default)
    given = np.array([[0.1234567, 0.7, 0.4, 1.8, 0.25, 0.0], [0.1, 0.7, 0.4, 1.2, 0.25, 0.0]])
    points = Coordinates(SPACE).points(given)
    assert points[0].tolist() == [0.1234567, 0.7, 0.4, 1.0, 0.25, 0.0]
    assert points[1].tolist() == [0.1, 0.7, 0.4, 0.5, default[4], 0.0]  # the rate is switched off


def test_the_model_is_the_surrogate(over: OverCoordinates) -> None:
    points = sobol_points(SPACE, 9, 5)
    mean, covariance = over.surrogate.joint_at(points)
    found = over.model.posterior(over.surrogate.inputs(points)).distribution
    assert found.mean.tolist() == pytest.approx(mean.tolist())
    assert found.covariance_matrix.detach().numpy() == pytest.approx(covariance, abs=1e-9)


def test_derivatives_are_those_of_the_function(over: OverCoordinates) -> None:
    """With respect to numbers; of a number that is switched off they are 0."""
    place = torch.tensor([[[0.4, 0.6, 0.3, 2.0, 0.7, 0.0]], [[0.4, 0.6, 0.3, 1.0, 0.7, 0.0]]])
    place = place.double().requires_grad_()
    (found,) = torch.autograd.grad(over(place).sum(), place)
    for index in range(SPACE.dimension):
        step = torch.zeros(SPACE.dimension, dtype=torch.float64)
        step[index] = 1e-5
        with torch.no_grad():
            slope = (over(place + step) - over(place - step)) / 2e-5
        assert found[:, 0, index].tolist() == pytest.approx(slope.tolist(), rel=1e-3, abs=1e-6)
    assert found[0, 0, 4] != 0.0 == found[1, 0, 4]


def test_botorch_finds_the_best_of_a_strategy(over: OverCoordinates) -> None:
    with isolated(0):
        point = alternating(over, restarts=2, raw_samples=32)
    strategy = SPACE.decode(point)
    assert np.array_equal(point, SPACE.encode(strategy))
    assert strategy["codec"] == "int8" and point[0] == pytest.approx(0.3, abs=0.1)


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small tables in place of all."""
    for name in ("lm-100mbit", "resnet-100mbit"):
        (tmp_path / f"{name}.jsonl.gz").symlink_to(TABLES / f"{name}.jsonl.gz")
    monkeypatch.setattr(acquisition_search, "TABLES", tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("tables")
def test_what_is_in_the_file_is_not_searched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(acquisition_search.SEARCHES, "botorch-2", (1, 16))
    output = tmp_path / "found.csv"
    output.write_text(",".join(acquisition_search._COLUMNS) + "\n")
    states = [State("lm-100mbit", model, 5, 0) for model in acquisition_search.MODELS]
    measure(states[:1], ["botorch-2"], str(output))
    first = output.read_text()
    measure(states, ["botorch-2"], str(output))
    assert output.read_text().startswith(first)
    rows = list(csv.DictReader(output.open()))
    assert [(row["model"], row["search"]) for row in rows] == [
        (model, search) for model in ("knobs", "priors") for search in ("ours", "botorch-2")
    ]
    assert all(float(row["cpu_s"]) > 0 and row["commit"] for row in rows)
    show(str(output))
    assert "botorch-2" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("tables")
def test_a_search_of_another_function_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(State("lm-100mbit", "knobs", 5, 0))
    with monkeypatch.context() as patched:
        patched.setattr(acquisition, "_SAMPLES", 64)
        assert arena._acquisition is not None  # it is kept
    with pytest.raises(RuntimeError, match="not the same function"):
        arena.search("ours")
