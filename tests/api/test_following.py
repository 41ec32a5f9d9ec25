"""Following a training that is tuned in its own steps: what its store and its notes tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_autosync.api.following import FollowedStudy, Follower
from hvd_autosync.errors import LiveTuningError
from hvd_autosync.reporting.tuning_progress import TuningProgress
from hvd_autosync.search_space import SearchSpace, Strategy, catalogue_knob
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Conclusion, Trial
from hvd_autosync.traces import StudyStatus, TraceStore

SPACE = SearchSpace((catalogue_knob("buckets"),))
KEY = "key of a job"


class Events:
    """A listener that keeps the names of events, with the numbers of trials."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []
        self.notices: list[str] = []

    def on_notice(self, text: str) -> None:
        self.notices.append(text)

    def __getattr__(self, name: str) -> Callable[..., None]:
        def take(*arguments: Any, **_: Any) -> None:
            number = next((each.number for each in arguments if hasattr(each, "number")), -1)
            self.seen.append((name, number))

        return take

    def told(self) -> list[tuple[str, int]]:
        others = ("on_trial_progress", "on_ask_start", "on_wait")
        return [each for each in self.seen if each[0] not in others]


class Tuned:
    """A training, and the study that its helper process makes."""

    def __init__(self, folder: Path) -> None:
        self.store = TraceStore(str(folder / "t.db"))
        self.status: int | None = None
        self.refusal = self.study_id = self.tuning_ended = ""
        self.output = Path("x.log")
        self.study: AskTellStudy
        self.trial: Trial | None = None

    def last_lines(self) -> str:
        return "its last line"

    def create(self, space: SearchSpace | None = SPACE) -> None:
        self.study = AskTellStudy.create(space, store=self.store, job_key=KEY)
        self.study_id = self.study.study_id

    def ask(self) -> None:
        self.trial = self.study.ask()

    def tell(self) -> None:
        assert self.trial is not None
        self.study.tell(self.trial, [0.1] * 12)

    def conclude(self) -> None:
        self.study.finish(Conclusion(Strategy(), "no gain", "enough", 0.1, ()))

    def resume(self) -> None:
        record = self.store.claim_resumable(KEY)
        assert record is not None
        self.study = AskTellStudy(self.store, record)
        self.study_id = record.study_id

    def lose(self) -> None:
        self.store.let_go(self.study.study_id)


def do(*names: str) -> Callable[[Tuned], None]:
    """Let these methods be called between two looks."""

    def call(tuned: Tuned) -> None:
        for name in names:
            getattr(tuned, name)()

    return call


def end(status: int | None = None, **given: str) -> Callable[[Tuned], None]:
    """Let the training or its tuning end between two looks."""

    def change(tuned: Tuned) -> None:
        tuned.status = status
        for name, value in given.items():
            setattr(tuned, name, value)

    return change


def follow(
    folder: Path,
    *between: Callable[[Tuned], None],
    tuned: Tuned | None = None,
    listener: Any = None,
) -> tuple[Follower, Tuned, Events]:
    """A follower of a training that does one thing between every two looks."""
    training, left, events = tuned or Tuned(folder), [*between], listener or Events()

    def sleep(_: float) -> None:
        left.pop(0)(training)

    return Follower(training.store, events, "resume tuning", sleep), training, events


def test_what_happens_in_the_store_is_told_in_order(tmp_path: Path) -> None:
    asked = (do("ask"), do("tell"))
    follower, tuned, events = follow(
        tmp_path,
        do("create"),
        *asked,
        do("ask"),
        lambda _: None,
        do("tell"),
        *asked,
        do("conclude"),
    )
    record = follower.until_ended(tuned)  # type: ignore[arg-type]
    assert record.status is StudyStatus.FINISHED and record.study_id == tuned.study_id
    assert [each for each in events.seen if each[0] != "on_trial_progress"] == [
        ("on_wait", -1),
        ("on_study_start", -1),
        ("on_ask_start", -1),
        ("on_trial_start", 0),
        ("on_trial_end", 0),
        ("on_ask_start", -1),
        ("on_trial_start", 1),
        ("on_trial_end", 1),
        ("on_ask_start", -1),
        ("on_trial_start", 2),
        ("on_trial_end", 2),
        ("on_ask_start", -1),
        ("on_study_end", -1),
    ]
    assert ("on_trial_progress", 1) in events.seen, "a Stop button is looked at there"


