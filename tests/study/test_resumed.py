"""A study that goes on after a rest compares what was measured on both days."""

import math
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from hvd_autosync.engine.replay import verify
from hvd_autosync.errors import StudyError
from hvd_autosync.learner import BayesianLearner
from hvd_autosync.learner.base import Suggestion
from hvd_autosync.learner.problem import Problem
from hvd_autosync.search_space import RankReport, SearchSpace, Strategy, TrialResult, TrialStatus
from hvd_autosync.search_space.knobs import float_knob
from hvd_autosync.study.candidate_selection import pruned
from hvd_autosync.study.decision import Decision, TrialRequest
from hvd_autosync.study.related_studies import observations_of
from hvd_autosync.study.resumed import at_one_speed, has_rested, repeated_defaults
from hvd_autosync.study.stage_budget import explored
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import StudySettings, Trial
from hvd_autosync.traces import TraceStore, TrialRecord, default_result
from hvd_autosync.traces.records import timestamp

SPACE = SearchSpace((float_knob("cycle_time_ms", 0.1, 100.0, 1.0, scale="log", help=""),))
SLOW, FAST = Strategy({"cycle_time_ms": 50.0}), Strategy({"cycle_time_ms": 0.5})
NOW = datetime(2026, 1, 2, 12, 0, tzinfo=timezone.utc)


def trial(number: int, kind: str, strategy: Strategy, step_s: float | None) -> TrialRecord:
    """A trial with steps of a given length; ``None``: it failed."""
    if step_s is None:
        result = TrialResult(TrialStatus.CRASHED, "it failed")
    else:
        rank = RankReport(0, "a", (step_s,) * 30)
        result = TrialResult(TrialStatus.COMPLETED, ranks=(rank,), setup_s=1.0, total_s=9.0)
    moment = timestamp(NOW)
    return TrialRecord("study", number, kind, strategy, moment, moment, {}, result)


def test_ten_minutes_without_a_trial_are_a_rest() -> None:
    trials = [trial(0, "default", Strategy(), 0.1)]
    assert not has_rested(trials, NOW + timedelta(minutes=9))
    assert has_rested(trials, NOW + timedelta(minutes=11))
    again = replace(
        trial(1, "default", Strategy(), None), told_at=timestamp(NOW + timedelta(hours=1))
    )
    assert has_rested([*trials, again], NOW + timedelta(hours=1)), "it has shown no speed"
    running = replace(trials[0], told_at=None, result=None)
    assert not has_rested([running], NOW + timedelta(days=1))


def test_what_was_measured_on_a_fast_day_is_as_slow_as_on_this_one() -> None:
    days = [
        trial(0, "default", Strategy(), 0.1),
        trial(1, "sobol", FAST, 0.08),
        trial(2, "default", Strategy(), 0.2),
        trial(3, "sobol", SLOW, 0.3),
    ]
    now = at_one_speed(days)
    assert [t.result.step_time.mean_s for t in now] == pytest.approx([0.2, 0.16, 0.2, 0.3])
    assert at_one_speed(now) == now
    # Minutes are those of the clock.
    assert [t.result.total_s for t in now] == [9.0] * 4
    seen = observations_of(SPACE, days)
    assert [(o.strategy, pytest.approx(o.step_s)) for o in seen] == [
        (FAST, 0.16),
        (SPACE.default, 0.2),
        (SLOW, 0.3),
    ]


def test_a_repeated_default_uses_up_no_exploring_trial() -> None:
    days = [
        trial(0, "default", Strategy(), 0.1),
        trial(1, "sobol", FAST, 0.08),
        trial(2, "default", Strategy(), 0.2),
    ]
    assert [t.number for t in explored(days)] == [0, 1]


def test_exploring_does_not_end_sooner_where_the_default_was_repeated() -> None:
    """A small gain ends it after four strategies, not after four trials."""

    class Content(BayesianLearner):
        def suggest(self, *_: object, **__: object) -> Suggestion:
            return Suggestion(SLOW, "model", {"expected_gain": 0.0})

    days = [trial(number, "default", Strategy(), 0.1) for number in range(3)]
    days.append(trial(3, "sobol", FAST, 0.08))
    wanted = Decision(Problem(SPACE), StudySettings(), Content(), days).next()
    assert isinstance(wanted, TrialRequest) and (wanted.strategy, wanted.kind) == (SLOW, "model")


