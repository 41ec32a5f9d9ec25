"""Evaluation is known by the mode of a module."""

from __future__ import annotations

import torch

from hvd_autosync.runtime.patches.evaluation import watch_evaluation
from hvd_autosync.util import patches


def test_evaluation_is_seen_once_however_many_modules_there_are() -> None:
    begun: list[None] = []
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    others: list[None] = []
    watch_evaluation(lambda: begun.append(None))
    watch_evaluation(lambda: others.append(None))
    try:
        assert model.eval() is model
        assert not model[1].training
        model.train()
        assert len(begun) == len(others) == 1
    finally:
        assert patches.uninstall("evaluation")
    model.eval()
    assert len(begun) == len(others) == 1