def test_trials_that_end_before_the_first_look_are_told_once(tmp_path: Path) -> None:
    class Display(Events):
        def __init__(self) -> None:
            super().__init__()
            self.tuning = TuningProgress()

        def on_study_start(self, study: AskTellStudy, *, resumed: bool) -> None:
            assert not resumed
            self.tuning.start(study)

        def on_trial_end(self, study: AskTellStudy, *given: Any) -> None:
            self.tuning.end(study, *given)

    display = Display()
    twice = ("ask", "tell", "ask", "tell")
    follower, tuned, _ = follow(tmp_path, do("create", *twice), do("conclude"), listener=display)
    follower.until_ended(tuned)  # type: ignore[arg-type]
    assert [each.number for each in display.tuning.ended] == [0, 1]


def test_a_trial_that_was_lost_before_does_not_run(tmp_path: Path) -> None:
    tuned = Tuned(tmp_path)
    do("create", "ask", "tell", "ask", "lose")(tuned)
    follower, _, events = follow(
        tmp_path, do("resume"), do("ask"), do("tell"), do("conclude"), tuned=tuned
    )
    tuned.study_id = ""
    follower.until_ended(tuned)  # type: ignore[arg-type]
    assert events.told() == [
        ("on_study_start", -1),
        ("on_trial_start", 2),
        ("on_trial_end", 2),
        ("on_study_end", -1),
    ]
    assert not [each for each in events.seen if each == ("on_trial_progress", 1)]


def test_studies_of_other_trainings_are_not_followed(tmp_path: Path) -> None:
    others: list[AskTellStudy] = []

    def other(tuned: Tuned) -> None:
        others.append(AskTellStudy.create(SPACE, store=tuned.store, job_key=KEY))

    def conclude_other(_: Tuned) -> None:
        others[0].finish(Conclusion(Strategy(), "no gain", "enough", 0.1, ()))

    follower, tuned, events = follow(
        tmp_path, other, do("create"), other, conclude_other, do("conclude")
    )
    record = follower.until_ended(tuned)  # type: ignore[arg-type]
    assert record.study_id == tuned.study_id
    assert [name for name, _ in events.seen].count("on_study_start") == 1


def test_a_result_is_told_once_the_study_can_be_read(tmp_path: Path) -> None:
    class Reads(Events):
        def on_trial_end(self, study: AskTellStudy, trial: Trial, result: object) -> None:
            self.seen.append(("on_trial_end", trial.number))
            assert study.space is SPACE or study.space == SPACE

    def describe(tuned: Tuned) -> None:
        tuned.study.describe(SPACE)

    undescribed = (lambda tuned: tuned.create(None), do("ask"), do("tell"))
    follower, tuned, events = follow(
        tmp_path, *undescribed, lambda _: None, describe, do("conclude"), listener=Reads()
    )
    follower.until_ended(tuned)  # type: ignore[arg-type]
    assert ("on_trial_end", 0) in events.seen
    # A study whose default cannot be measured is never described.
    follower, tuned, events = follow(
        tmp_path, *undescribed, end(tuning_ended="live tuning has ended: why")
    )
    follower.until_ended(tuned)  # type: ignore[arg-type]
    assert ("on_trial_end", 0) in events.seen


