"""What is kept of a training's losses."""

import torch

from hvd_autosync.runtime.measure.losses import Losses


def test_a_loss_stays_what_it_was_when_it_was_seen() -> None:
    losses, loss = Losses(), torch.tensor([4.0])
    losses.seen(loss)
    loss /= 2
    kept = losses.since(0)
    assert kept is not None and kept.shape == () and float(kept) == 4.0
    assert losses.since(1) is None


def test_what_the_script_reports_counts_instead_of_what_is_seen() -> None:
    losses = Losses()
    losses.report(torch.tensor(1.0))
    losses.seen(torch.tensor(2.0))
    kept = losses.since(0)
    assert kept is not None and float(kept) == 1.0
