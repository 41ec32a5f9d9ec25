"""The table of lossy strategies, its front, and one of them as a file."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_autosync.errors import StudyError
from hvd_autosync.reporting.explain_quality import WORDS, quality_lines, trade_offs
from hvd_autosync.reporting.strategy_export import exported_strategy
from hvd_autosync.search_space import (
    RankReport,
    SearchSpace,
    Strategy,
    TrialResult,
    TrialStatus,
    build_space,
)
from hvd_autosync.search_space.documents import read_toml
from hvd_autosync.search_space.strategy_file import read_strategy
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.study import AskTellStudy
from hvd_autosync.study.values import Conclusion
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import StudyRecord, StudyStatus, TraceStore
from hvd_autosync.traces.anonymous import anonymous

#: Codec of large matrices -> seconds of a step, and loss where the default's is 1.
JUDGED = {
    "topk": (0.01, 1.5),
    "powersgd": (0.02, 1.6),
    "int8": (0.02, 1.1),
    "fp16": (0.06, 0.9),
    "bf16": (0.06, 1.0),
}


@pytest.fixture
def judged(author: Any) -> tuple[AskTellStudy, SearchSpace]:
    task = author.task
    space = build_space(task.model, task.resources, allow=("codec",))
    study = AskTellStudy.create(space, store=author.store, task=task)
    verdicts = []
    for codec, (seconds, loss) in {"none": (0.05, 1.0), **JUDGED}.items():
        strategy = space.complete({"large_codec": codec})
        number = author.store.ask(study.study_id, strategy, "quality", {"seed": 0})
        rank = RankReport(0, "a", (seconds,) * 20)
        author.store.tell(study.study_id, number, TrialResult(TrialStatus.COMPLETED, ranks=(rank,)))
        if codec != "none":
            outcome = Outcome.ADMITTED if loss < 1.2 else Outcome.WORSE
            verdicts.append(Verdict(strategy, outcome, loss, 1.0, 0.1, "so it is"))
    failed = space.complete({"large_codec": "topk", "large_ratio": 0.001})
    verdicts.append(Verdict(failed, Outcome.NOT_SHOWN, math.nan, 1.0, 0.1, "it failed"))
    study.finish(Conclusion(space.default, "why", "how", 0.05, (), tuple(verdicts)))
    return study, space


def test_the_front_holds_what_nothing_beats_in_both(
    judged: tuple[AskTellStudy, SearchSpace],
) -> None:
    study, space = judged
    assert study.conclusion is not None
    found = trade_offs(space, study.history, study.conclusion)
    codecs = [str(each.verdict.strategy["large_codec"]) for each in found]
    assert codecs[0] == "topk" and set(codecs[1:3]) == {"powersgd", "int8"}
    on_front = {codec for codec, each in zip(codecs, found, strict=True) if each.on_front}
    # bf16 is slower than the default and as good; fp16 is slower and better.
    assert on_front == {"topk", "int8", "fp16"}
    assert math.isnan(found[-1].speedup) and not found[-1].on_front
    assert found[0].speedup == pytest.approx(5.0, rel=0.05)


def test_the_speedup_is_that_of_trials_with_the_same_seed(author: Any) -> None:
    """The last two trials of a slow phase, and one that was cut short, change nothing."""
    task = author.task
    space = build_space(task.model, task.resources, allow=("codec",))
    study = AskTellStudy.create(space, store=author.store, task=task)

    def measure(codec: str, seed: int, seconds: float, status: TrialStatus) -> None:
        strategy = space.complete({"large_codec": codec})
        number = author.store.ask(study.study_id, strategy, "quality", {"seed": seed})
        rank = RankReport(0, "a", (seconds,) * 20)
        author.store.tell(study.study_id, number, TrialResult(status, ranks=(rank,)))

    for seed in range(4):
        slow = 1.3 if seed == 3 else 1.0
        measure("none", seed, 0.05 * slow, TrialStatus.COMPLETED)
        measure("int8", seed, 0.02 * slow, TrialStatus.ENDED_EARLY)
    measure("none", 4, 0.05 * 1.3, TrialStatus.COMPLETED)
    measure("int8", 4, 0.01, TrialStatus.CUT_SHORT)
    measure("topk", 5, 0.01, TrialStatus.COMPLETED)
    verdicts = tuple(
        Verdict(space.complete({"large_codec": codec}), Outcome.WORSE, 2.0, 1.0, 0.1, "so it is")
        for codec in ("int8", "topk")
    )
    conclusion = Conclusion(space.default, "why", "how", 0.05, (), verdicts)
    topk, int8 = trade_offs(space, study.history, conclusion)
    assert int8.speedup == pytest.approx(2.5)
    assert topk.speedup == pytest.approx(5.0 * 1.3**0.4), "no seed is shared: over all trials"


def test_a_day_of_another_speed_makes_no_lossy_strategy_faster(author: Any) -> None:
    task = author.task
    space = build_space(task.model, task.resources, allow=("codec",))
    study = AskTellStudy.create(space, store=author.store, task=task)
    int8 = space.complete({"large_codec": "int8"})
    for kind, strategy, seconds in (
        ("default", Strategy(), 0.05),
        ("quality", space.default, 0.05),
        ("default", Strategy(), 0.1),  # the study has rested
        ("quality", int8, 0.08),
    ):
        number = author.store.ask(study.study_id, strategy, kind, {"seed": 7})
        rank = RankReport(0, "a", (seconds,) * 20)
        author.store.tell(study.study_id, number, TrialResult(TrialStatus.COMPLETED, ranks=(rank,)))
    verdicts = (Verdict(int8, Outcome.ADMITTED, 1.0, 1.0, 0.1, "so it is"),)
    conclusion = Conclusion(space.default, "why", "how", 0.1, (), verdicts)
    (found,) = trade_offs(space, study.history, conclusion)
    assert found.speedup == pytest.approx(1.25)


def test_any_of_them_as_a_file(
    store: TraceStore, judged: tuple[AskTellStudy, SearchSpace], tmp_path: Path
) -> None:
    record = store.study(judged[0].study_id)
    file = tmp_path / "strategy.toml"
    file.write_text(exported_strategy(store, record, "1"))
    strategy, classes = read_strategy(read_toml(str(file), "the strategy file"))
    assert strategy["large_codec"] == "topk" and classes["large"][0] == "layer0.weight"
    file.write_text(exported_strategy(store, record, "winner"))
    strategy, _ = read_strategy(read_toml(str(file), "the strategy file"))
    assert strategy == judged[1].default
    for row in ("0", "7", "-1", "best"):
        with pytest.raises(StudyError, match="it has rows 1 to 6"):
            exported_strategy(store, record, row)


def test_verdicts_of_a_shared_study_have_no_losses(
    judged: tuple[AskTellStudy, SearchSpace],
) -> None:
    study, space = judged
    shared, trials = anonymous(study.record, study.history)
    conclusion = Conclusion.of(shared)
    assert conclusion is not None
    lines = list(quality_lines(space, trials, conclusion))
    assert [line.split("; ")[-1] for line in lines[1::2]] == [
        WORDS[each.verdict.outcome] for each in trade_offs(space, trials, conclusion)
    ]
    *measured, failed = lines[1::2]
    assert all("x in its quality trials" in line for line in measured)
    assert "not measured" in failed
    assert not [line for line in lines if "loss " in line]


def test_a_shared_study_exports_no_class_of_parameters(
    tmp_path: Path, judged: tuple[AskTellStudy, SearchSpace]
) -> None:
    shared, trials = anonymous(judged[0].record, judged[0].history)
    store = TraceStore(tmp_path / "shared.db")
    store.add([(shared, trials)])
    with pytest.raises(StudyError, match="class of parameters 'large', but the trace is") as wrong:
        exported_strategy(store, shared, "1")
    assert "hvd-autosync traces import" in wrong.value.hint
    text = exported_strategy(store, shared, "winner")
    assert "buckets = 0" in text and "large" not in text


def test_a_study_without_lossy_strategies_says_so(store: TraceStore, finished: StudyRecord) -> None:
    with pytest.raises(StudyError, match="it has no lossy strategies"):
        exported_strategy(store, finished, "1")


def test_a_study_without_a_winner_says_so(author: Any) -> None:
    with pytest.raises(StudyError, match="has no winner: it is running") as wrong:
        exported_strategy(author.store, author.study.record, "winner")
    assert "run its command again" in wrong.value.hint
    failed = replace(author.study.record, status=StudyStatus.FAILED)
    with pytest.raises(StudyError, match="has no winner: it is failed") as wrong:
        exported_strategy(author.store, failed, "winner")
    assert "Choose a finished study" in wrong.value.hint, "it cannot be resumed"
