"""What other tasks teach of the next one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvd_autosync.learner import Observation, fit, hyperprior, hyperprior_learning
from hvd_autosync.learner.hyperprior import SHIPPED, Hyperprior
from hvd_autosync.learner.hyperprior_learning import held_out_scores, learn
from hvd_autosync.learner.points import sobol_points
from hvd_autosync.learner.problem import Problem, Source
from hvd_autosync.search_space import ModelProfile, Resources, SearchSpace, Task

_TABLES = Path(__file__).parents[2] / "benchmarks" / "traces"


def measured(
    space: SearchSpace, name: str, noise: float, count: int = 50, repeated: int = 25
) -> Source:
    """A task whose log step times vary by a half over strategies, with repeated trials."""
    rng = np.random.default_rng(len(name))
    points = sobol_points(space, count, seed=len(name))
    points = np.concatenate([points, points[:repeated]])
    seen = []
    for point in points:
        log_step = 1.5 * (point[0] - 0.4) ** 2 + 0.8 * (point[1] - 0.2) ** 2 + point[5]
        log_step += noise * rng.standard_normal()
        seen.append(Observation(space.decode(point), math.exp(log_step)))
    return Source(name, None, space, tuple(seen), 1.0)


def test_the_noise_between_launches_is_that_of_repetitions(mixed_space: SearchSpace) -> None:
    tasks = [measured(mixed_space, name, 0.2) for name in ("a", "bb", "ccc")]
    learned = learn(tasks, "2026-01-01", "made up")
    assert learned.launch_noise == pytest.approx(0.2, rel=0.2)
    assert learned.launch_noise_deviation >= 1.3  # however alike the tasks of one cluster are
    quiet = learn([measured(mixed_space, name, 0.02) for name in ("a", "bb", "ccc")], "", "")
    assert quiet.launch_noise == pytest.approx(0.02, rel=0.2)


def test_the_noise_of_steps_is_not_counted_as_noise_between_launches(
    mixed_space: SearchSpace,
) -> None:
    """The model adds the known noise of each trial to what is learned here."""
    tasks = []
    for name in ("a", "bb", "ccc"):
        task = measured(mixed_space, name, math.hypot(0.1, 0.1), count=200, repeated=200)
        known = [
            replace(seen, standard_error_s=0.1 * math.exp(seen.log_step))
            for seen in task.observations
        ]
        tasks.append(replace(task, observations=tuple(known)))
    assert learn(tasks, "", "").launch_noise == pytest.approx(0.1, rel=0.2)


def test_three_tasks_are_too_few_to_leave_one_out(mixed_space: SearchSpace) -> None:
    tasks = [measured(mixed_space, name, 0.1) for name in ("a", "bb", "ccc")]
    assert list(held_out_scores(tasks, "", "")) == []


def test_what_no_task_can_tell_stays(mixed_space: SearchSpace) -> None:
    """These tasks have no cost model, no related task and no repetitions."""
    tasks = [measured(mixed_space, name, 0.02, repeated=0) for name in ("a", "bb", "ccc")]
    learned = learn(tasks, "2026-01-01", "made up")
    for name in ("launch_noise", "unexplained_spread", "cost_deviation", "source_deviation"):
        assert getattr(learned, name) == getattr(SHIPPED, name)
    assert learned.spread != SHIPPED.spread


def test_sources_of_negative_transfer_count_too(
    mixed_space: SearchSpace,
    model: ModelProfile,
    slow_network: Resources,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Source selection drops them where they are used, which would leave those that agree."""
    monkeypatch.setattr(hyperprior_learning, "similarity", lambda *_: 1.0)
    tasks = []
    for number, name in enumerate(("one", "twin", "foreign")):
        task = measured(mixed_space, "a", 0.02, count=25, repeated=0)
        if name == "foreign":
            foreign = [
                replace(seen, step_s=math.exp(float(mixed_space.encode(seen.strategy)[2])))
                for seen in task.observations
            ]
            task = replace(task, observations=tuple(foreign))
        other = replace(model, parameters=model.parameters[number:])
        tasks.append(replace(task, study_id=name, task=Task(other, slow_network)))
    foreign_to_all = tasks[-1]
    problem = Problem(foreign_to_all.space, foreign_to_all.task, (tasks[0],))
    assert fit(problem, foreign_to_all.observations).dropped
    assert not fit(problem, foreign_to_all.observations, select_sources=False).dropped
    for task in tasks:
        assert len(hyperprior_learning._estimates(task, tasks).source_weights) == 2


def test_provenance_names_the_tasks_and_counts_their_trials(mixed_space: SearchSpace) -> None:
    tasks = [measured(mixed_space, name, 0.1) for name in ("a", "bb", "ccc")]
    few = replace(tasks[0], study_id="few", observations=tasks[0].observations[:19])
    learned = learn([*tasks, few], "2026-01-01", "made up")
    assert learned.provenance.tasks == ("a", "bb", "ccc")
    assert (learned.provenance.trials, learned.provenance.note) == (225, "made up")
    with pytest.raises(ValueError, match="2 tasks with 20 measured trials"):
        learn([*tasks[:2], few], "2026-01-01", "made up")


def test_a_task_is_predicted_by_what_the_others_teach(
    mixed_space: SearchSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks are far noisier than the shipped hyperprior expects; the others tell."""
    monkeypatch.setattr(hyperprior_learning, "SHIPPED", replace(SHIPPED, launch_noise=1e-4))
    tasks = [measured(mixed_space, name, 0.3) for name in ("a", "bb", "ccc", "dddd")]
    taught: list[tuple[str, ...]] = []
    original = hyperprior_learning.learn

    def watched(others: list[Source], *words: str) -> Hyperprior:
        taught.append(tuple(each.study_id for each in others))
        return original(others, *words)

    monkeypatch.setattr(hyperprior_learning, "learn", watched)
    scores = list(held_out_scores(tasks, "", ""))
    assert [name for name, _, _ in scores] == ["a", "bb", "ccc", "dddd"]
    assert all(name not in others for (name, _, _), others in zip(scores, taught, strict=True))
    assert sum(learned for _, _, learned in scores) > sum(shipped for _, shipped, _ in scores)


def test_the_shipped_hyperprior_says_what_it_is_learned_from() -> None:
    names = {path.name.partition(".")[0] for path in _TABLES.glob("*.jsonl.gz")}
    assert set(SHIPPED.provenance.tasks) == names
    path = Path(hyperprior.__file__).with_name("hyperprior.json")
    assert Hyperprior.from_json(json.loads(path.read_text())) == SHIPPED
