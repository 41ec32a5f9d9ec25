from __future__ import annotations

import numpy as np

from hvd_autosync.learner.points import encode_all, sobol_points
from hvd_autosync.learner.projection import project_onto_space
from hvd_autosync.search_space import SearchSpace, Strategy
from hvd_autosync.search_space.knobs import categorical_knob, float_knob, integer_knob

HERE = SearchSpace(
    (
        integer_knob("buckets", 0, 64, 0, help="", scale="log", log_offset=1.0),
        categorical_knob("exchange", ("allreduce", "rows"), "allreduce", help=""),
        float_knob("only_here", 0.0, 1.0, 0.5, help=""),
    ),
    (("cycle", 7.0), ("flag", True)),
)
THERE = SearchSpace(
    (
        integer_knob("buckets", 0, 8, 0, help="", scale="log", log_offset=1.0),
        categorical_knob("exchange", ("allreduce", "sharded"), "allreduce", help=""),
        float_knob("cycle", 0.1, 100.0, 1.0, help="", scale="log"),
        categorical_knob("only_there", ("x", "y"), "y", help=""),
    )
)


def test_common_knobs_keep_their_values(mixed_space: SearchSpace) -> None:
    points = sobol_points(mixed_space, 50, 0)
    assert np.array_equal(project_onto_space(mixed_space, points, mixed_space), points)


def test_what_the_other_does_not_know_stands_at_its_default_or_bound() -> None:
    strategy = Strategy({"buckets": 40, "exchange": "rows", "only_here": 0.9})
    (found,) = project_onto_space(HERE, encode_all(HERE, [strategy]), THERE)
    assert dict(THERE.decode(found)) == {
        "buckets": 8,
        "exchange": "allreduce",
        "cycle": 7.0,
        "only_there": "y",
    }


def test_flags_are_not_numbers() -> None:
    other = SearchSpace(
        (categorical_knob("flag", (0, 1), 0, help=""), float_knob("exchange", 1, 2, 1.5, help=""))
    )
    (found,) = project_onto_space(HERE, encode_all(HERE, [HERE.default]), other)
    assert dict(other.decode(found)) == {"flag": 0, "exchange": 1.5}
