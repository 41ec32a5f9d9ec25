"""The loop on a simulated job: a step time that depends on the strategy, plus noise."""

import gzip
import itertools
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_autosync.engine.replay import verify
from hvd_autosync.errors import ConfigurationError, NotOwnerError, StudyError, TraceFormatError
from hvd_autosync.learner import BayesianLearner
from hvd_autosync.learner.base import Suggestion
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import (
    RankReport,
    SearchSpace,
    Strategy,
    TrialResult,
    TrialStatus,
    restrict_space,
)
from hvd_autosync.search_space.knobs import categorical_knob, float_knob, integer_knob
from hvd_autosync.search_space.trial import OUT_OF_TIME
from hvd_autosync.study import study as study_module
from hvd_autosync.study.budget import FEWEST_TRIALS, Budget
from hvd_autosync.study.candidate_selection import CandidateSelection, may_be_used, pruned
from hvd_autosync.study.confirm import Confirmation
from hvd_autosync.study.decision import Decision
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.related_studies import is_unknown, observations_of
from hvd_autosync.study.study import AskTellStudy, counted
from hvd_autosync.study.values import Conclusion, StudySettings, Trial
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import StudyStatus, TraceStore, TrialRecord, rows
from hvd_autosync.traces.owner import HEARTBEAT_LIMIT_S

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"

SPACE = SearchSpace(
    (
        float_knob("cycle_time_ms", 0.1, 100.0, 1.0, scale="log", help=""),
        categorical_knob("compression", ("none", "fp16"), "none", help="", exact=False),
    )
)


class SimulatedJob:
    """Steps of ``base * gain`` seconds; launches differ by 1 %, steps by 3 %.

    With ``ruinous`` fp16 multiplies that by ``coded``, and its losses do not fall.
    """

    def __init__(
        self, gain: float = 0.8, seed: int = 0, *, ruinous: bool = False, coded: float = 0.5
    ) -> None:
        self.gain = gain
        self.rng = np.random.default_rng(seed)
        self.ruinous = ruinous
        self.coded = coded

    def result(self, trial: Trial) -> TrialResult:
        coded = SPACE.complete(trial.strategy)["compression"] == "fp16"
        factor = self.coded if coded and self.ruinous else 1.0
        steps = tuple(factor * second for second in self.steps(trial.strategy))
        losses = tuple(
            1.0 + 0.01 * trial.seed + (1.0 if coded and self.ruinous else math.exp(-step / 10))
            for step in range(trial.steps or 40)
        )
        report = RankReport(0, "", steps, (), losses)
        return TrialResult(TrialStatus.COMPLETED, ranks=(report,))

    def steps(self, strategy: Strategy) -> list[float]:
        values = SPACE.complete(strategy)
        distance = abs(math.log(float(values["cycle_time_ms"]) / 10)) / math.log(10)
        mean = 0.1 * (self.gain + (1 - self.gain) * min(distance, 2.0))
        mean *= math.exp(self.rng.normal(0, 0.01))
        return [float(s) for s in mean * np.exp(self.rng.normal(0, 0.03, 40))]


def finish(study: AskTellStudy, job: SimulatedJob) -> Conclusion:
    while (trial := study.ask()) is not None:
        study.tell(trial, job.result(trial))
    assert study.conclusion is not None
    return study.conclusion


def study(tmp_path: Path, space: SearchSpace = SPACE, **settings: object) -> AskTellStudy:
    return AskTellStudy.create(
        space, store=str(tmp_path / "traces.db"), settings=StudySettings(**settings)
    )


def test_a_gain_is_found_and_its_interval_holds_the_truth(tmp_path: Path) -> None:
    conclusion = finish(study(tmp_path, trials=12), SimulatedJob(gain=0.8))
    best = conclusion.best
    assert best is not None and best.proven
    truth = 1 / (0.8 + 0.2 * min(abs(math.log10(float(best.strategy["cycle_time_ms"]) / 10)), 2))
    assert best.low - 0.03 < truth < best.high + 0.03
    assert best.speedup > 1.15


def test_the_step_times_of_the_conclusion_are_those_of_the_confirmation(tmp_path: Path) -> None:
    """The first trial of the default may have met a busy machine."""
    job, one = SimulatedJob(gain=0.8), study(tmp_path, trials=8)
    first = one.ask()
    assert first is not None
    one.tell(first, [1.3 * second for second in job.steps(first.strategy)])
    conclusion = finish(one, job)
    confirmed: dict[Strategy, list[float]] = {}
    for trial in one.history:
        if trial.kind == "confirm" and trial.result is not None and trial.result.step_time:
            times = confirmed.setdefault(SPACE.complete(trial.strategy), [])
            times.append(trial.result.step_time.mean_s)
    assert conclusion.best is not None
    rounds = conclusion.best.rounds
    for strategy, found in (
        (SPACE.default, conclusion.default_s),
        (SPACE.complete(conclusion.winner), conclusion.winner_s),
    ):
        assert found == pytest.approx(geometric_mean(confirmed[strategy][:rounds]))


def test_a_strategy_that_the_guard_has_ended_cannot_win(tmp_path: Path) -> None:
    before = finish(study(tmp_path, trials=12, seed=3), SimulatedJob(gain=0.8)).winner
    again = study(tmp_path, trials=12, seed=3, excluded=(before,))
    conclusion = finish(again, SimulatedJob(gain=0.8))
    assert before in [trial.strategy for trial in again.history], "it may still be tried"
    assert before not in [each.strategy for each in conclusion.comparisons]
    assert StudySettings.from_json(again.record.settings).excluded == (before,)


def test_what_was_cut_short_as_slower_than_the_default_is_not_confirmed(tmp_path: Path) -> None:
    """Whatever the model makes of it."""
    job, one = SimulatedJob(gain=0.8), study(tmp_path, trials=12)
    conclusion = finish(one, job)
    winner = SPACE.complete(conclusion.winner)
    explored = [trial for trial in one.history if trial.kind != "confirm"]

    def cut_short(trial: TrialRecord, seconds: float) -> TrialRecord:
        report = RankReport(0, "", (seconds,) * 8)
        return replace(trial, result=TrialResult(TrialStatus.CUT_SHORT, ranks=(report,)))

    slow = pruned(SPACE, explored)
    assert winner not in slow
    for seconds, expected in ((0.2, {winner}), (0.09, set())):
        trials = [
            cut_short(t, seconds) if SPACE.complete(t.strategy) == winner else t for t in explored
        ]
        assert pruned(SPACE, trials) == slow | expected
        assert pruned(SPACE, [*trials, *one.history]) == slow, "it was measured in whole"
    seen = observations_of(SPACE, explored)
    assert winner in CandidateSelection(one.problem, seen).top_candidates()
    assert winner not in CandidateSelection(one.problem, seen, {winner}).top_candidates()


