from __future__ import annotations

import numpy as np

from hvd_autosync.learner.points import discretize, encode_all, every_point, keys
from hvd_autosync.learner.pool import candidate_pool, one_knob_away
from hvd_autosync.search_space import SearchSpace


def test_one_knob_away_changes_one_knob(mixed_space: SearchSpace) -> None:
    default = encode_all(mixed_space, [mixed_space.default])
    neighbours = one_knob_away(mixed_space, default, (0.1,))
    changed, base = set(), mixed_space.default
    for point in neighbours:
        difference = {name for name, _ in mixed_space.decode(point).items() ^ base.items()}
        # A parent that is switched brings or takes its dependent knob along.
        changed.add(next(iter(sorted(difference - {"torus", "group_fusion"})), "torus"))
        assert len(difference) <= 2
    assert changed == {k.name for k in mixed_space.knobs} - {"group_fusion"}
    assert {mixed_space.decode(p)["codec"] for p in neighbours} == {"none", "fp16", "int8"}


def test_fixed_knobs_stay(mixed_space: SearchSpace) -> None:
    codec = mixed_space["codec"].restrict(["fp16"])  # type: ignore[union-attr, call-arg]
    space = SearchSpace((*mixed_space.knobs[:-1], codec))
    default = encode_all(space, [space.default])
    pool, _ = candidate_pool(space, default, seed=0)
    assert {space.decode(p)["codec"] for p in pool} == {"fp16"}
    assert len(one_knob_away(SearchSpace((codec,)), np.zeros((1, 1)), (0.1,))) == 0


def test_the_pool_is_discretized_and_distinct_and_follows_from_the_seed(
    mixed_space: SearchSpace,
) -> None:
    default = encode_all(mixed_space, [mixed_space.default])
    pool, complete = candidate_pool(mixed_space, default, seed=0)
    assert not complete
    assert len(set(keys(pool))) == len(pool) > 600
    assert np.array_equal(pool[:50], discretize(mixed_space, pool[:50]))
    assert np.array_equal(pool, candidate_pool(mixed_space, default, seed=0)[0])
    assert not np.array_equal(pool[:20], candidate_pool(mixed_space, default, seed=1)[0][:20])


def test_the_pool_is_dense_near_the_best(mixed_space: SearchSpace) -> None:
    default = encode_all(mixed_space, [mixed_space.default])
    pool, _ = candidate_pool(mixed_space, default, seed=0)
    differing = (np.abs(pool - default) > 1e-12).sum(axis=1)
    assert (differing <= 3).sum() > 100
    assert (differing > 3).sum() > 300


def test_the_pool_of_a_small_space_is_the_space(tiny_space: SearchSpace) -> None:
    pool, complete = candidate_pool(tiny_space, np.empty((0, 3)), seed=0)
    everything = every_point(tiny_space)
    assert complete and everything is not None
    assert set(keys(pool)) == set(keys(everything))
