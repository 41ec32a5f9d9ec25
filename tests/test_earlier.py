"""What earlier studies know of a job that is about to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_autosync.earlier import known_ceilings, known_of
from hvd_autosync.noninferiority import Outcome
from hvd_autosync.quality import Verdict
from hvd_autosync.search_space import Strategy, TrialResult, TrialStatus, catalogue_knob
from hvd_autosync.search_space.space import SearchSpace
from hvd_autosync.search_space.trial import RankReport
from hvd_autosync.study_values import Conclusion
from hvd_autosync.traces import StudyStatus, TraceStore

SPACE = SearchSpace((catalogue_knob("local_steps"),))
SLOW = Strategy({"local_steps": 4})


@pytest.fixture
def location(tmp_path: Path) -> str:
    return str(tmp_path / "traces.db")


def judged(location: str, *, admissible: bool) -> str:
    """A study whose default has a loss of 1, and ``SLOW`` twice that; its id."""
    store = TraceStore(location)
    study = store.create_study(job_key="job", command=(), settings={}, versions={})
    store.describe_task(study.study_id, None, SPACE)
    for strategy, loss, steps in [(SPACE.default, 1.0, 64)] * 3 + [(SLOW, 2.0, 96)]:
        number = store.ask(study.study_id, strategy, "quality", {"seed": 0})
        losses = (loss,) * steps
        result = TrialResult(TrialStatus.COMPLETED, ranks=(RankReport(0, "a", losses=losses),))
        store.tell(study.study_id, number, result)
    outcome = Outcome.ADMITTED if admissible else Outcome.WORSE
    verdict = Verdict(SLOW, outcome, 2.0, 1.0, 0.1, "it was said so")
    conclusion = Conclusion(SPACE.default, "", "", 0.1, verdicts=(verdict,))
    store.finish(
        study.study_id, StudyStatus.FINISHED, conclusion.to_json(), conclusion.winner
    )  # fmt: skip
    return study.study_id


def test_an_unknown_strategy_keeps_up_with_the_default(location: str) -> None:
    judged(location, admissible=True)
    other = Strategy({"local_steps": 8})
    assert known_ceilings(location, {"job"}, other) == pytest.approx([1.05] * 2)


def test_one_that_may_be_used_is_as_it_was_when_it_was_judged(location: str) -> None:
    judged(location, admissible=True)
    assert known_ceilings(location, {"job"}, SLOW) == pytest.approx([2.1] * 3)


def test_one_that_was_refused_keeps_up_with_the_default(location: str) -> None:
    judged(location, admissible=False)
    assert known_ceilings(location, {"job"}, SLOW) == pytest.approx([1.05] * 2)


def test_a_strategy_from_outside_of_the_space_is_no_error(location: str) -> None:
    judged(location, admissible=True)
    outside = Strategy({"large_codec": "topk"})
    assert known_ceilings(location, {"job"}, outside) == pytest.approx([1.05] * 2)


def test_other_jobs_know_nothing(location: str) -> None:
    judged(location, admissible=True)
    assert known_ceilings(location, {"another"}, SLOW) == ()


@pytest.mark.parametrize("forgotten", [False, True])
def test_who_takes_over_a_winner_takes_over_what_its_losses_were(
    location: str, forgotten: bool
) -> None:
    source, store = judged(location, admissible=True), TraceStore(location)
    study = store.create_study(job_key="edited", command=(), settings={}, versions={})
    conclusion = Conclusion(SLOW, "", "", 0.1, source=source)
    store.finish(study.study_id, StudyStatus.FINISHED, conclusion.to_json(), SLOW)
    if forgotten:
        store.delete(source)
    known = known_of(store.study(study.study_id), location)
    assert known.loss_ceilings == pytest.approx([] if forgotten else [2.1] * 3)
