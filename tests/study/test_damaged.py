"""Numbers that no job gives, as in a trace that was edited: the study is named, and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_autosync.errors import TraceFormatError
from hvd_autosync.learner import BayesianLearner
from hvd_autosync.learner.problem import Problem
from hvd_autosync.reporting.tuning_progress import TuningProgress
from hvd_autosync.search_space import RankReport, SearchSpace, Strategy, TrialResult, TrialStatus
from hvd_autosync.search_space.knobs import categorical_knob
from hvd_autosync.study.decision import Decision
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import TraceStore, TrialRecord

SPACE = SearchSpace((categorical_knob("codec", ("none", "topk"), "none", help="", exact=False),))
CODED = SPACE.complete({"codec": "topk"})
PLAN = {"stopped": "", "candidates": [dict(CODED)]}


def trial(
    number: int, kind: str, strategy: Strategy, step_s: float, info: dict[str, Any] | None = None
) -> TrialRecord:
    losses = tuple(1.0 / (1 + step) for step in range(200))
    rank = RankReport(0, "a", (step_s,) * 30, losses=losses)
    result = TrialResult(TrialStatus.COMPLETED, ranks=(rank,), setup_s=1.0, total_s=9.0)
    return TrialRecord("0123456789ab", number, kind, strategy, "", "", info or {}, result)


def confirmed() -> list[TrialRecord]:
    """Three rounds, in which the candidate takes no time, or longer than the world exists."""
    found = [trial(0, "default", Strategy(), 0.1)]
    for step_s in (1e-140, 1e140, 1e-140):
        for strategy, own_s in ((SPACE.default, 0.1), (CODED, step_s)):
            found.append(trial(len(found), "confirm", strategy, own_s, PLAN))
    return found


def check(error: TraceFormatError, study_id: str = "0123456789ab") -> None:
    assert f"the trials of study {study_id} are damaged" in error.message
    assert error.hint.endswith(f"traces delete {study_id}")


@pytest.mark.parametrize("what", ["next", "proven"])
def test_step_times_whose_ratio_is_no_number(what: str) -> None:
    decision = Decision(Problem(SPACE), StudySettings(), BayesianLearner(), confirmed())
    with pytest.raises(TraceFormatError) as error:
        getattr(decision, what)()
    check(error.value)


@pytest.mark.parametrize("what", ["next", "verdicts"])
def test_a_candidate_that_was_judged_without_the_default(what: str) -> None:
    settings = StudySettings(quality_minutes=0.01, allow=("codec",))  # so no trial can follow
    judged = trial(1, "quality", CODED, 0.05, {"seed": 1})
    trials = [trial(0, "default", Strategy(), 0.1), judged]
    decision = Decision(Problem(SPACE), settings, BayesianLearner(), trials)
    with pytest.raises(TraceFormatError) as error:
        getattr(decision, what)()
    check(error.value)


def test_a_display_names_the_study_too() -> None:
    store = TraceStore("sqlite://")
    study = AskTellStudy.create(SPACE, store=store)
    for each in confirmed():
        number = store.ask(study.study_id, each.strategy, each.kind, each.info)
        assert each.result is not None
        store.tell(study.study_id, number, each.result)
    standing = TuningProgress()
    standing.start(study)
    with pytest.raises(TraceFormatError) as error:
        standing.best_text(study)
    check(error.value, study.study_id)