def test_a_training_that_is_started_again_has_another_study(tmp_path: Path) -> None:
    def fail(tuned: Tuned) -> None:
        tuned.store.finish(tuned.study_id, StudyStatus.FAILED, {"reason": "it failed"}, None)

    follower, tuned, events = follow(
        tmp_path, do("create"), fail, *[lambda _: None] * 100, do("create"), do("conclude")
    )
    record = follower.until_ended(tuned)  # type: ignore[arg-type]
    assert record.study_id == tuned.study_id
    assert [name for name, _ in events.seen].count("on_study_start") == 2


@pytest.mark.parametrize("status", [None, 0, 3])
def test_a_tuning_that_ends_without_its_training_is_told(
    tmp_path: Path, status: int | None
) -> None:
    why = "live tuning has ended: the process that tunes has ended"
    follower, tuned, events = follow(
        tmp_path, do("create"), do("ask"), end(status, tuning_ended=why)
    )
    record = follower.until_ended(tuned)  # type: ignore[arg-type]
    assert record.study_id == tuned.study_id and record.status is StudyStatus.RUNNING
    (said,) = events.notices
    assert why in said
    assert ("the training goes on; to resume tuning: study.training.stop()" in said) is (
        status is None
    )


def test_a_training_that_fails_in_its_tuning_is_an_error(tmp_path: Path) -> None:
    follower, tuned, _ = follow(tmp_path, do("create"), do("ask"), end(3))
    with pytest.raises(LiveTuningError, match=r"status 3 in its tuning, study \w+:\nits last line"):
        follower.until_ended(tuned)  # type: ignore[arg-type]


def test_a_training_that_ends_in_its_tuning_is_told(tmp_path: Path) -> None:
    follower, tuned, events = follow(tmp_path, do("create"), do("ask"), end(0))
    record = follower.until_ended(tuned)  # type: ignore[arg-type]
    assert record.status is StudyStatus.RUNNING
    assert events.notices == [
        "the training has ended before its tuning; run the same call again to resume tuning"
    ]


def test_a_training_that_fails_after_its_tuning_is_tuned(tmp_path: Path) -> None:
    follower, tuned, _ = follow(tmp_path, do("create"), lambda it: (do("conclude")(it), end(3)(it)))
    assert follower.until_ended(tuned).status is StudyStatus.FINISHED  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (end(3), "status 3 before its tuning:\nits last line"),
        (end(0, refusal="it has Adasum"), "because it has Adasum"),
        (end(tuning_ended="this training is not tuned: why"), "not tuned: why; the training is"),
    ],
)
def test_a_training_without_a_study_is_an_error(
    tmp_path: Path, ended: Callable[[Tuned], None], said: str
) -> None:
    follower, tuned, _ = follow(tmp_path, ended)
    with pytest.raises(LiveTuningError, match=said):
        follower.until_ended(tuned)  # type: ignore[arg-type]


def test_a_followed_study_has_the_trials_that_were_told(tmp_path: Path) -> None:
    tuned = Tuned(tmp_path)
    do("create", "ask")(tuned)
    study = FollowedStudy(tuned.store, tuned.study.record)
    assert study.history == [] and len(tuned.study.history) == 1


def test_a_look_without_news_reads_no_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    for name in ("study", "trials"):
        read = getattr(TraceStore, name)

        def noted(*given: object, name: str = name, read: Callable[..., object] = read) -> object:
            loads.append(name)
            return read(*given)

        monkeypatch.setattr(TraceStore, name, noted)
    counts: list[int] = []

    def count(_: Tuned) -> None:
        counts.append(len(loads))

    follower, tuned, events = follow(
        tmp_path, do("create"), do("ask"), count, count, count, do("tell"), do("conclude")
    )
    follower.until_ended(tuned)  # type: ignore[arg-type]
    assert counts[0] > 0 and counts == counts[:1] * 3
    # A Stop button is still looked at in each.
    assert events.seen.count(("on_trial_progress", 0)) >= 3
    assert ("on_trial_end", 0) in events.seen
