"""What a tuning tells its trials."""

import pytest

from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    ModelProfile,
    ParameterProfile,
    Resources,
    Strategy,
    Task,
)
from hvd_autosync.tuning import _classes

LARGE = ParameterProfile("large.weight", (512, 512), "float32")
TASK = Task(
    ModelProfile((LARGE, ParameterProfile("bias", (512,), "float32"))),
    Resources((Host("a", 2),), "cpu", HorovodBuild("0.28.1", gloo=True, mpi=False)),
)


@pytest.mark.parametrize(
    "values", [{}, {"cycle_time_ms": 5.0}, {"buckets": 0, "large_exchange": "allreduce"}]
)
def test_a_strategy_that_leaves_the_exchange_to_horovod_needs_no_classes(values: dict) -> None:
    assert _classes(TASK, Strategy(values)) == {}


def test_a_strategy_with_exchanges_knows_the_classes() -> None:
    strategy = Strategy({"large_slices": 2})
    assert _classes(TASK, strategy) == {"large": ("large.weight",)}
    assert _classes(None, strategy) == {}
