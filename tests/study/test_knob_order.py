"""The order in which a strategy's knobs are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvd_autosync.learner import Suggestion
from hvd_autosync.learner.observation import Observation
from hvd_autosync.learner.problem import Problem
from hvd_autosync.reporting.closing import answer_line
from hvd_autosync.reporting.listing import trials_table
from hvd_autosync.reporting.tuning_progress import TuningProgress
from hvd_autosync.search_space import (
    ModelProfile,
    RankReport,
    Resources,
    SearchSpace,
    Strategy,
    Task,
    TrialResult,
    TrialStatus,
    build_space,
)
from hvd_autosync.study.knob_order import KNOB_ORDER, knobs_by_effect, with_knob_order
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import StudySettings

#: What matters is the last of these in the catalogue, the first does nothing.
NOTHING, LITTLE, MUCH = "cycle_time_ms", "cache_capacity", "buckets"


def seconds(values: Strategy) -> float:
    return 0.1 * (0.6 if values.get(MUCH) else 1.0) * (0.95 if values.get(LITTLE) == 0 else 1.0)


def tried(space: SearchSpace) -> list[Observation]:
    moves = [{}, {NOTHING: 5.0}, {LITTLE: 0}, {MUCH: 8}, {NOTHING: 5.0, LITTLE: 0, MUCH: 8}]
    strategies = [space.complete(Strategy(move)) for move in moves]
    return [Observation(strategy, seconds(strategy)) for strategy in strategies]


def the_space(model: ModelProfile, slow_network: Resources) -> SearchSpace:
    space = build_space(model, slow_network)
    names = [knob.name for knob in space.knobs]
    assert names.index(NOTHING) < names.index(LITTLE) < names.index(MUCH)
    return space


def test_knobs_come_in_the_order_of_their_effects(
    model: ModelProfile, slow_network: Resources
) -> None:
    space = the_space(model, slow_network)
    order = knobs_by_effect(space, tried(space))
    assert order[:2] == (MUCH, LITTLE) and sorted(order) == sorted(k.name for k in space.knobs)
    ordered = replace(space, shown_first=order)
    line = ordered.describe(tried(space)[-1].strategy)
    assert [part.partition("=")[0] for part in line.split(", ")] == [MUCH, LITTLE, NOTHING]
    assert (ordered, ordered.key) == (space, space.key), "it is the same space"


def test_without_trials_the_order_is_the_catalogues(
    model: ModelProfile, slow_network: Resources
) -> None:
    space = the_space(model, slow_network)
    names = tuple(knob.name for knob in space.knobs)
    assert knobs_by_effect(space, []) == names
    assert knobs_by_effect(space, tried(space)[:1]) == names
    assert knobs_by_effect(space, tried(space)[3:4]) == names, "the default was not measured"
    failed = Observation(space.default, None)
    assert knobs_by_effect(space, [failed, *tried(space)[3:]]) == names


class Scripted:
    """Proposes strategies whose knobs can be told apart, whatever was measured."""

    name = "scripted"

    def suggest(
        self,
        problem: Problem,
        observations: Sequence[Observation],
        pending: Sequence[Strategy] = (),
        *,
        seed: int,
    ) -> Suggestion | None:
        moves = [{NOTHING: 5.0}, {LITTLE: 0}, {MUCH: 8}, {NOTHING: 5.0, MUCH: 8}]
        moves += [{LITTLE: 0, MUCH: count} for count in (4, 8, 16)]
        known = {seen.strategy for seen in observations}
        strategies = [problem.space.complete(Strategy(move)) for move in moves]
        left = [strategy for strategy in strategies if strategy not in known]
        return Suggestion(left[0], "sobol") if left else None


def test_tables_progress_and_the_answer_show_what_matters_first(
    model: ModelProfile, slow_network: Resources, tmp_path: Path
) -> None:
    space = the_space(model, slow_network)
    study = AskTellStudy.create(
        space,
        store=str(tmp_path / "traces.db"),
        settings=StudySettings(trials=10, seed=1),
        task=Task(model, slow_network),
        learner=Scripted(),
    )
    standing = TuningProgress()
    standing.start(study)
    while (trial := study.ask()) is not None:
        steps = (seconds(space.complete(trial.strategy)),) * 12
        result = TrialResult(TrialStatus.COMPLETED, "", (RankReport(0, "a", steps),), 2, 1.0, 2.0)
        study.tell(trial, result)
        standing.end(study, trial, result)
    assert study.record.outcome is not None
    assert study.record.outcome[KNOB_ORDER][:1] == [MUCH]
    assert answer_line(study.record).partition("): ")[2].startswith(f"{MUCH}=")
    *_, shown = trials_table(study.record, study.history).columns
    for lines in (list(shown.cells), [ended.strategy for ended in standing.ended][-6:]):
        with_it = [str(line) for line in lines if f"{MUCH}=" in str(line)]
        assert with_it and all(line.startswith(f"{MUCH}=") for line in with_it)

    damaged = replace(study.record, outcome={**study.record.outcome, KNOB_ORDER: [3, {}]})
    ordered = with_knob_order(damaged, study.history).space
    assert ordered is not None and ordered.shown_first[0] == MUCH