@pytest.mark.parametrize("slower", [1.01, 2.5])
def test_where_nothing_was_faster_nothing_is_confirmed(tmp_path: Path, slower: float) -> None:
    """Whatever else is tried takes 1.01 or 2.5 times as long as the default."""
    one, noise = study(tmp_path, trials=8), np.random.default_rng(0)
    while (trial := one.ask()) is not None:
        mean = 0.1 * (1.0 if SPACE.complete(trial.strategy) == SPACE.default else slower)
        one.tell(trial, [mean * math.exp(noise.normal(0, 0.02)) for _ in range(40)])
    kinds = [trial.kind for trial in one.history]
    assert len(kinds) >= FEWEST_TRIALS and "confirm" not in kinds
    assert one.conclusion is not None and one.conclusion.winner == SPACE.default


def test_a_short_training_is_not_tuned_for_long(tmp_path: Path) -> None:
    """Trials of a minute pay for a training of days, not for one of some minutes."""
    (tmp_path / "short").mkdir()
    job = SimulatedJob(gain=0.8)
    used = []
    for folder, hours in (("short", 0.2), ("", 100.0)):
        one = study(tmp_path / folder, trials=15, expected_hours=hours)
        while (trial := one.ask()) is not None:
            report = RankReport(0, "", tuple(job.steps(trial.strategy)))
            one.tell(trial, TrialResult(TrialStatus.COMPLETED, ranks=(report,), total_s=60.0))
        used.append(sum(trial.kind != "confirm" for trial in one.history))
        if folder:
            assert one.conclusion is not None
            assert "of 0.2 hours of training" in one.conclusion.stopped
    assert FEWEST_TRIALS <= used[0] < used[1]


def test_a_strategy_that_ruins_the_model_is_refused(tmp_path: Path) -> None:
    """It is twice as fast; what is as good wins, and the verdict is in the trace."""
    one = study(tmp_path, trials=12)
    conclusion = finish(one, SimulatedJob(gain=0.8, ruinous=True))
    assert conclusion.winner["compression"] == "none" and conclusion.best is not None
    assert conclusion.verdicts and not any(v.admissible for v in conclusion.verdicts)
    assert all(v.strategy["compression"] == "fp16" for v in conclusion.verdicts)
    judging = [trial for trial in one.history if trial.kind == "quality"]
    assert [trial.info["seed"] for trial in judging[:4]] == [1, 2, 3, 4]
    assert all(SPACE.complete(trial.strategy) == SPACE.default for trial in judging[:4])
    assert len(judging) == 4 + len(conclusion.verdicts)  # each was clearly worse at once
    # At equal samples, however much faster it is.
    assert all(len(t.result.ranks[0].losses) == 200 for t in judging if t.result is not None)
    record = TraceStore(str(tmp_path / "traces.db")).study(one.study_id)
    assert Conclusion.of(record) == conclusion


def test_at_equal_time_only_candidates_train_for_longer(tmp_path: Path) -> None:
    one = study(tmp_path, trials=12, goal="time-to-loss")
    job, steps = SimulatedJob(gain=0.8, ruinous=True), {}
    while (trial := one.ask()) is not None:
        if trial.kind == "quality":
            steps[SPACE.complete(trial.strategy) == SPACE.default] = trial.steps
        one.tell(trial, job.result(trial))
    assert steps[True] == one.settings.quality_steps < steps[False]


def test_judging_ends_when_its_minutes_are_used(tmp_path: Path) -> None:
    """A quality trial takes longer than the default's steps promised; the third has no time."""
    one = study(tmp_path, trials=8, quality_minutes=3)
    job = SimulatedJob(gain=0.8, ruinous=True)
    while (trial := one.ask()) is not None:
        seconds = 60.0 if trial.kind == "quality" else 2.0
        one.tell(trial, replace(job.result(trial), total_s=seconds))
    judging = [trial for trial in one.history if trial.kind == "quality"]
    assert len(judging) == 2  # of the four seeds that the default needs
    assert one.conclusion is not None
    assert "the limit of 3 minutes of quality trials" in one.conclusion.verdicts[0].reason
    assert one.conclusion.winner["compression"] == "none"


@pytest.mark.parametrize(("minutes", "outcome"), [(30, Outcome.NOT_SHOWN), (300, Outcome.ADMITTED)])
def test_a_quality_trial_that_its_minutes_end_shows_nothing(
    tmp_path: Path, minutes: float, outcome: Outcome
) -> None:
    """Three of the four pairs that a verdict needs are whole then; what they show stays.

    The eighth trial takes longer than those before it.
    """
    one, alike = study(tmp_path, trials=8, quality_minutes=minutes), SimulatedJob()
    job = SimulatedJob(ruinous=True)
    while (trial := one.ask()) is not None:
        result = replace(job.result(trial), total_s=2.0)
        if trial.kind == "quality":
            count = sum(each.kind == "quality" for each in one.history)
            whole_s = 200.0 if count < 8 else 500.0
            left_s, (report,) = one.left_for("quality"), alike.result(trial).ranks
            result = replace(result, ranks=(report,), total_s=whole_s)
            if left_s < whole_s:
                cut = replace(report, step_s=report.step_s[:15], losses=report.losses[:30])
                result = replace(result, ranks=(cut,), total_s=left_s + 0.1)
                result = replace(result, status=TrialStatus.CUT_SHORT, reason=OUT_OF_TIME)
        one.tell(trial, result)
    assert one.conclusion is not None
    judging = [t.result for t in one.history if t.kind == "quality" and t.result is not None]
    assert [each.status for each in judging[:7]] == [TrialStatus.COMPLETED] * 7
    verdict = one.conclusion.verdicts[0]
    assert verdict.outcome is outcome
    if outcome is Outcome.NOT_SHOWN:
        assert [each.status for each in judging[7:]] == [TrialStatus.CUT_SHORT]
        assert verdict.pairs == 3 and "could not be shown to be as good in" in verdict.reason
        assert "the limit of 30 minutes of quality trials is reached" in verdict.reason
        assert one.conclusion.winner["compression"] == "none"


def test_quality_trials_end_where_the_next_look_has_no_time(tmp_path: Path) -> None:
    """The look at four pairs does not decide, and two trials of the four until the next fit in."""
    one, job = study(tmp_path, trials=8, quality_minutes=17.5), SimulatedJob(ruinous=True)
    while (trial := one.ask()) is not None:
        result = replace(job.result(trial), total_s=2.0)
        if trial.kind == "quality":
            (report,) = SimulatedJob().result(trial).ranks
            exact = SPACE.is_exact(SPACE.complete(trial.strategy))
            apart = 0.0 if exact else 0.012 * (-1) ** trial.seed
            report = replace(report, losses=tuple(loss + apart for loss in report.losses))
            result = replace(result, ranks=(report,), total_s=100.0)
        one.tell(trial, result)
    assert sum(trial.kind == "quality" for trial in one.history) == 8
    assert one.conclusion is not None
    assert "no time for 4 more trials of 100 s" in one.conclusion.verdicts[0].reason


