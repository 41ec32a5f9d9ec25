from __future__ import annotations

import pytest
import torch

from hvd_autosync.learner.numerics import isolated


def test_threads_and_random_numbers_are_restored_even_after_an_error() -> None:
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    torch.set_num_threads(3)
    try:
        with pytest.raises(KeyError), isolated(7):
            assert torch.get_num_threads() == 1
            torch.rand(3)
            raise KeyError
        assert torch.get_num_threads() == 3
        assert torch.equal(torch.random.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)


def test_no_other_device_is_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its generators are not restored."""
    monkeypatch.setattr(torch, "manual_seed", None)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)
    with isolated(7):
        assert torch.initial_seed() == 7


def test_random_numbers_within_follow_from_the_seed() -> None:
    drawn = []
    for seed in (1, 1, 2):
        with isolated(seed):
            drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[1] != drawn[2]
