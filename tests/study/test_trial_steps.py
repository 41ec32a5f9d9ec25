"""How many steps of a trial are measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvd_autosync.search_space import SearchSpace, Strategy, catalogue_knob
from hvd_autosync.study.decision import TrialRequest
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.trial_steps import comparable_steps, whole_rounds
from hvd_autosync.study.values import StudySettings

H16 = Strategy({"local_steps": 16})


@pytest.mark.parametrize(
    ("local_steps", "steps", "measured"), [(1, 40, 40), (4, 40, 40), (16, 40, 96), (16, 100, 112)]
)
def test_local_steps_are_measured_in_whole_rounds(
    local_steps: int, steps: int, measured: int
) -> None:
    assert whole_rounds(Strategy({"local_steps": local_steps}), steps) == measured


def test_what_is_compared_sees_the_same_steps() -> None:
    """A step may take less time after the first hundred, or longer."""
    assert comparable_steps((Strategy(), Strategy({"local_steps": 4})), 40) is None
    assert comparable_steps((Strategy(), H16), 40) == 96


def test_the_default_is_confirmed_with_as_many_steps_as_its_candidates(tmp_path: Path) -> None:
    space = SearchSpace((catalogue_knob("buckets"), catalogue_knob("local_steps")))
    settings = StudySettings(allow=("schedule",), steps=40)
    one = AskTellStudy.create(space, store=str(tmp_path / "traces.db"), settings=settings)
    trial = one.ask()
    assert trial is not None and trial.steps is None
    one.tell(trial, [0.1] * 40)
    plan = {"stopped": "", "candidates": [dict(H16)]}
    for strategy in (space.default, H16):
        one.tell(one._asked(TrialRequest(strategy, "confirm", plan)), [0.1] * 96)
    wanted = one.decide()
    assert isinstance(wanted, TrialRequest)
    assert (wanted.kind, wanted.steps) == ("confirm", 96)