def test_nothing_is_judged_if_no_verdict_fits_into_its_minutes(tmp_path: Path) -> None:
    """Nor is anything explored that could not be used."""
    one = study(tmp_path, trials=8, quality_minutes=0.5)
    job = SimulatedJob(gain=0.8, ruinous=True)
    while (trial := one.ask()) is not None:
        one.tell(trial, replace(job.result(trial), total_s=10.0))
    assert all(trial.kind != "quality" for trial in one.history)
    proposed = [trial.strategy for trial in one.history if trial.kind == "model"]
    assert proposed and all(SPACE.is_exact(strategy) for strategy in proposed)


def test_what_can_never_be_used_is_not_explored(tmp_path: Path) -> None:
    """However much faster it is."""
    one = study(tmp_path, trials=8, quality_minutes=0.5)
    job = SimulatedJob(gain=0.8, ruinous=True, coded=0.1)
    while (trial := one.ask()) is not None:
        one.tell(trial, replace(job.result(trial), total_s=10.0))
    assert all(SPACE.is_exact(trial.strategy) for trial in one.history)
    assert any(trial.kind == "model" for trial in one.history)


def test_a_job_with_several_losses_explores_nothing_lossy(tmp_path: Path) -> None:
    """Its default trial shows that none can be judged."""
    one = study(tmp_path, trials=8)
    job = SimulatedJob(gain=0.8, ruinous=True, coded=0.1)
    while (trial := one.ask()) is not None:
        (report,) = (result := job.result(trial)).ranks
        one.tell(trial, replace(result, ranks=(replace(report, several_losses=True),)))
    assert all(SPACE.is_exact(trial.strategy) for trial in one.history)
    assert {trial.kind for trial in one.history} >= {"model", "confirm"}


@pytest.mark.parametrize(
    ("outcome", "pairs", "said"),
    [
        (Outcome.WORSE, 0, "refused for their losses"),
        (Outcome.NOT_SHOWN, 4, "refused for their losses"),
        (Outcome.NOT_SHOWN, 0, "not judged (no loss is seen)"),
        (Outcome.ADMITTED, 4, "promises to beat the default"),
    ],
)
def test_only_what_was_judged_is_called_refused(
    tmp_path: Path, outcome: Outcome, pairs: int, said: str
) -> None:
    verdict = Verdict(
        Strategy({"compression": "fp16"}), outcome, 2.0, 1.0, 0.1, "no loss is seen", pairs=pairs
    )
    nothing = Confirmation(SPACE.default, [], [])
    assert said in decided(study(tmp_path))._concluded(nothing, "", [verdict], "").reason


def decided(one: AskTellStudy, *later: TrialRecord, minutes: float | None = None) -> Decision:
    trials, settings = [*one.history, *later], replace(one.settings, minutes=minutes)
    return Decision(one.problem, settings, BayesianLearner(), trials)


def test_a_trial_that_runs_out_of_time_has_not_failed(tmp_path: Path) -> None:
    """Neither does it unmake a winner, nor does a lossy strategy count as failed."""
    one = study(tmp_path, trials=8)
    winner = finish(one, SimulatedJob(gain=0.5)).winner
    ranks = (RankReport(0, "", (0.1,) * 3),)
    cut = TrialResult(TrialStatus.CUT_SHORT, ranks=ranks, total_s=7000.0)
    last = replace(one.history[-1], number=99, strategy=winner, result=cut)
    assert last.kind == "confirm" and decided(one, last, minutes=100.0).proven() == winner
    # Of a user's own launcher, which has another limit, it would be asked for without end.
    assert decided(one, last).proven() != winner
    failed = replace(last, result=replace(cut, status=TrialStatus.CRASHED))
    assert decided(one, failed, minutes=100.0).proven() != winner
    (tmp_path / "lossy").mkdir()
    judged = study(tmp_path / "lossy", trials=8)
    finish(judged, SimulatedJob(ruinous=True))
    quality = [trial for trial in judged.history if trial.kind == "quality"]
    trials = [replace(t, result=cut) if t in quality[4:] else t for t in judged.history]
    settings = replace(judged.settings, minutes=100.0)
    assert Decision(judged.problem, settings, BayesianLearner(), trials).verdicts() == []


def test_a_trial_that_was_cut_short_without_a_step_time_has_not_failed(tmp_path: Path) -> None:
    """As a pruned one under local steps; it is not tried again either."""
    one, job = study(tmp_path, trials=8), SimulatedJob(gain=0.8)
    for _ in range(4):
        trial = one.ask()
        assert trial is not None
        one.tell(trial, job.result(trial))
    cut = TrialResult(TrialStatus.CUT_SHORT, ranks=(RankReport(0, "", (0.1,) * 3),))
    trials = [*one.history[:-1], replace(one.history[-1], result=cut)]
    assert cut.step_time is None and len(observations_of(SPACE, trials)) == 3
    given: list[Strategy] = []

    class Recording(BayesianLearner):
        def suggest(self, problem, observations, pending=(), *, seed):  # type: ignore[no-untyped-def]
            given.extend(pending)
            return super().suggest(problem, observations, pending, seed=seed)

    Decision(one.problem, one.settings, Recording(), trials).next()
    assert given == [trials[-1].strategy]


@pytest.mark.parametrize(
    ("values", "kind", "named"), [({"bukets": 2}, "mine", "bukets"), ({}, "confirm", "'confirm'")]
)
def test_what_no_learner_may_suggest_is_not_stored(
    values: dict[str, Any], kind: str, named: str, tmp_path: Path
) -> None:
    """It would stay in the study, which could not go on."""

    class Wrong:
        def suggest(self, *_: object, **__: object) -> Suggestion:
            return Suggestion(Strategy(values), kind)

    store = str(tmp_path / "traces.db")
    one = AskTellStudy.create(SPACE, store=store, learner=Wrong())
    first = one.ask()
    assert first is not None
    one.tell(first, SimulatedJob().result(first))
    with pytest.raises(ConfigurationError, match=named):
        one.ask()
    assert len(one.history) == 1


def test_quality_trials_grow_also_where_the_study_is_read_back(tmp_path: Path) -> None:
    """Until the loss falls, which it does after 300 steps."""

    class Late(SimulatedJob):
        def result(self, trial: Trial) -> TrialResult:
            done = super().result(trial)
            losses = tuple(
                1.0 + 0.01 * trial.seed + math.exp(-max(step - 300, 0) / 10)
                for step in range(trial.steps or 40)
            )
            return replace(done, ranks=(replace(done.ranks[0], losses=losses),), total_s=5.0)

    one, job = study(tmp_path, trials=8), Late(ruinous=True)
    store, asked = TraceStore(str(tmp_path / "traces.db")), []
    while (trial := one.ask()) is not None:
        if trial.kind == "quality":
            asked.append((trial.seed, trial.steps))
        one.tell(trial, job.result(trial))
        one = AskTellStudy(store, store.study(one.study_id))
    seeds = [1, 2, 3, 4]
    assert asked[:8] == [(seed, 200) for seed in seeds] + [(seed, 400) for seed in seeds]
    assert len(asked) > 8 and {steps for _, steps in asked[8:]} == {400}
    assert one.conclusion is not None and one.conclusion.verdicts


