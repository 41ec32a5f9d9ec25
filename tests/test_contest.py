"""The contestants of ``benchmarks/learners.py``: each plays, and peers do what their papers say."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import learners
from botorch.models import SingleTaskGP
from contest.botorch_peers import OnPool, SingleTask, fitted, multi_task, single_task
from contest.contestant import Start
from contest.contestants import CONTESTANTS
from contest.emulator import Emulator
from contest.ranking_ensemble import RankingEnsemble, misrankings, ranking_ensemble, ranking_weights

from hvd_autosync.learner import Observation
from hvd_autosync.learner.points import every_point, sobol_points
from hvd_autosync.search_space import SearchSpace
from hvd_autosync.search_space.knobs import categorical_knob, float_knob

TABLES = Path(__file__).parents[1] / "benchmarks" / "traces"
#: A table of few knobs, and one that is related to it.
TABLE, RELATED = "lm-100mbit", "resnet-100mbit"
#: One of each kind: no model, a library, GPs of BoTorch with related tasks, and ours.
SOME = ("random", "optuna-tpe", "botorch-multitask", "ours")


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with two small tables."""
    folder = tmp_path_factory.mktemp("tables")
    for name in (TABLE, RELATED):
        file = f"{name}.jsonl.gz"
        (folder / file).symlink_to(TABLES / file)
    return str(folder)


@pytest.fixture(scope="session")
def table(tables: str) -> Emulator:
    return learners.emulators(tables)[TABLE]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in SOME else pytest.mark.wide) for name in CONTESTANTS],
)
def test_each_contestant_plays(name: str, tables: str) -> None:
    entry = CONTESTANTS[name]
    if entry.library:
        pytest.importorskip(entry.library)
    trials = 3 if entry.alone or entry.wrong_source else 8  # others begin with a Sobol sequence
    game = learners.play(tables, TABLE, name, 0, trials)
    assert [row["trial"] for row in game] == list(range(trials))
    regrets = [float(row["best_regret"]) for row in game]
    assert regrets == sorted(regrets, reverse=True) and math.isfinite(regrets[0])


def test_the_acquisition_function_is_maximized() -> None:
    """After 20 trials without noise the proposal is at the minimum of a parabola."""
    knobs = (float_knob(name, 0.0, 1.0, 0.9, help="") for name in "ab")
    space = SearchSpace((*knobs, categorical_knob("c", ("x", "y"), "x", help="")))
    player = OnPool(space, SingleTask(space), 0, 1)
    for point in sobol_points(space, 20, 0):
        strategy = space.decode(point)
        distance = (strategy["a"] - 0.3) ** 2 + (strategy["b"] - 0.7) ** 2
        player.tell(Observation(strategy, math.exp(2 * distance + (strategy["c"] == "x"))))
    proposed = player.ask()
    assert proposed["c"] == "y"
    assert proposed["a"] == pytest.approx(0.3, abs=0.05)
    assert proposed["b"] == pytest.approx(0.7, abs=0.05)


def test_no_strategy_is_tried_twice() -> None:
    """The last of nine is proposed, however slow it must be."""
    space = SearchSpace(
        (
            categorical_knob("a", ("x", "y", "z"), "x", help=""),
            categorical_knob("b", ("x", "y", "z"), "x", help=""),
        )
    )
    points = every_point(space)
    assert points is not None and len(points) == 9
    player = OnPool(space, SingleTask(space), 0, 1)
    for point in points[:-1]:
        strategy = space.decode(point)
        player.tell(Observation(strategy, 1.0 + (strategy["a"] == "z") + (strategy["b"] == "z")))
    assert player.ask() == space.decode(points[-1])


@pytest.mark.slow
@pytest.mark.parametrize("start", [multi_task, ranking_ensemble])
def test_related_tasks_are_used_from_the_first_trial_on(
    start: Start, tables: str, table: Emulator
) -> None:
    """Without any they play as the GP of one task."""
    players = [
        start(table, learners.related_to(tables, TABLE), 0),
        start(table, (), 0),
        single_task(table, (), 0),
    ]
    for player in players:
        player.tell(table.measure(table.space.default, 0, 0))
    with_sources, without, single = (player.ask() for player in players)
    assert with_sources != without == single


def test_pairs_that_a_sample_ranks_wrongly_are_counted() -> None:
    rng = np.random.default_rng(0)
    samples, speed = rng.normal(size=(5, 6)), rng.normal(size=6)
    expected = [
        sum(
            (one[i] < one[j]) != (speed[i] < speed[j])
            for i, j in itertools.product(range(6), repeat=2)
        )
        for one in samples
    ]
    of_samples, measured = torch.from_numpy(samples), torch.from_numpy(speed)
    found = misrankings(of_samples, of_samples, measured, measured)
    assert found.tolist() == expected


def rising(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(2 * x[:, 0]) + x[:, 1] ** 2


def model_of(x: torch.Tensor, speed: torch.Tensor) -> SingleTaskGP:
    standardized = (speed - speed.mean()) / speed.std()
    return fitted(SingleTaskGP(x, standardized.unsqueeze(-1), outcome_transform=None))


@pytest.fixture(scope="session")
def related_models() -> list[SingleTaskGP]:
    """A task of the same function on another scale, and one of the opposite."""
    x = torch.rand(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return [model_of(x, 5 + 3 * rising(x)), model_of(x, -rising(x))]


@pytest.mark.parametrize("trials", [1, 2])
def test_before_there_is_anything_to_rank_related_tasks_weigh_the_same(
    trials: int, related_models: list[SingleTaskGP]
) -> None:
    x = torch.rand(trials, 2, dtype=torch.float64)
    own = SingleTaskGP(x, rising(x).unsqueeze(-1), outcome_transform=None)
    weights = ranking_weights([*related_models, own], x, rising(x))
    assert weights.tolist() == [0.5, 0.5, 0.0]


def test_who_ranks_the_trials_as_they_were_measured_has_the_weight(
    related_models: list[SingleTaskGP],
) -> None:
    torch.manual_seed(0)
    x = torch.rand(8, 2, dtype=torch.float64)
    weights = ranking_weights([*related_models, model_of(x, rising(x))], x, rising(x))
    assert weights.sum() == pytest.approx(1.0)
    same, opposite, own = weights.tolist()
    assert same > 0.5 > own and opposite == 0.0


def test_what_no_related_task_has_seen_is_left_to_the_own_model(
    related_models: list[SingleTaskGP],
) -> None:
    torch.manual_seed(0)
    x = torch.rand(25, 2, dtype=torch.float64)
    speed = torch.cos(9 * x[:, 0])
    assert ranking_weights([*related_models, model_of(x, speed)], x, speed)[-1] > 0.9


def test_the_ensemble_is_the_weighted_sum(related_models: list[SingleTaskGP]) -> None:
    x = torch.rand(4, 5, 2, dtype=torch.float64)
    weights = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64)
    found = RankingEnsemble([*related_models, related_models[0]], weights).posterior(x)
    first, second = (model.posterior(x) for model in related_models)
    assert torch.allclose(found.mean, 0.25 * first.mean + 0.75 * second.mean)
    variance = 0.25**2 * first.variance + 0.75**2 * second.variance
    assert torch.allclose(found.variance, variance)
