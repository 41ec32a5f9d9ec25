"""Gradient scalers of ranks in threads: error feedback, and loss scales after separate steps."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hvd_autosync.runtime import current
from hvd_autosync.runtime.collectives.operations import rank
from hvd_autosync.runtime.collectives.over_threads import ThreadRanks
from hvd_autosync.runtime.patches.epochs import SyncPoint
from hvd_autosync.search_space.exchange_plan import ClassPlan, ExchangePlan
from hvd_autosync.search_space.schedule import Schedule
from hvd_autosync.search_space.sync_plan import SyncPlan

_SHAPES = [(8,), (16, 16)]
_USABLE = 1024.0
_RATE = 0.5


@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_error_feedback_keeps_nothing_of_skipped_steps(codec: str, begin: Any) -> None:
    """Another bucket overflows, until the scale has come down; then comes the first update."""

    def body() -> float:
        own = begin(_SHAPES, _compressed(codec))
        scaler = torch.amp.GradScaler("cpu", init_scale=64 * _USABLE)
        for skipped in range(6):
            assert not own.scaled_step(scaler, [torch.full((8,), torch.inf), _gradient(skipped)])
        assert own.scaled_step(scaler, [torch.ones(8), _gradient(6)])
        assert scaler.get_scale() == _USABLE
        return float((own.values()[1] - 1).norm())

    moved, _ = ThreadRanks(2).run(body)
    assert 0 < moved < _RATE * float(_gradient(6).norm())


@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_error_feedback_follows_the_loss_scale(codec: str, begin: Any) -> None:
    """Powers of two are exact, so a scale that grows changes no bit."""

    def body(growth_interval: int) -> list[torch.Tensor]:
        own = begin(_SHAPES, _compressed(codec))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=growth_interval)
        for step in range(10):
            assert own.scaled_step(scaler, [torch.ones(8), _gradient(step)])
        assert scaler.get_scale() == (4.0 if growth_interval > 10 else 4.0 * 2**5)
        return own.values()

    (grown, _), (constant, _) = (
        ThreadRanks(2).run(lambda each=each: body(each)) for each in (2, 100)
    )
    exact = torch.equal if codec == "topk" else torch.allclose
    assert all(map(exact, grown, constant))


def _train_exactly(own: Any, scaler: torch.amp.GradScaler) -> Any:
    """Make steps after the rounds; return the scale and what replicas need to stay equal."""
    assert own.sync.replicas_in_sync
    before = own.values()
    assert all(_step(own, scaler) for _ in range(3))
    return scaler.state_dict(), [
        after - was for after, was in zip(own.values(), before, strict=True)
    ]


def _check_exact(results: Any) -> None:
    """Check that all ranks have made the same steps, with the mean gradients."""
    (first, moved), *others = results
    for scale, elsewhere in others:
        assert scale == first
        assert all(map(torch.equal, moved, elsewhere))
    for change, shape in zip(moved, _SHAPES, strict=True):
        mean = sum(_gradient(r, shape) for r in range(len(results))) / len(results)
        torch.testing.assert_close(change, -3 * _RATE * mean)


def test_steps_that_all_ranks_have_skipped_shorten_no_round(begin: Any, loader: Any) -> None:
    """The first steps of a training, until the loss scale has come down."""

    def body() -> list[int]:
        own = begin(_SHAPES, SyncPlan(schedule=Schedule(4)))
        scaler = torch.amp.GradScaler("cpu", init_scale=_USABLE)
        lengths = []
        for batch in loader(own.epochs, 19):
            local = own.method.running
            assert _step(own, scaler, overflow=batch < 2) is (batch >= 2)
            if local:
                lengths.append(own.method.round_steps)
        return lengths

    assert ThreadRanks(2).run(body) == [[4] * 16] * 2


def test_loss_scales_are_equal_after_rounds(begin: Any) -> None:
    def body() -> Any:
        own, scaler = _rounds(begin)
        own.sync.switch(SyncPlan())
        assert scaler.get_scale() == _USABLE / 2
        return _train_exactly(own, scaler)

    _check_exact(ThreadRanks(2).run(body))


def test_a_scaler_keeps_its_count_whatever_the_default_type_is(begin: Any) -> None:
    """Of bfloat16 1997 is 2000, from which the scale would never grow again."""

    def body() -> int:
        own, scaler = _rounds(begin)
        counted = {"_growth_tracker": 1997, "growth_interval": 2000}
        scaler.load_state_dict({**scaler.state_dict(), **counted})
        torch.set_default_dtype(torch.bfloat16)
        try:
            own.sync.switch(SyncPlan())
        finally:
            torch.set_default_dtype(torch.float32)
        return int(scaler.state_dict()["_growth_tracker"])

    assert ThreadRanks(2).run(body) == [1997, 1997]


@pytest.mark.parametrize("skips", [(), (0,), (1,), (0, 1)])
def test_loss_scales_are_equal_after_rounds_that_end_in_a_step(
    skips: tuple[int, ...], begin: Any
) -> None:
    """As by the loss guard, before update() may lower the scale of a rank alone."""

    def body() -> Any:
        own, scaler = _rounds(begin)
        for _ in range(3):
            _step(own, scaler)
        own.sync.guard.stepped = lambda *_, **__: own.sync.make_exact(together=True)
        assert _step(own, scaler, overflow=rank() in skips) is (rank() not in skips)
        del own.sync.guard.stepped
        assert own.sync.exact
        return _train_exactly(own, scaler)

    _check_exact(ThreadRanks(2).run(body))


@pytest.mark.parametrize("skips", [(0,), (1,), (0, 1)])
def test_a_step_that_the_script_skips_ends_before_the_scale_is_used_again(
    skips: tuple[int, ...], begin: Any
) -> None:
    """As after a norm that is too large; rounds end with it, as by the loss guard."""

    def body() -> Any:
        own, scaler = _rounds(begin)
        for _ in range(3):
            _step(own, scaler)
        own.sync.guard.stepped = lambda *_, **__: own.sync.make_exact(together=True)
        used = rank() not in skips
        assert _step(own, scaler, used=used) is used
        del own.sync.guard.stepped
        assert own.sync.exact and scaler.get_scale() == _USABLE / 2
        return _train_exactly(own, scaler)

    _check_exact(ThreadRanks(2).run(body))


def test_loss_scales_are_equal_after_a_broadcast(begin: Any) -> None:
    def body() -> Any:
        own, scaler = _rounds(begin)
        own.method.before_sharing()
        own.method.share(0)
        assert own.method.in_round, "moments differ until ranks know their epochs"
        own.sync.at_sync_point(SyncPoint.SCRIPT)
        return scaler.state_dict()

    first, second = ThreadRanks(2).run(body)
    assert first == second and first["scale"] == _USABLE / 2


def _rounds(begin: Any) -> tuple[Any, torch.amp.GradScaler]:
    """Return a training after some local steps, and its scaler: rank 0 has skipped one of them."""
    own = begin(_SHAPES, SyncPlan(schedule=Schedule(4)))
    own.sync.at_sync_point(SyncPoint.SCRIPT)
    scaler = torch.amp.GradScaler("cpu", init_scale=_USABLE, growth_interval=50)
    while not own.method.running:
        _step(own, scaler)
    for step in range(8):
        _step(own, scaler, overflow=step == 2 and rank() == 0)
    assert own.method.replicas_in_sync
    assert scaler.get_scale() == (_USABLE / 2 if rank() == 0 else _USABLE)
    return own, scaler


def _step(
    own: Any, scaler: torch.amp.GradScaler, *, overflow: bool = False, used: bool = True
) -> bool:
    """Make a step with the gradients of this rank."""
    gradients = [_gradient(rank(), shape) for shape in _SHAPES]
    if overflow:
        gradients[0].fill_(torch.inf)
    made: bool = own.scaled_step(scaler, gradients, used=used)
    return made


def _compressed(codec: str) -> SyncPlan:
    large = ClassPlan(codec=codec, ratio=0.1, rank=1)
    return SyncPlan(ExchangePlan(large=large), {"large": ("p1",)})


def _gradient(seed: int, shape: tuple[int, ...] = (16, 16)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_step_that_one_rank_skips_counts_in_its_trial(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks of a trial vote, and end, after the same step."""
    told: Counter[int] = Counter()
    run = SimpleNamespace(
        averaged_between_steps=lambda _: None, optimizer_stepped=lambda _: told.update([rank()])
    )
    monkeypatch.setattr(current, "run", run)
    ThreadRanks(2).run(lambda: bool(_rounds(begin)))
    assert told == {0: 1}