def test_the_learner_weighs_trials_by_the_steps_of_the_default_that_it_sees(tmp_path: Path) -> None:
    one = study(tmp_path, trials=8)
    finish(one, SimulatedJob())
    seen = []

    class Watching(BayesianLearner):
        def suggest(self, problem: Problem, *args: Any, **options: Any) -> Any:
            seen.append(problem.steps)
            return super().suggest(problem, *args, **options)

    for steps in (40, 200):
        report = RankReport(0, "", (2.0 if steps == 40 else 0.1,) * 40)
        first = replace(one.history[0], result=TrialResult(TrialStatus.COMPLETED, ranks=(report,)))
        settings = replace(one.settings, adaptive_steps=True)
        Decision(one.problem, settings, Watching(), [first]).next()
    assert seen[0] < seen[1]


def test_a_verdict_of_an_earlier_version_is_read() -> None:
    conclusion = Conclusion(
        SPACE.default,
        "",
        "",
        0.1,
        (),
        (Verdict(Strategy({"compression": "fp16"}), Outcome.WORSE, 2.0, 1.0, 0.1, "why"),),
    )
    fields = conclusion.to_json()
    assert fields["verdicts"][0]["outcome"] == "worse" and fields["verdicts"][0]["bound"] is None
    (old,) = fields["verdicts"]
    for name in ("outcome", "bound", "pairs"):
        del old[name]
    for admissible, outcome in ((True, Outcome.ADMITTED), (False, Outcome.WORSE)):
        (read,) = Conclusion.from_json(
            {**fields, "verdicts": [{**old, "admissible": admissible}]}
        ).verdicts
        assert read.outcome is outcome and math.isnan(read.bound)


def test_what_trains_the_same_model_is_judged_once(tmp_path: Path) -> None:
    """However many strategies differ in exact knobs alone; all of them may be used then."""

    class Coded(SimulatedJob):
        def steps(self, strategy: Strategy) -> list[float]:
            faster = 1.0 if SPACE.complete(strategy)["compression"] == "none" else 0.6
            return [faster * second for second in super().steps(strategy)]

    one = study(tmp_path, trials=12)
    conclusion = finish(one, Coded(gain=0.8))
    tried = {SPACE.complete(trial.strategy): trial.kind for trial in one.history}
    coded = [strategy for strategy in tried if strategy["compression"] != "none"]
    judged = {SPACE.complete(t.strategy) for t in one.history if t.kind == "quality"}
    judged.discard(SPACE.default)
    assert len(coded) > len(judged) == len({each["compression"] for each in judged}) > 0
    assert all(verdict.admissible for verdict in conclusion.verdicts)
    found = {each["compression"] for each in judged}
    for each in coded:
        feasible = may_be_used(SPACE, each, conclusion.verdicts)
        assert feasible == (each["compression"] in found)


def test_at_equal_time_each_strategy_is_judged_by_itself(tmp_path: Path) -> None:
    """Of all with fp16 only the one with the fastest cycle time trains long enough."""
    one = study(tmp_path, trials=12, goal="time-to-loss")
    job = SimulatedJob(gain=0.5, ruinous=True)
    while (trial := one.ask()) is not None:
        result = job.result(trial)
        near = abs(math.log(float(SPACE.complete(trial.strategy)["cycle_time_ms"]) / 10)) < 0.7
        if trial.kind == "quality" and near:
            (report,) = SimulatedJob().result(trial).ranks
            result = replace(result, ranks=(report,))
        one.tell(trial, result)
    assert one.conclusion is not None
    verdicts = one.conclusion.verdicts
    assert {verdict.outcome for verdict in verdicts} == {Outcome.ADMITTED, Outcome.WORSE}
    admitted = [verdict.strategy for verdict in verdicts if verdict.admissible]
    assert one.conclusion.winner in admitted or SPACE.is_exact(one.conclusion.winner)
    for each in (SPACE.complete(trial.strategy) for trial in one.history):
        feasible = may_be_used(SPACE, each, verdicts, "time-to-loss")
        assert feasible == (SPACE.is_exact(each) or each in admitted)


def test_where_the_fastest_ruin_the_model_milder_ones_are_looked_for(tmp_path: Path) -> None:
    """The more a strategy loses the faster it is; more than a little of that ruins the model.

    The knob is none of which is known how harsh it is.
    """
    space = SearchSpace(
        (
            float_knob("cycle_time_ms", 0.1, 100.0, 1.0, scale="log", help=""),
            integer_knob("level", 1, 16, 1, scale="log", help="", exact=False),
        )
    )
    noise = np.random.default_rng(0)

    def result(trial: Trial) -> TrialResult:
        level = int(space.complete(trial.strategy)["level"])
        seconds = 0.1 / level**0.7 * math.exp(noise.normal(0, 0.01))
        ruin = 0.0 if level <= 3 else 0.3 * math.log2(level)
        losses = tuple(
            1.0 + ruin + math.exp(-step / 10) + float(noise.normal(0, 0.01))
            for step in range(trial.steps or 40)
        )
        report = RankReport(0, "", (seconds,) * 40, (), losses)
        return TrialResult(TrialStatus.COMPLETED, ranks=(report,))

    one = study(tmp_path, space, trials=16)
    while (trial := one.ask()) is not None:
        one.tell(trial, result(trial))
    conclusion = one.conclusion
    assert conclusion is not None and conclusion.winner["level"] in (2, 3)
    refused = [v.strategy["level"] for v in conclusion.verdicts if not v.admissible]
    assert refused and min(int(each) for each in refused) > 3
    kinds = [trial.kind for trial in one.history]
    judged = kinds.index("quality")
    assert "model" in kinds[judged:]  # a verdict has sent it exploring again
    assert sum(kind in ("default", "sobol", "model") for kind in kinds) <= 16


def test_without_losses_nothing_lossy_wins(tmp_path: Path) -> None:
    one, job = study(tmp_path, trials=12), SimulatedJob(ruinous=True)
    while (trial := one.ask()) is not None:
        one.tell(trial, [float(second) for second in job.result(trial).ranks[0].step_s])
    assert one.conclusion is not None
    assert one.conclusion.winner["compression"] == "none"
    (verdict,) = one.conclusion.verdicts
    assert "no loss is seen" in verdict.reason


