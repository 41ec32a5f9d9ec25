"""A model and clusters to predict for."""

from __future__ import annotations

import pytest

from hvd_autosync.search_space import (
    HorovodBuild,
    Host,
    Link,
    Links,
    ModelProfile,
    ParameterProfile,
    Resources,
)

BUILD = HorovodBuild("0.28.1", gloo=True, mpi=False, nccl=False)


@pytest.fixture
def model() -> ModelProfile:
    """A table of which a batch touches a hundredth, a large matrix, and twenty small tensors."""
    parameters = [
        ParameterProfile("table", (100_000, 16), "float32", False, 21, 0.020, touched_rows=0.01),
        ParameterProfile("matrix", (1024, 1024), "float32", False, 10, 0.010),
        *(ParameterProfile(f"small{i}", (256,), "float32", False, i + (i >= 10), (i + 1) * 9e-4)
          for i in range(20)),
    ]  # fmt: skip
    return ModelProfile(tuple(parameters), forward_s=0.010, backward_s=0.021)


@pytest.fixture
def slow_network() -> Resources:
    """Two hosts of two ranks, 100 Mbit/s between them."""
    within, across = Link(2, 2e-4, 2e9), Link(2, 1e-3, 12.5e6)
    overall = Link(4, 2e-3, 12.5e6 / 1.5)
    return Resources(
        (Host("a", 2), Host("b", 2)), "cpu", BUILD, Links(overall, within, across)
    )  # fmt: skip
