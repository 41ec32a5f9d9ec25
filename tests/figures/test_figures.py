"""Figures of a measured table, of an empty study, and of one that has judged lossy strategies."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvd_autosync
from hvd_autosync.api.results import Study
from hvd_autosync.commands.page import _figures
from hvd_autosync.errors import SpaceError, StoreError, StudyError
from hvd_autosync.figures.knobs import importance
from hvd_autosync.reporting.explain_quality import WORDS
from hvd_autosync.reporting.words import STANDARD_ERRORS
from hvd_autosync.search_space import (
    RankReport,
    SearchSpace,
    Strategy,
    TrialResult,
    TrialStatus,
    catalogue_knob,
)
from hvd_autosync.study.noninferiority import Outcome
from hvd_autosync.study.values import Conclusion
from hvd_autosync.study.verdict import Verdict
from hvd_autosync.traces import TraceStore

TABLE = Path(__file__).parents[2] / "benchmarks" / "traces" / "vgg-100mbit-codec.jsonl.gz"


@pytest.fixture(scope="module")
def study() -> Study:
    return Study.load(TABLE)


@pytest.fixture(scope="module")
def every(study: Study) -> dict[str, Any]:
    """All figures of a table."""
    plot, last = study.plot, len(study.trials) - 1
    return {
        "convergence": plot.convergence(),
        "step_times": plot.step_times(),
        "importance": plot.importance(),
        "parallel": plot.parallel(),
        "slice of a number": plot.slice("cycle_time_ms"),
        "slice of bytes": plot.slice("fusion_threshold_bytes"),
        "slice of choices": plot.slice("large_codec"),
        "contour": plot.contour("cycle_time_ms", "large_exchange"),
        "pareto": plot.pareto(),
        "transfer": plot.transfer(),
        "timeline": plot.timeline(0),
        "timeline of the last": plot.timeline(last),
    }


@pytest.fixture
def without_buckets(tmp_path: Path) -> Study:
    """A study whose best strategy has no buckets, so that their rule has no effect in it."""
    buckets = replace(catalogue_knob("buckets"), default=4)
    rule, cycle = catalogue_knob("bucket_rule"), catalogue_knob("cycle_time_ms")
    space = SearchSpace((buckets, rule, cycle))
    study = Study.create(space, store=str(tmp_path / "t.db"))
    for strategy, seconds in (
        ({}, 0.05),
        ({"bucket_rule": "size"}, 0.06),
        ({"buckets": 8}, 0.04),
        ({"buckets": 0, "cycle_time_ms": 5.0}, 0.02),
    ):
        kind = "model" if strategy else "default"
        number = study.store.ask(study.study_id, space.complete(strategy), kind, {})
        rank = RankReport(0, "a", (seconds,) * 20)
        study.store.tell(study.study_id, number, TrialResult(TrialStatus.COMPLETED, ranks=(rank,)))
    return study


def test_a_knob_without_an_effect_is_not_shown_as_if_it_did_not_matter(
    without_buckets: Study,
) -> None:
    plot = without_buckets.plot
    for figure in (plot.slice("bucket_rule"), plot.contour("cycle_time_ms", "bucket_rule")):
        assert not figure.data
        (note,) = figure.layout.annotations
        assert note.text.startswith("bucket_rule has an effect only while buckets")
        assert note.text.endswith("which is not so in the best strategy.")
    assert plot.slice("buckets").data and plot.contour("buckets", "bucket_rule").data


def test_the_page_has_no_figure_of_a_knob_without_an_effect(without_buckets: Study) -> None:
    titles = [figure.layout.meta["title"] for figure in _figures(without_buckets)]
    assert "Step time along buckets" in titles
    assert "Step time along bucket_rule" not in titles


def test_days_of_another_speed_are_drawn_at_that_of_the_last_default(tmp_path: Path) -> None:
    space = SearchSpace((catalogue_knob("buckets"),))
    study = Study.create(space, store=str(tmp_path / "t.db"))
    for kind, strategy, seconds in (
        ("default", Strategy(), 0.05),
        ("sobol", space.complete({"buckets": 4}), 0.04),
        ("default", Strategy(), 0.1),  # the study has rested
        ("sobol", space.complete({"buckets": 8}), 0.09),
    ):
        number = study.store.ask(study.study_id, strategy, kind, {})
        rank = RankReport(0, "a", (seconds,) * 20)
        study.store.tell(study.study_id, number, TrialResult(TrialStatus.COMPLETED, ranks=(rank,)))
    lines = {trace.name: trace for trace in study.plot.convergence().data}
    assert list(lines["fastest so far"].y) == pytest.approx([100, 80, 80])
    assert list(lines["the default's trial"].y) == pytest.approx([100, 100])
    boxes = {box.x[0]: box.y[0] for box in study.plot.step_times().data}
    assert boxes == pytest.approx({"trial 0": 100, "trial 1": 80, "trial 2": 100, "trial 3": 90})
    assert study.trials.step_ms.tolist() == pytest.approx([50, 40, 100, 90]), "as it was measured"
    assert study.best.speedup == pytest.approx(1.25)


def test_each_says_what_to_look_for(every: dict[str, Any]) -> None:
    for name, figure in every.items():
        caption = figure.layout.meta["caption"]
        assert caption.startswith("Look "), name
        assert caption[:30] in figure.layout.title.subtitle.text.replace("<br>", " "), name
        assert figure.to_json(), name


def test_convergence_never_rises(study: Study, every: dict[str, Any]) -> None:
    lines = {trace.name: trace for trace in every["convergence"].data}
    fastest = np.array(lines["fastest so far"].y)
    assert (np.diff(fastest) <= 0).all()
    explored = study.trials[study.trials.kind != "confirm"]
    assert fastest[-1] == pytest.approx(explored.step_ms.min())
    points = [len(trace.x) for trace in every["convergence"].data if trace.mode == "markers"]
    assert sum(points) == len(study.trials)


def test_convergence_has_the_intervals_of_the_reports(study: Study, every: dict[str, Any]) -> None:
    figure = every["convergence"]
    confirmed = next(trace for trace in figure.data if trace.name == "confirmation")
    trial = next(trial for trial in study.history if trial.kind == "confirm")
    time = trial.result.step_time  # type: ignore[union-attr]
    half_ms = 1e3 * STANDARD_ERRORS * time.standard_error_s  # type: ignore[union-attr]
    assert confirmed.error_y.array[0] == pytest.approx(half_ms)
    assert "bars are 90 % intervals" in figure.layout.meta["caption"]


def test_step_times_shows_the_steps_of_each_confirmation(
    study: Study, every: dict[str, Any]
) -> None:
    confirmed = [trial for trial in study.history if trial.kind == "confirm"]
    boxes = every["step_times"].data
    assert len(boxes) == len(confirmed)
    assert len(boxes[0].y) == len(confirmed[0].result.measured_durations())  # type: ignore[union-attr]
    colours = {(box.name, box.marker.color) for box in boxes}
    strategies = {study.space.complete(trial.strategy) for trial in confirmed}
    assert len(colours) == len({colour for _, colour in colours}) == len(strategies) >= 2
    assert sum(box.showlegend for box in boxes) == len(strategies)


@pytest.mark.parametrize(("confirmed", "shown"), [(0, 4), (1, 5), (2, 2)])
def test_step_times_shows_the_fastest_until_there_are_two_confirmations(
    without_buckets: Study, confirmed: int, shown: int
) -> None:
    store, space = without_buckets.store, without_buckets.space
    for count in range(confirmed + 1):
        number = store.ask(without_buckets.study_id, space.default, "confirm", {})
        if count < confirmed:
            ranks = (RankReport(0, "a", (0.05,) * 20),)
            result = TrialResult(TrialStatus.COMPLETED, ranks=ranks)
            store.tell(without_buckets.study_id, number, result)
    names = {box.x[0] for box in without_buckets.plot.step_times().data}
    assert len(names) == shown and (confirmed == 2 or "trial 0" in names)


def test_importance_ranks_what_moves_the_step_time(every: dict[str, Any]) -> None:
    bars = dict(zip(every["importance"].data[0].y, every["importance"].data[0].x, strict=True))
    # Sharding and codecs of the one large tensor change this job's step time tenfold.
    assert min(bars["large_codec"], bars["large_exchange"]) > 0.2 > 0.05 > bars["order"]


def test_a_knob_that_no_trial_has_varied_has_no_bar(study: Study, every: dict[str, Any]) -> None:
    evidence = study._evidence()
    alike = [t for t in evidence.trials if study.space.complete(t.strategy)["order"] == "arrival"]
    bars = importance(replace(evidence, trials=alike)).data[0].y
    assert "order" in every["importance"].data[0].y and "order" not in bars and len(bars) > 3


def test_a_slice_has_the_model_and_the_trials(every: dict[str, Any]) -> None:
    by_name = {trace.name: trace for trace in every["slice of a number"].data}
    expected = np.array(by_name["expected"].y)
    assert expected[-1] > 2 * expected.min(), "a cycle of 100 ms is slow"
    assert len(by_name["trials"].x) > 50
    in_bytes = {trace.name: trace for trace in every["slice of bytes"].data}
    assert max(in_bytes["expected"].x) == pytest.approx(256), "in MiB"
    assert list(every["slice of choices"].data[0].x) == list(catalogue_knob("large_codec").choices)  # type: ignore[union-attr]


def test_a_contour_has_both_knobs(every: dict[str, Any]) -> None:
    heat = every["contour"].data[0]
    assert heat.z.shape == (len(heat.y), len(heat.x)) == (2, 25)


def test_a_timeline_ends_about_where_the_step_was_measured(
    study: Study, every: dict[str, Any]
) -> None:
    bars = every["timeline"].data
    ends = [base + length for bar in bars for base, length in zip(bar.base, bar.x, strict=True)]
    measured = float(study.trials.step_ms[0])
    assert max(ends) == pytest.approx(measured, rel=0.25)
    assert next(bar.name for bar in bars) == "computation"
    assert f"{measured:.1f} ms" in every["timeline"].layout.annotations[-1].text


@pytest.mark.parametrize(("call", "name"), [("slice", ("nothing",)), ("contour", ("order", "no"))])
def test_knobs_that_were_not_searched_are_named(
    study: Study, call: str, name: tuple[str, ...]
) -> None:
    with pytest.raises(SpaceError, match=f"'{name[-1]}' was not searched"):
        getattr(study.plot, call)(*name)


def test_a_trial_that_is_not_there_is_named(study: Study) -> None:
    with pytest.raises(StudyError, match="no trial 999"):
        study.plot.timeline(999)


def test_a_study_that_has_just_begun_says_what_is_missing(tmp_path: Path) -> None:
    begun = Study.create(SearchSpace((catalogue_knob("buckets"),)), store=str(tmp_path / "t.db"))
    for figure in (
        begun.plot.convergence(),
        begun.plot.step_times(),
        begun.plot.importance(),
        begun.plot.parallel(),
        begun.plot.slice("buckets"),
        begun.plot.pareto(),
        begun.plot.transfer(),
    ):
        assert not figure.data and figure.layout.annotations[0].text
    assert begun.best.strategy == begun.space.default and math.isnan(begun.best.step_s)


@pytest.mark.parametrize(
    ("loss", "outcome", "begins"),
    [
        (1.05, Outcome.ADMITTED, 1.0),
        (0.95, Outcome.ADMITTED, 0.1 / 0.06),
        (0.95, Outcome.NOT_SHOWN, 1.0),
    ],
)
def test_the_pareto_front_leaves_refused_ones_out(
    loss: float, outcome: Outcome, begins: float, tmp_path: Path
) -> None:
    """And the default, where an admitted one is faster with a lower loss."""
    space = SearchSpace((catalogue_knob("local_steps"),))
    study = Study.create(space, store=str(tmp_path / "t.db"))
    verdicts = []
    for steps, step_s, own, found in (
        (1, 0.1, 1.0, outcome),
        (2, 0.06, loss, outcome),
        (4, 0.05, 1.5, Outcome.WORSE),
    ):
        strategy = space.complete({"local_steps": steps})
        number = study._store.ask(study.study_id, strategy, "quality", {"seed": 0})
        ranks = (RankReport(0, "a", (step_s,) * 40, losses=(own,) * 40),)
        study._store.tell(study.study_id, number, TrialResult(TrialStatus.COMPLETED, ranks=ranks))
        if steps > 1:
            verdicts.append(Verdict(strategy, found, own, 1.0, 0.1, "so it is"))
    study.finish(Conclusion(space.default, "", "", 0.1, verdicts=tuple(verdicts)))
    by_name = {trace.name: trace for trace in study.plot.pareto().data}
    judged = by_name[WORDS[outcome]]
    assert judged.x[0] == pytest.approx(0.1 / 0.06) and judged.y[0] == pytest.approx(loss - 1)
    assert by_name["worse"].y[0] == pytest.approx(0.5)
    assert by_name["Pareto front"].x[0] == pytest.approx(begins)


def test_without_verdicts_the_pareto_front_says_why(tmp_path: Path) -> None:
    space = SearchSpace((catalogue_knob("local_steps"),))
    study = Study.create(space, store=str(tmp_path / "t.db"))
    (running,) = study.plot.pareto().layout.annotations
    assert "once the study has ended" in running.text
    study.finish(Conclusion(space.default, "", "", 0.1))
    (ended,) = study.plot.pareto().layout.annotations
    assert ended.text == "No lossy strategy was judged."


def test_what_won_is_best(study: Study) -> None:
    best = study.best
    assert best.confirmed and best.strategy == study.record.winner
    assert best.low < best.speedup < best.high and best.speedup > 3
    assert "confirmed" in str(best) and f"{best.speedup:.2f}x" in str(best)
    assert study.study_id in str(study) and f"{best.speedup:.2f}x faster" in str(study)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    TraceStore(tmp_path / "t.db").close()
    with pytest.raises(StoreError, match=r"t\.db has no study 'nowhere'"):
        Study.load("nowhere", store=str(tmp_path / "t.db"))
    with pytest.raises(StoreError, match=r"no file .*gone.jsonl"):
        Study.load(tmp_path / "gone.jsonl")


def test_the_public_study_is_this_one() -> None:
    assert hvd_autosync.Study is Study