def test_a_study_goes_on_after_any_of_its_trials(tmp_path: Path) -> None:
    """Read back before every question, it asks the same ones."""
    whole = study(tmp_path, trials=8)
    expected = finish(whole, SimulatedJob(ruinous=True))
    (tmp_path / "again").mkdir()
    again, job = study(tmp_path / "again", trials=8), SimulatedJob(ruinous=True)
    store = TraceStore(str(tmp_path / "again" / "traces.db"))
    while (trial := again.ask()) is not None:
        again.tell(trial, job.result(trial))
        again = AskTellStudy(store, store.study(again.study_id))
    assert [t.kind for t in again.history] == [t.kind for t in whole.history]
    assert store.study(again.study_id).winner == expected.winner


def test_without_a_gain_the_default_is_kept(tmp_path: Path) -> None:
    conclusion = finish(study(tmp_path, trials=10), SimulatedJob(gain=1.0))
    assert conclusion.winner == SPACE.default and conclusion.best is None
    assert "no " in conclusion.reason


def test_a_job_outside_the_space_is_measured_but_not_learnt_from(tmp_path: Path) -> None:
    """The user's file asks for cycles of 20 ms and more; the job as it is has 1 ms."""
    space = restrict_space(SPACE, {"knobs": {"cycle_time_ms": {"low": 20.0}}})
    one = study(tmp_path, space, trials=6)
    conclusion = finish(one, SimulatedJob())
    trials = one.history
    assert [(t.kind, t.strategy) for t in trials[:2]] == [
        ("default", Strategy()),
        ("default", space.default),
    ]
    assert all(seen.strategy for seen in observations_of(space, trials))
    result = trials[1].result
    assert result is not None and result.step_time is not None
    assert conclusion.default_s == result.step_time.mean_s
    assert float(conclusion.winner["cycle_time_ms"]) >= 20


@pytest.mark.parametrize("default_diverges", [False, True])
def test_a_fast_strategy_that_ruins_the_loss_has_failed(
    tmp_path: Path, default_diverges: bool
) -> None:
    one = study(tmp_path)
    for losses, diverges in (((1.0, 0.9), default_diverges), ((1.0, 0.8), True)):
        trial = one.ask()
        assert trial is not None
        report = RankReport(0, "", (0.1,) * 10, (), (*losses, math.nan) if diverges else losses)
        one.tell(trial, TrialResult(TrialStatus.COMPLETED, ranks=(report,)))
    result = one.history[1].result
    assert result is not None
    assert (result.status is TrialStatus.DIVERGED) == (not default_diverges)
    assert (result.step_time is None) == (not default_diverges)


def test_the_default_comes_first_then_sobol_then_the_model(tmp_path: Path) -> None:
    one = study(tmp_path, trials=8)
    finish(one, SimulatedJob())
    kinds = [trial.kind for trial in one.history]
    assert kinds[0] == "default" and kinds[1] == "sobol"
    assert kinds.index("sobol") < kinds.index("confirm")
    assert kinds == sorted(kinds, key=["default", "sobol", "model", "confirm"].index)
    assert sum(kind != "confirm" for kind in kinds) <= 8


def test_confirmation_measures_in_turn(tmp_path: Path) -> None:
    one = study(tmp_path, trials=10)
    finish(one, SimulatedJob())
    confirmed = [SPACE.complete(t.strategy) for t in one.history if t.kind == "confirm"]
    assert len(confirmed) >= 6
    width = len(set(confirmed))
    assert confirmed[0] == SPACE.default
    for number, start in enumerate(range(0, len(confirmed), width)):
        order = confirmed[:width] if number % 2 == 0 else confirmed[:width][::-1]
        assert confirmed[start : start + width] == order


def test_failed_trials_do_not_stop_it(tmp_path: Path) -> None:
    one, job = study(tmp_path, trials=10), SimulatedJob()
    while (trial := one.ask()) is not None:
        fails = SPACE.complete(trial.strategy)["compression"] == "fp16"
        crashed = TrialResult(TrialStatus.CRASHED, "rank 1 exited with status 7")
        one.tell(trial, crashed if fails else job.steps(trial.strategy))
    assert one.conclusion is not None
    assert one.conclusion.winner["compression"] == "none"


def test_a_candidate_that_fails_when_confirmed_cannot_win(tmp_path: Path) -> None:
    one, job = study(tmp_path, trials=10), SimulatedJob()
    while (trial := one.ask()) is not None:
        changed = SPACE.complete(trial.strategy) != SPACE.default
        fails = trial.kind == "confirm" and changed
        one.tell(trial, TrialResult(TrialStatus.HUNG) if fails else job.steps(trial.strategy))
    assert one.conclusion is not None and one.conclusion.winner == SPACE.default


def test_the_same_seed_asks_the_same(tmp_path: Path) -> None:
    asked = []
    for name in ("a", "b"):
        one = study(tmp_path / name, trials=9, seed=3)
        finish(one, SimulatedJob())
        asked.append([trial.strategy for trial in one.history])
    assert asked[0] == asked[1]


def timed(one: AskTellStudy, job: SimulatedJob, total_s: float = 10.0) -> Conclusion:
    """Run ``one`` to its end with trials of ``total_s`` seconds, and no time to think."""
    while (trial := one.ask()) is not None:
        report = RankReport(0, "a", tuple(job.steps(trial.strategy)))
        one.tell(trial, TrialResult(TrialStatus.COMPLETED, ranks=(report,), total_s=total_s))
    assert one.conclusion is not None
    return one.conclusion