def test_a_default_of_no_time_changes_no_speed() -> None:
    """As where an imported trace has steps of 0 s."""
    days = [
        trial(0, "default", Strategy(), 0.0),
        trial(1, "sobol", FAST, 0.08),
        trial(2, "default", Strategy(), 0.2),
    ]
    assert at_one_speed(days) == days


def test_a_good_strategy_of_a_slow_day_is_not_pruned_on_a_fast_one() -> None:
    """By the default of the other day it would be 1.6 times as slow."""
    days = [
        trial(0, "default", Strategy(), 0.2),
        trial(1, "sobol", FAST, 0.16),
        trial(2, "sobol", SLOW, 0.3),
        trial(3, "default", Strategy(), 0.1),
    ]
    assert pruned(SPACE, at_one_speed(days)) == {SLOW}
    assert FAST in pruned(SPACE, days)


def test_a_default_that_fails_later_changes_no_speed() -> None:
    days = [trial(0, "default", Strategy(), 0.1), trial(1, "default", Strategy(), None)]
    assert at_one_speed(days) == days
    assert default_result(days) == days[0].result
    assert repeated_defaults(days) == {1}


def test_a_default_that_was_measured_works_whatever_fails_later() -> None:
    """As while a host is down; else its neighbours would count as likely to fail, too."""
    for kind in ("default", "quality", "confirm"):
        days = [
            trial(0, "default", Strategy(), 0.1),
            trial(1, "sobol", FAST, None),
            trial(2, kind, Strategy(), None),
        ]
        seen = [(o.strategy, o.step_s) for o in observations_of(SPACE, days)]
        assert seen == [(SPACE.default, pytest.approx(0.1)), (FAST, None)]
        assert len(observations_of(SPACE, days[1:])) == 2, "nothing says that it works"


def test_another_default_of_a_restricted_space_is_no_repetition() -> None:
    trials = [trial(0, "default", Strategy(), 0.1), trial(1, "default", FAST, 0.2)]
    assert at_one_speed(trials) == trials and not repeated_defaults(trials)


def test_a_slower_day_leads_to_the_same_choices(tmp_path: Path) -> None:
    def played(factor_then: float) -> list[Strategy]:
        """Strategies of a study that rests after four trials; by then all steps take longer."""
        store = TraceStore(tmp_path / f"{factor_then}.db")
        study = AskTellStudy.create(SPACE, store=store, settings=StudySettings(trials=12, seed=3))

        def tell(request: Trial, factor: float) -> None:
            cycle_ms = dict(SPACE.complete(request.strategy))["cycle_time_ms"]
            off = abs(math.log(cycle_ms / 5.0))
            study.tell(request, [factor * 0.1 * (1 + 0.1 * off)] * 30)

        for _ in range(4):
            request = study.ask()
            assert request is not None
            tell(request, 1.0)
        tell(study.ask_default(), factor_then)
        while (request := study.ask()) is not None and request.kind != "confirm":
            tell(request, factor_then)
        return [t.strategy for t in study.history]

    one, other = played(1.0), played(3.0)
    assert one == other and len(one) > 5


def test_nothing_is_repeated_before_it_was_measured(tmp_path: Path) -> None:
    study = AskTellStudy.create(SPACE, store=TraceStore(tmp_path / "traces.db"))
    with pytest.raises(StudyError, match="has not measured its default yet"):
        study.ask_default()


def test_replay_accepts_the_repeated_default(tmp_path: Path) -> None:
    store = TraceStore(tmp_path / "traces.db")
    study = AskTellStudy.create(SPACE, store=store, settings=StudySettings(trials=6, seed=1))
    factor = 1.0
    while (request := study.ask()) is not None:
        study.tell(request, [factor * (0.1 if request.strategy == SPACE.default else 0.09)] * 30)
        if request.number == 2:
            factor = 3.0
            again = study.ask_default()
            study.tell(again, [factor * 0.1] * 30)
    checks = list(verify(store, study.record, study.history))
    assert all(check.same for check in checks)
    assert [c.number for c in checks if "the study had rested" in c.note] == [3]
