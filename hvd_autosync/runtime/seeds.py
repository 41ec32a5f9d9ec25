"""Other random numbers for a script that seeds them itself."""

from __future__ import annotations

import functools
from typing import Any

import torch


def shift_seeds(offset: int) -> None:
    """Add ``offset`` to whatever this process gives to ``torch.manual_seed`` from now on."""
    original = torch.random.manual_seed

    @functools.wraps(original)
    def shifted(seed: Any) -> torch.Generator:
        return original(int(seed) + offset)

    for owner in (torch, torch.random):
        vars(owner)["manual_seed"] = shifted