@pytest.fixture
def no_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a trial takes no time, on whatever machine."""
    monkeypatch.setattr(study_module, "time", SimpleNamespace(monotonic=lambda: 0.0))


@pytest.mark.usefixtures("no_thinking")
@pytest.mark.parametrize(
    ("minutes", "explored", "confirmed"),
    [
        (0.5, 1, 0),  # not enough for one more trial and the confirmation
        (1.6, 3, 6),
        (4.0, 17, 9),  # two candidates
    ],
)
def test_the_minutes_are_kept_with_all_that_is_done(
    tmp_path: Path, minutes: float, explored: int, confirmed: int
) -> None:
    one = study(tmp_path, trials=50, minutes=minutes, expected_hours=1000.0)
    conclusion = timed(one, SimulatedJob(gain=0.6))
    kinds = [trial.kind for trial in one.history]
    assert 10.0 * len(kinds) <= 60 * minutes
    assert len(kinds) - kinds.count("confirm") <= explored
    assert kinds.count("confirm") == confirmed
    if minutes < 4:
        assert len(kinds) - kinds.count("confirm") == explored
        assert f"the limit of {minutes:g} minutes leaves no time" in conclusion.stopped
    assert (conclusion.best is not None) == (confirmed > 0)


@pytest.mark.usefixtures("no_thinking")
def test_minutes_that_end_within_the_confirmation_prove_nothing(tmp_path: Path) -> None:
    """Trials of the confirmation take longer than those before it did."""
    one, job = study(tmp_path, trials=50, minutes=1.6, expected_hours=1000.0), SimulatedJob(0.6)
    while (trial := one.ask()) is not None:
        total_s = 30.0 if trial.kind == "confirm" else 10.0
        report = RankReport(0, "a", tuple(job.steps(trial.strategy)))
        one.tell(trial, TrialResult(TrialStatus.COMPLETED, ranks=(report,), total_s=total_s))
    kinds = [trial.kind for trial in one.history]
    assert 0 < kinds.count("confirm") < 6
    assert one.conclusion is not None and one.conclusion.best is None
    assert one.conclusion.reason == "the minutes were used before anything was confirmed"


@pytest.mark.usefixtures("no_thinking")
@pytest.mark.parametrize(("hours", "judged"), [(0.05, False), (10.0, True)])
def test_a_strategy_is_judged_where_that_pays(tmp_path: Path, hours: float, judged: bool) -> None:
    """It saves half of a step; the first verdict takes 8 trials of 18 s, a confirmation 12 s."""
    one = study(tmp_path, trials=8, expected_hours=hours)
    job = SimulatedJob(ruinous=True)
    while (trial := one.ask()) is not None:
        one.tell(trial, replace(job.result(trial), total_s=2.0))
    assert any(SPACE.complete(t.strategy)["compression"] == "fp16" for t in one.history)
    assert any(trial.kind == "quality" for trial in one.history) is judged


@pytest.mark.usefixtures("no_thinking")
def test_what_cannot_pay_is_not_begun(tmp_path: Path) -> None:
    """A training of 36 seconds, of which a trial takes eight."""
    one = study(tmp_path, trials=20, expected_hours=0.01)
    conclusion = timed(one, SimulatedJob(), total_s=8.0)
    assert [trial.kind for trial in one.history] == ["default"]
    assert "at least 72 s more, and the training is expected to take 36 s" in conclusion.stopped


@pytest.mark.parametrize("mode", ["launched", "live"])
def test_live_trials_cost_only_what_their_steps_take_longer_than_the_defaults(mode: str) -> None:
    """The search for each takes a minute, and its evaluations and steps take another."""

    def trial(number: int, kind: str, step_s: float, setup_s: float) -> TrialRecord:
        report = RankReport(0, "a", (step_s,) * 50)
        result = TrialResult(TrialStatus.COMPLETED, ranks=(report,), setup_s=setup_s, total_s=60.0)
        strategy = SPACE.complete({"cycle_time_ms": 1.0 + number})
        return TrialRecord("a", number, kind, strategy, "", "", {"ask_s": 60.0}, result)

    # Half a second for the switch, and 50 steps of a tenth more or of a twentieth less.
    default = trial(0, "default", 1.0, 1.0)
    slow, fast = trial(1, "model", 1.1, 1.6), trial(2, "model", 0.95, 1.45)
    settings = StudySettings(mode=mode, expected_hours=0.1)
    cost_s = [120.0, 120.0] if mode == "launched" else [(5.5 + 0.0) / 2, 0.0]
    for other, expected in zip((slow, fast), cost_s, strict=True):
        budget = Budget(settings, [default, other])
        assert budget.cost_s == pytest.approx(expected)
        assert budget.trial_s == 120.0, "its minutes are all used"
    budget = Budget(settings, [default, slow])
    assert bool(budget.why_not_confirm(2, 0.05)) is (mode == "launched")
    assert bool(budget.why_not_go_on(2, 0.05)) is (mode == "launched")
    assert not budget.why_not_go_on(0, 0.0), "within a round"
    # On the next day all steps take twice as long: what was measured before costs no less for it.
    again = replace(trial(3, "default", 2.0, 2.0), strategy=default.strategy)
    rested = Budget(settings, [default, slow, again])
    assert rested.cost_s == pytest.approx(cost_s[0])


@pytest.mark.usefixtures("no_thinking")
def test_what_a_confirmation_costs_must_be_saved(tmp_path: Path) -> None:
    """It takes a minute, and a tenth or so of six minutes can be saved."""
    one = study(tmp_path, trials=8, expected_hours=0.1)
    conclusion = timed(one, SimulatedJob(gain=0.9))
    assert "confirm" not in [trial.kind for trial in one.history]
    assert conclusion.winner == SPACE.default
    assert "60 s and is expected to save" in conclusion.reason


def test_an_empty_space_concludes_with_the_default(tmp_path: Path) -> None:
    conclusion = finish(study(tmp_path, SearchSpace(())), SimulatedJob())
    assert conclusion.winner == Strategy() and "no knob" in conclusion.stopped


def test_a_space_that_is_not_described_is_named(tmp_path: Path) -> None:
    one = AskTellStudy.create(store=str(tmp_path / "traces.db"))
    trial = one.ask()
    assert trial is not None
    one.tell(trial, [0.1] * 20)
    with pytest.raises(StudyError, match="no search space"):
        one.ask()


def test_only_open_trials_accept_results(tmp_path: Path) -> None:
    one = study(tmp_path)
    trial = one.ask()
    assert trial is not None
    one.tell(trial, [0.1] * 20)
    for other in (trial, Trial(99, "model", Strategy()), 0, None):
        with pytest.raises(StudyError, match="not open"):
            one.tell(other, [0.1] * 20)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [[], 0.1, None, "0.1", b"01", {0.1: 1}, ["fast"], [[0.1]]])
def test_what_has_no_step_times_is_not_recorded(tmp_path: Path, wrong: Any) -> None:
    one = study(tmp_path)
    trial = one.ask()
    assert trial is not None
    with pytest.raises(StudyError, match="has no step times") as caught:
        one.tell(trial, wrong)
    assert "TrialResult" in caught.value.hint and one.history[0].result is None
    one.tell(trial, [0.1] * 20)


@pytest.mark.parametrize("wrong", [-1.0, math.nan, math.inf])
def test_impossible_seconds_are_refused_before_they_are_written(
    tmp_path: Path, wrong: float
) -> None:
    one = study(tmp_path)
    trial = one.ask()
    assert trial is not None
    with pytest.raises(StudyError, match="a step cannot take"):
        one.tell(trial, [0.1, wrong, 0.1])
    assert one.history[0].result is None
    one.tell(trial, [0.1] * 20)


@pytest.mark.parametrize("steps", [[0.0] * 40, [0.0] * 39 + [0.1]])
def test_a_step_time_of_0_is_refused(tmp_path: Path, steps: list[float]) -> None:
    one = study(tmp_path)
    trial = one.ask()
    assert trial is not None
    with pytest.raises(StudyError, match="0 s on average"):
        one.tell(trial, steps)
    assert one.history[0].result is None
    one.tell(trial, [0.0, *[0.1] * 39])


def test_trials_of_which_only_the_steps_are_told_use_up_the_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("hvd_autosync.study.study.time", clock)
    one = study(tmp_path, minutes=1.0)
    trial = one.ask()
    assert trial is not None
    clock.now += 50.0
    one.tell(trial, [0.1] * 20)
    assert one.history[0].result is not None
    assert one.history[0].result.total_s == 50.0
    assert one.ask() is None
    assert one.conclusion is not None
    assert one.conclusion.stopped.startswith("the limit of 1 minute leaves no time")


@pytest.mark.parametrize(
    ("name", "value"),
    [("space", []), ("settings", {}), ("task", 5), ("learner", "tpe"), ("command", "python a.py")],
)
def test_a_study_of_something_else_is_not_begun(tmp_path: Path, name: str, value: Any) -> None:
    given = {"store": str(tmp_path / "t.db"), name: value}
    with pytest.raises(ConfigurationError, match=f"for {name}"):
        AskTellStudy.create(**given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tolerance", [0.0, -0.1, math.nan])
def test_a_loss_tolerance_that_admits_nothing_is_refused(tolerance: float) -> None:
    with pytest.raises(ConfigurationError, match="loss_tolerance is"):
        StudySettings(loss_tolerance=tolerance)
    with pytest.raises(TraceFormatError, match="settings of a study are damaged"):
        StudySettings.from_json({**StudySettings().to_json(), "loss_tolerance": tolerance})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("trials", value) for value in (-5, 0, 2.5, "x", True)),
        *((name, 0) for name in ("steps", "warmup", "minutes", "expected_hours")),
        ("steps", 4),
        ("quality_steps", 39),
        *(("minutes", value) for value in (-1, math.nan, math.inf, "5")),
        *(("seed", value) for value in (-1, 2**32, 1.0)),
        *(("goal", value) for value in ("loss", None, [])),
        *(("allow", value) for value in ("codec", ("bogus",), 5)),
        ("loss_tolerance", math.inf),
        ("mode", "auto"),
        ("transfer", "yes"),
    ],
)
def test_settings_that_cannot_be_are_named_before_a_study_begins(
    name: str, value: object, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=name) as caught:
        study(tmp_path, **{name: value})
    assert repr(value) in caught.value.message and caught.value.hint
    assert not (tmp_path / "traces.db").exists()


def test_stored_settings_are_read_by_the_rules_of_their_time() -> None:
    settings = {**StudySettings().to_json(), "steps": 3, "allow": ["retired"], "seed": 2**40}
    assert StudySettings.from_json(settings).allow == ("retired",)


@pytest.mark.parametrize(
    "path", sorted(TRACES.rglob("*.jsonl.gz")), ids=lambda path: path.name.partition(".")[0]
)
def test_settings_of_every_kept_trace_are_read(path: Path) -> None:
    with gzip.open(path, "rt") as lines:
        records = [json.loads(line) for line in itertools.islice(lines, 2)]
    stored = records[1]["settings"]  # below the header
    assert StudySettings.from_json(stored).allow == tuple(stored["allow"])


def test_several_trials_may_be_open_at_once(tmp_path: Path) -> None:
    one, job = study(tmp_path, trials=6), SimulatedJob()
    first = one.ask()
    assert first is not None
    one.tell(first, job.steps(first.strategy))
    pair = [one.ask(), one.ask()]
    assert pair[0] is not None and pair[1] is not None
    assert pair[0].strategy != pair[1].strategy
    for trial in pair:
        assert trial is not None
        one.tell(trial, job.steps(trial.strategy))
    assert finish(one, job) is not None


def test_nothing_final_is_decided_without_open_trials(tmp_path: Path) -> None:
    one, job = study(tmp_path, trials=6), SimulatedJob()
    first = one.ask()
    assert first is not None
    one.tell(first, job.steps(first.strategy))
    opened = [trial for _ in range(5) if (trial := one.ask()) is not None]
    with pytest.raises(StudyError, match=r"open trials \(1, 2, 3, 4, 5\) have results"):
        one.ask()
    for trial in opened:
        one.tell(trial, job.steps(trial.strategy))
    assert finish(one, job).best is not None


def test_a_second_candidate_is_left_out_where_only_one_pays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two need nine trials of a minute at least, one six; and so much is saved."""
    monkeypatch.setattr(CandidateSelection, "candidates", lambda self, top, verdicts: top[:2])
    one, job = study(tmp_path, trials=8, expected_hours=0.92), SimulatedJob(gain=0.8)
    while (trial := one.ask()) is not None:
        report = RankReport(0, "", tuple(job.steps(trial.strategy)))
        one.tell(trial, TrialResult(TrialStatus.COMPLETED, ranks=(report,), total_s=60.0))
    assert one.conclusion is not None
    assert len(one.conclusion.comparisons) == 1, one.conclusion.reason


