"""The guard, where other ranks are gone before it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_autosync.runtime.guard import guard
from hvd_autosync.runtime.measure.losses import Losses
from hvd_autosync.search_space.trial import LOSS_WINDOW


def test_ranks_that_end_their_script_first_do_not_break_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody waits for a window's sum: the last one may be sent when some rank has exited."""

    def gone(*_: Any, **__: Any) -> None:
        raise HorovodInternalError("Horovod has been shut down.")

    monkeypatch.setattr(guard, "allreduce_async_", gone)
    guarded, losses = guard.Guard("test"), Losses()
    for _ in range(3 * LOSS_WINDOW):
        losses.seen(torch.tensor(1.0))
        assert guarded.stepped(losses)
