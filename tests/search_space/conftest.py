"""A model and clusters that the tests of the language share."""

import pytest

from hvd_autosync.search_space import HorovodBuild, Host, ModelProfile, ParameterProfile, Resources


@pytest.fixture
def model() -> ModelProfile:
    """Twenty dense parameters that all get gradients."""
    return ModelProfile(
        tuple(ParameterProfile(f"p{i}", (10, 10), "float32", False, 19 - i) for i in range(20))
    )


@pytest.fixture
def one_host() -> Resources:
    """Two ranks of one CPU host, Gloo and MPI built."""
    return Resources((Host("a", 2),), "cpu", HorovodBuild("0.28.1", gloo=True, mpi=True))


@pytest.fixture
def gpu_cluster() -> Resources:
    """Two hosts with four GPUs each and NCCL."""
    build = HorovodBuild("0.28.1", gloo=True, mpi=True, nccl=True)
    return Resources((Host("a", 4), Host("b", 4)), "NVIDIA H100", build)