def test_only_slow_exploration_is_pruned(tmp_path: Path) -> None:
    one = study(tmp_path)
    default = one.ask()
    assert default is not None and math.isinf(one.prune_above_s(default))
    one.tell(default, [0.1] * 20)
    second = one.ask()
    assert second is not None
    assert one.prune_above_s(second) == pytest.approx(0.11)


def test_a_killed_driver_loses_at_most_the_trial_in_flight(tmp_path: Path) -> None:
    store = str(tmp_path / "traces.db")
    driver = textwrap.dedent(
        f"""
        import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
        import os, signal
        from test_study import SPACE, SimulatedJob, StudySettings
        from hvd_autosync.study.related_studies import observations_of
        from hvd_autosync.study.study import AskTellStudy
        settings = StudySettings(trials=9)
        study = AskTellStudy.create(SPACE, store={store!r}, settings=settings, job_key="j")
        job = SimulatedJob()
        for _ in range(4):
            trial = study.ask()
            study.tell(trial, job.steps(trial.strategy))
        study.ask()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    died = subprocess.run([sys.executable, "-c", driver], env={**os.environ})
    assert died.returncode == -signal.SIGKILL
    traces = TraceStore(store)
    record = traces.claim_resumable("j")
    assert record is not None and record.status is StudyStatus.RUNNING
    resumed = AskTellStudy(traces, record)
    before = [t.strategy for t in resumed.history if t.result is not None]
    assert len(before) == 4
    lost, again = resumed.history[4], resumed.ask()
    assert lost.result is None and again is not None
    assert again.strategy == lost.strategy and again.number == 5
    resumed.tell(again, SimulatedJob(seed=1).steps(again.strategy))
    finish(resumed, SimulatedJob(seed=1))
    measured = [t for t in resumed.history if t.result is not None]
    assert [t.strategy for t in measured[:4]] == before
    assert traces.study(record.study_id).status is StudyStatus.FINISHED


def test_a_strategy_that_takes_its_driver_along_is_given_up(tmp_path: Path) -> None:
    first = study(tmp_path)

    def lost() -> Trial:
        trial = AskTellStudy(first.store, first.record).ask()
        assert trial is not None
        return trial

    assert {lost().kind for _ in range(4)} == {"default"}, "nothing can be tuned without it"
    default = first.ask()
    assert default is not None
    first.tell(default, [0.1] * 20)
    strategies = [lost().strategy for _ in range(4)]
    assert strategies[0] == strategies[1] == strategies[2] != strategies[3]
    (crashed,) = (t for t in counted(SPACE, first.history) if t.kind != "default")
    assert crashed.strategy == strategies[0] and crashed.result is not None
    assert crashed.result.status is TrialStatus.CRASHED
    three = [trial for trial in first.history if trial.strategy == strategies[0]]
    seeds = [replace(trial, info={"seed": seed}) for seed, trial in enumerate(three)]
    assert len(seeds) == 3 and not counted(SPACE, seeds), "one end of the driver takes all three"
    assert all(c.same for c in verify(first.store, first.record, first.history))


def test_a_live_trial_that_ends_with_its_training_blames_no_strategy(tmp_path: Path) -> None:
    """Trainings may be short, or be stopped at the same hour each day."""
    first = study(tmp_path, mode="live")
    default = first.ask()
    assert default is not None
    first.tell(default, [0.1] * 20)

    def lost() -> Trial:
        trial = AskTellStudy(first.store, first.record).ask()
        assert trial is not None
        return trial

    *three, another = (lost().strategy for _ in range(4))
    assert len(set(three)) == 1 and another not in three, "the search goes on"
    (unknown,) = (t for t in first._counted() if t.kind != "default")
    assert unknown.result is not None and unknown.result.status is TrialStatus.CUT_SHORT
    assert is_unknown(unknown) and len(observations_of(SPACE, [unknown])) == 0
    assert all(c.same for c in verify(first.store, first.record, first.history))
    confirming = [replace(trial, kind="confirm") for trial in first.history[1:4]]
    assert not counted(SPACE, confirming, live=True), "it is asked for again"


@pytest.mark.parametrize("repetition", [[0.1] * 20, None])
@pytest.mark.parametrize("mode", ["launched", "live"])
def test_a_repeated_default_between_losses_does_not_excuse_a_strategy(
    tmp_path: Path, mode: str, repetition: list[float] | None
) -> None:
    """As of a training of each night, which ends in the same trial; ``None``: or before it."""
    first = study(tmp_path, mode=mode)
    default = first.ask()
    assert default is not None
    first.tell(default, [0.1] * 20)
    lost = []
    for _ in range(4):
        night = AskTellStudy(first.store, first.record)
        again = night.ask_default()
        if repetition is not None:
            night.tell(again, repetition)
        trial = AskTellStudy(first.store, first.record).ask()
        assert trial is not None
        lost.append(trial.strategy)
    assert lost[0] == lost[1] == lost[2] != lost[3], "the search goes on"
    assert all(c.same for c in verify(first.store, first.record, first.history))


def test_who_asks_and_tells_is_alive_for_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "traces.db"
    study = AskTellStudy.create(SPACE, store=str(path))

    def age_s() -> float:
        """Seconds since the last heartbeat, which then is long ago."""
        with closing(sqlite3.connect(path)) as connection, connection:
            query = "SELECT heartbeat_s FROM hvd_autosync_studies"
            ((beat_s,),) = connection.execute(query).fetchall()
            connection.execute("UPDATE hvd_autosync_studies SET heartbeat_s = 1.0")
        return time.time() - float(beat_s)

    deciding, decide = [], study.decide

    def slowly() -> Any:
        deciding.append(age_s())
        return decide()

    monkeypatch.setattr(study, "decide", slowly)
    age_s()
    trial = study.ask()
    assert trial is not None
    assert deciding[0] < HEARTBEAT_LIMIT_S and age_s() < HEARTBEAT_LIMIT_S
    study.tell(trial, [0.1] * 12)
    assert age_s() < HEARTBEAT_LIMIT_S


def test_a_study_that_another_driver_has_taken_over_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    path = tmp_path / "traces.db"
    study = AskTellStudy.create(SPACE, store=str(path), settings=StudySettings(trials=2))
    trial = study.ask()
    assert trial is not None
    with closing(sqlite3.connect(path)) as connection, connection:
        query = "SELECT owner FROM hvd_autosync_studies"
        ((mine,),) = connection.execute(query).fetchall()
        other = json.dumps(json.loads(mine) | {"host": "elsewhere"})
        connection.execute("UPDATE hvd_autosync_studies SET owner = ?", [other])
    for act in (
        study.ask,
        lambda: study.tell(trial, [0.1] * 12),
        lambda: study.finish(Conclusion(Strategy(), "no gain", "enough", 0.1, ())),
    ):
        with pytest.raises(NotOwnerError, match="on elsewhere has taken it over") as caught:
            act()
        assert " is kept in " not in caught.value.message, "the other driver measures it again"
    assert not (tmp_path / "data").exists()
    (only,) = study.history
    assert only.result is None
    assert study.store.study(study.study_id).status is StudyStatus.RUNNING


def test_each_result_is_read_from_the_store_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    record = rows._record

    def noted(kind: type, row: Any) -> Any:
        if kind is TrialRecord and row["result"] is not None:
            read.append(row["number"])
        return record(kind, row)

    monkeypatch.setattr(rows, "_record", noted)
    settings = StudySettings(trials=3, seed=1)
    study = AskTellStudy.create(SPACE, store=str(tmp_path / "traces.db"), settings=settings)
    told = []
    while (trial := study.ask()) is not None:
        study.tell(trial, [0.1] * 12)
        told.append(trial.number)
    assert sorted(read) == told


def test_another_process_may_ask_in_a_study_that_it_has_loaded(tmp_path: Path) -> None:
    store = TraceStore(str(tmp_path / "traces.db"))
    study = AskTellStudy.create(SPACE, store=store)
    store.let_go(study.study_id)
    trial = study.ask()
    assert trial is not None
    study.tell(trial, [0.1] * 12)
    assert store.interrupted() == frozenset(), "it belongs to who asks"


@pytest.mark.parametrize("count", [1, 4])
def test_too_few_steps_for_a_step_time_are_refused(tmp_path: Path, count: int) -> None:
    one = study(tmp_path)
    trial = one.ask()
    assert trial is not None
    with pytest.raises(StudyError, match=f"{count} of the 5 steps"):
        one.tell(trial, [0.1] * count)
    assert one.history[0].result is None
    one.tell(trial, [0.1] * 5)
    assert one.history[0].result is not None and one.history[0].result.step_time is not None


def test_a_default_that_was_lost_beside_others_is_measured_again(tmp_path: Path) -> None:
    one, job = study(tmp_path, trials=6), SimulatedJob()
    default, other = one.ask(), one.ask()
    assert default is not None and other is not None
    one.tell(other, job.steps(other.strategy))
    again = AskTellStudy(one.store, one.record).ask()  # its driver has died
    assert again is not None and (again.kind, again.strategy) == ("default", default.strategy)
