"""What wrapped optimizers tell."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod.torch", reason="Horovod is not installed: make setup builds it")

from hvd_autosync.runtime import current  # noqa: E402
from hvd_autosync.runtime.measure.losses import Losses  # noqa: E402
from hvd_autosync.runtime.optimizer import optimizer as module  # noqa: E402
from hvd_autosync.runtime.sync.synchronizer import Synchronizer  # noqa: E402
from hvd_autosync.search_space.sync_plan import SyncPlan  # noqa: E402


def test_an_optimizer_that_synchronizes_nothing_makes_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of one rank alone, and one without parameters to train, is attached to nothing."""
    monkeypatch.setattr(current, "losses", Losses())
    Synchronizer(SyncPlan()).end_step()


def test_losses_are_told_which_optimizer_has_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = Losses()
    monkeypatch.setattr(current, "losses", losses)
    for _ in range(2):
        for optimizer in (module.timed_step, module.timed_adasum_step):  # any two objects
            losses.seen(torch.tensor(1.0))
            module._stepped(optimizer)
    assert losses.several
    kept = losses.end_step(0)[0]
    assert kept is not None and float(kept) == 1.0


def test_gradients_that_the_script_refuses_take_their_loss_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under Horovod's own optimizer, as under a strategy's."""

    class Horovods:
        """As Horovod's class."""

        _synchronized = False

        def step(self, closure: object = None) -> None:
            self._synchronized = False

        def synchronize(self) -> None:
            self._synchronized = True

        def zero_grad(self) -> None:
            """Drop the gradients."""

    losses = Losses()
    monkeypatch.setattr(current, "losses", losses)
    module._add_timing(Horovods, adasum=False)
    optimizer, sums = Horovods(), []
    for loss, refused in ((1.0, False), (float("nan"), True), (3.0, False)):
        optimizer.zero_grad()
        losses.seen(torch.tensor(loss))
        optimizer.synchronize()
        if not refused:
            optimizer.step()
            sums.append(losses.end_step(0)[0])
    assert sums == [torch.tensor(1.0), torch.tensor(3.0)]
