"""Whether a training that runs can take over the winner of a study."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_autosync.engine import compatibility
from hvd_autosync.engine.compatibility import why_not_in_place, why_not_resumed, winner_for
from hvd_autosync.errors import ConfigurationError, SpaceError
from hvd_autosync.launch.job import Job
from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    SearchSpace,
    Strategy,
    catalogue_knob,
    restrict_space,
)
from hvd_autosync.search_space.knobs import Value
from hvd_autosync.study.values import StudySettings
from hvd_autosync.traces import StudyRecord, StudyStatus
from hvd_autosync.util.versions import deciding_versions

BUILD = HorovodBuild("0.28.1", gloo=True, mpi=True, nccl=False)
FIXED = ("controller", "cycle_time_ms", "cache_capacity")


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ({}, ""),
        ({"controller": "gloo"}, "controller=gloo"),
        ({"cycle_time_ms": 5.0}, "cycle_time_ms=5.0"),
        ({"controller": "gloo", "cache_capacity": 0}, "cache_capacity=0, controller=gloo"),
    ],
)
def test_what_a_winner_has_moved_is_what_it_needs_from_the_start(
    moved: bool, changed: dict[str, Value], needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the space lacks the job, as its file has moved the default of another knob."""
    monkeypatch.setattr(compatibility, "horovod_build", lambda: BUILD)
    controller = replace(catalogue_knob("controller"), default="mpi")  # of this Horovod
    others = tuple(map(catalogue_knob, (*FIXED[1:], "buckets")))
    low = {"knobs": {"buckets": {"low": 2}}}
    space = restrict_space(SearchSpace((controller, *others)), low if moved else {})
    assert space.holds_job is not moved
    winner = Strategy({**space.default, **changed})
    study = StudyRecord("1", "", "", (), {}, {}, StudyStatus.FINISHED, None, space, None, winner)
    why = why_not_in_place(study, FIXED, {})
    assert why == (f"its winner needs {needed} from the start" if needed else "")


def test_what_is_not_tried_live_is_not_said_to_be_needed_from_the_start() -> None:
    """As an order in whose live trial a training has failed."""
    space = SearchSpace((catalogue_knob("order"),))
    winner = Strategy({"order": "priority"})
    study = StudyRecord("1", "", "", (), {}, {}, StudyStatus.FINISHED, None, space, None, winner)
    assert why_not_in_place(study, (), {}) == ""
    why = why_not_in_place(study, (), {"order": {"priority"}})
    assert why == "its winner has order=priority, which is not tried live"


def test_a_running_study_may_be_waited_for() -> None:
    study = StudyRecord("1", "", "", (), {}, {}, StudyStatus.RUNNING, None, None, None, None)
    with pytest.raises(ConfigurationError, match="study 1 has no winner: it is running") as error:
        winner_for(study, Job(("-np", "2"), ("true",), (Host("a", 2),)))
    assert error.value.hint.startswith("Wait for its end, run its command again if")


def test_a_winner_of_an_extension_that_is_not_loaded_is_refused_before_the_launch() -> None:
    winner = Strategy({"rest_exchange": "gather"})
    study = StudyRecord("1", "", "", (), {}, {}, StudyStatus.FINISHED, None, None, None, winner)
    job = Job(("-np", "2"), ("true",), (Host("a", 2),))
    with pytest.raises(SpaceError, match=r"the winner of study 1: knob rest_exchange") as error:
        winner_for(study, job)
    assert "HVD_AUTOSYNC_EXTENSIONS" in error.value.hint


def test_a_recorded_winner_is_not_said_to_be_in_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compatibility, "horovod_build", lambda: BUILD)
    winner = Strategy({"cycle_time_ms": 5.0})
    study = StudyRecord("1", "", "", (), {}, {}, StudyStatus.FINISHED, None, None, None, winner)
    job = Job(("-np", "2"), ("true",), (Host("a", 2),), held=(("cycle_time_ms", 2.0),))
    with pytest.raises(SpaceError, match=r"is 5\.0 in the strategy, but .* set 2\.0") as error:
        winner_for(study, job)
    assert "Leave out that option or variable" in error.value.hint


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({}, ""),
        ({"torch": "0.1"}, "was measured under other versions (torch was 0.1, here it is "),
        ({"horovod": "0.1"}, "was measured under other versions (horovod was 0.1, here it is "),
        ({"scipy": "0.1", "hvd-autosync": "0.0", "hvd-autosync's sources": "0"}, ""),
    ],
)
def test_a_study_is_resumed_under_the_versions_that_it_has_measured(
    other: dict[str, str], why: str
) -> None:
    settings, versions = StudySettings(), {**deciding_versions(), **other}
    running = StudyStatus.RUNNING
    study = StudyRecord(
        "1", "", "", (), settings.to_json(), versions, running, None, None, None, None
    )
    found = why_not_resumed(study, settings, (), {})
    assert found.startswith(why) and bool(found) == bool(why)
    assert why_not_resumed(replace(study, versions={}), settings, (), {}) == ""


@pytest.mark.parametrize(("was", "now"), [("launched", "live"), ("live", "launched")])
def test_another_mode_is_named_as_the_reason(was: str, now: str) -> None:
    """The settings leave out what is as it was before there was a choice."""
    study = StudyRecord(
        *("1", "", "", (), StudySettings(mode=was).to_json(), deciding_versions()),
        *(StudyStatus.RUNNING, None, None, None, None),
    )
    found = why_not_resumed(study, StudySettings(mode=now), (), {})
    assert found == f"has other settings (mode {was}, now {now})"
