"""What verdicts say of strategies that were not judged."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

from hvd_autosync.learner.points import sobol_points
from hvd_autosync.learner.quality_constraint import QualityConstraint
from hvd_autosync.search_space import (
    ModelProfile,
    Resources,
    SearchSpace,
    Strategy,
    build_space,
    catalogue_knob,
)
from hvd_autosync.search_space.knobs import Condition, categorical_knob, float_knob

SPACE = SearchSpace(
    (
        float_knob("cycle_time_ms", 0.1, 100.0, 1.0, scale="log", help=""),
        categorical_knob("codec", ("none", "bf16", "topk"), "none", help="", exact=False),
        float_knob(
            "ratio",
            0.001,
            0.25,
            0.01,
            scale="log",
            help="",
            exact=False,
            condition=Condition("codec", ("topk",)),
        ),
    )
)


def topk(ratio: float, cycle: float = 1.0) -> Strategy:
    return SPACE.complete({"codec": "topk", "ratio": ratio, "cycle_time_ms": cycle})


BF16 = SPACE.complete({"codec": "bf16"})


def feasibility_probabilities(*judged: tuple[Strategy, float]) -> list[float]:
    """Of a mild, a middling and a harsh strategy, after verdicts."""
    known = QualityConstraint(SPACE, [s for s, _ in judged], [excess for _, excess in judged])
    return known.feasibility_probabilities([BF16, topk(0.25), topk(0.01)]).tolist()


def test_before_any_verdict_milder_ones_are_likelier() -> None:
    mild, middling, harsh = feasibility_probabilities()
    assert mild > 0.95 and 0.9 > middling > 1.5 * harsh


def test_a_refusal_makes_harsher_ones_and_those_that_are_alike_doubtful() -> None:
    before, after = feasibility_probabilities(), feasibility_probabilities((topk(0.1), 4.0))
    assert after[1] < before[1] / 2 and after[2] < before[2] / 2
    assert after[0] > 0.95  # where a large change of gradients does harm, a small one need not
    failed = QualityConstraint(SPACE, [topk(0.1)], [math.inf])
    same, near, far = failed.feasibility_probabilities([topk(0.1), topk(0.15), topk(0.25)])
    assert same < near < far and same < 0.02


def test_praise_lets_harsher_ones_hope() -> None:
    before, after = feasibility_probabilities(), feasibility_probabilities((topk(0.25), 0.0))
    assert after[1] > 0.9 and after[2] > 2 * before[2]


def test_an_unknown_choice_is_neither_mild_nor_harsh() -> None:
    space = SearchSpace(
        (categorical_knob("codec", ("none", "bf16", "mine"), "none", help="", exact=False),)
    )
    mild, mine = QualityConstraint(space, [], []).feasibility_probabilities(
        [space.complete({"codec": each}) for each in ("bf16", "mine")]
    )
    assert mild > mine > 0.7


def test_once_nothing_more_is_judged_only_what_was_admitted_may_be_used() -> None:
    """Whatever its exact knobs are; and nothing that the loss guard has ended."""
    closed = QualityConstraint(SPACE, [BF16, topk(0.1)], [0.0, 4.0], closed=True)
    other = SPACE.complete({"codec": "bf16", "cycle_time_ms": 5.0})
    points = [SPACE.default, other, topk(0.1), topk(0.25)]
    assert closed.feasibility_probabilities(points).tolist() == [1.0, 1.0, 0.0, 0.0]
    outside = Strategy({"codec": "unknown"})
    open_still = QualityConstraint(SPACE, [], [], refused=[other, outside])
    assert open_still.feasibility_probabilities([BF16]).tolist() == [0.0]
    assert open_still.feasibility_probabilities([topk(0.25)])[0] > 0.1


@pytest.mark.parametrize("outside", [{"gone_codec": "int8"}, {"codec": "topk", "ratio": 0.9}])
def test_what_the_loss_guard_ended_outside_of_the_space_is_ignored(
    outside: dict[str, str | float],
) -> None:
    known = QualityConstraint(SPACE, [], [], refused=[Strategy(outside)])
    assert known.feasibility_probabilities([BF16])[0] > 0.95


def test_with_codecs_of_whole_buckets_the_buckets_count_too() -> None:
    space = SearchSpace((*SPACE.knobs, catalogue_knob("buckets")))
    known = space.complete({"codec": "topk", "buckets": 2})
    faster = space.complete({**known, "cycle_time_ms": 5.0})
    others = space.complete({**known, "buckets": 3})
    closed = QualityConstraint(space, [known], [0.0], closed=True)
    assert closed.feasibility_probabilities([faster, others]).tolist() == [1.0, 0.0]
    ended = QualityConstraint(space, [], [], refused=[known])
    assert ended.feasibility_probabilities([faster])[0] == 0.0
    assert ended.feasibility_probabilities([others])[0] > 0.0


def test_exact_knobs_change_no_loss() -> None:
    known = QualityConstraint(SPACE, [topk(0.01)], [5.0])
    here, there = known.feasibility_probabilities([topk(0.02), topk(0.02, cycle=80.0)])
    assert here == there > 0.0


def test_a_verdict_is_final_whatever_the_exact_knobs_are() -> None:
    """What trains alike can neither be judged again nor be used otherwise."""
    known = QualityConstraint(SPACE, [BF16, topk(0.1)], [0.99, 1.5])
    alike = [SPACE.complete({"codec": "bf16", "cycle_time_ms": 5.0}), topk(0.1, cycle=80.0)]
    assert known.feasibility_probabilities([BF16, *alike, topk(0.1)]).tolist() == [
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    ended = QualityConstraint(SPACE, [BF16], [0.0], refused=[BF16])
    assert ended.feasibility_probabilities([BF16]).tolist() == [0.0]


@pytest.fixture
def codecs(model: ModelProfile, slow_network: Resources) -> SearchSpace:
    """Exact exchanges switch its codecs off."""
    return build_space(model, slow_network, allow=("codec", "schedule"))


def test_a_codec_that_is_off_is_as_one_that_is_none(codecs: SearchSpace) -> None:
    """Also in a covariance of several verdicts, which is positive definite."""
    judged = [
        codecs.complete({"embedding_exchange": "rows", "local_steps": 16}),
        codecs.complete({"embedding_codec": "fp16", "local_steps": 16}),
        codecs.complete({"embedding_codec": "int8", "local_steps": 16}),
    ]
    known = QualityConstraint(codecs, judged, [0.5, 1.5, 3.0])
    off, on = (
        codecs.complete({"embedding_exchange": each, "large_codec": "int8"})
        for each in ("rows", "allreduce")
    )
    assert "embedding_codec" not in off and on["embedding_codec"] == "none"
    one, other, *rest = known.feasibility_probabilities([off, on, *judged])
    assert one == other and 0.0 < one < 1.0 and rest == [1.0, 0.0, 0.0]


def test_strategies_of_one_lossy_part_are_equally_likely(codecs: SearchSpace) -> None:
    drawn = [codecs.decode(point) for point in sobol_points(codecs, 64, 0)]
    known = QualityConstraint(codecs, drawn[:6], [0.5, 4.0, 0.0, 2.0, -1.0, 1.5])
    strategies = [each for one in drawn for each in _exchanged(codecs, one)]
    found: dict[Strategy, set[float]] = {}
    likely = known.feasibility_probabilities(strategies)
    assert np.isfinite(likely).all()
    for strategy, probability in zip(strategies, likely, strict=True):
        found.setdefault(codecs.lossy_part(strategy), set()).add(round(float(probability), 12))
    assert len(found) < len(set(strategies)) and all(len(each) == 1 for each in found.values())


def test_what_trains_as_an_admitted_one_may_be_used(codecs: SearchSpace) -> None:
    """Also if its codec is "none" where an exchange switches that of the admitted one off."""
    admitted = codecs.complete({"embedding_exchange": "rows", "large_codec": "fp16"})
    other = codecs.complete({"embedding_exchange": "allreduce", "large_codec": "fp16"})
    assert codecs.lossy_part(admitted) == codecs.lossy_part(other)
    coded = codecs.complete({**other, "embedding_codec": "fp16"})
    for one, alike in ((admitted, other), (other, admitted)):
        closed = QualityConstraint(codecs, [one], [0.0], closed=True)
        assert closed.feasibility_probabilities([one, alike, coded]).tolist() == [1.0, 1.0, 0.0]
        ended = QualityConstraint(codecs, [], [], refused=[one])
        assert ended.feasibility_probabilities([alike]).tolist() == [0.0]


def test_verdicts_that_are_not_shared_say_what_is_likely_of_others() -> None:
    """Other exact knobs make another number of steps at equal time; the loss guard ends all."""
    judged = [topk(0.1), topk(0.01)]
    others = [topk(0.1, cycle=10.0), topk(0.01, cycle=10.0)]
    for shared, low, high in ((True, 0.0, 1.0), (False, 1e-9, 0.999)):
        known = QualityConstraint(SPACE, judged, [0.5, 1.5], shared=shared)
        assert known.feasibility_probabilities(judged).tolist() == [1.0, 0.0]
        likely = known.feasibility_probabilities(others)
        assert likely[0] <= high and likely[1] >= low
        assert ({0.0, 1.0} & set(likely.tolist()) == {0.0, 1.0}) is shared
        ended = QualityConstraint(SPACE, [], [], refused=judged, shared=shared)
        assert ended.feasibility_probabilities(others).tolist() == [0.0, 0.0]


def _exchanged(space: SearchSpace, strategy: Strategy) -> Iterator[Strategy]:
    """``strategy`` with each exchange of its large matrices."""
    for exchange in ("allreduce", "hierarchical", "sharded"):
        yield space.complete({**strategy, "large_exchange": exchange})
