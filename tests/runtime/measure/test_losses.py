"""What is taken as the loss of a step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import pytest
import torch

from hvd_autosync.runtime.measure.losses import Losses


class Optimizer:
    """Something that is not the other."""


def number(ended: tuple[torch.Tensor | None, int, bool]) -> float | None:
    loss, _, _ = ended
    return None if loss is None else float(loss)


def test_a_loss_stays_what_it_was_when_it_was_seen() -> None:
    losses, loss = Losses(), torch.tensor([4.0])
    losses.seen(loss)
    loss /= 2
    kept = losses.end_step(0)[0]
    assert kept is not None and kept.shape == () and float(kept) == 4.0
    assert losses.end_step(1)[0] is None


def test_what_the_script_reports_counts_instead_of_what_is_seen() -> None:
    losses = Losses()
    losses.report(torch.tensor(1.0))
    losses.seen(torch.tensor(2.0))
    assert number(losses.end_step(0)) == 1.0


def test_the_last_report_of_a_step_counts() -> None:
    losses = Losses()
    for loss in (1.0, 2.0):
        losses.seen(torch.tensor(9.0))
        losses.report(torch.tensor(loss))
    assert number(losses.end_step(0)) == 2.0


def test_the_loss_of_gradients_that_were_dropped_is_no_part_of_the_next() -> None:
    """They are dropped before the next ``backward()``, or seen to be after it."""
    losses = Losses()
    losses.seen(torch.tensor(math.nan))
    losses.may_skip()
    losses.seen(torch.tensor(1.0))
    assert number(losses.end_step(0)) == 1.0
    losses.seen(torch.tensor(math.nan))
    losses.seen(torch.tensor(2.0))
    losses.dropped()
    losses.seen(torch.tensor(3.0))
    assert number(losses.end_step(2)) == 5.0
    losses.dropped()
    assert number(losses.end_step(2)) == 5.0, "the step has ended"


def left_out(order: str) -> list[float | None]:
    """Return the losses of a component that ends each step.

    Args:
        order: ``b`` is a ``backward()``, ``r`` a report of its loss, ``s`` a step of the optimizer,
            ``k`` one that is counted as skipped, ``u`` an update of a scaler, or a ``zero_grad()``,
            after one that nothing counts, ``d`` a ``backward()`` that finds its gradients dropped,
            ``m`` a mark. Losses are numbered from 1.
    """
    losses, optimizer, seen, loss = Losses(), Optimizer(), 0, 0
    taken: list[float | None] = []
    for each in order:
        if each == "b":
            loss += 1
            losses.seen(torch.tensor(float(loss)))
        elif each == "r":
            losses.report(torch.tensor(float(loss)))
        elif each == "u":
            losses.may_skip()
        elif each == "d":
            losses.dropped()
        elif each == "m":
            _, seen, skipped = ended = losses.end_step(seen)
            taken.append(math.nan if skipped else number(ended))
        else:
            with losses.skipping() if each == "k" else contextlib.nullcontext():
                losses.stepped(optimizer)
                ended = losses.end_step(seen)
            _, seen, skipped = ended
            taken.append(math.nan if skipped else number(ended))
    return taken


@pytest.mark.parametrize(
    ("order", "taken"),
    [
        ("bs bk bs", [1, math.nan, 3]),
        ("bs bu bk s bs", [1, math.nan, 3, 4]),
        ("brs brk brs", [1, math.nan, 3]),
        ("bsr bkr bsr bsr", [1, 1, math.nan, 3]),
        ("bsr bur bsr bsr", [1, math.nan, 3]),
        ("bsr bk bsr bsr", [1, 1, None, 3]),
        ("bsr br u bsr bsr", [1, math.nan, 3]),
        ("bsr br bd sr bsr", [1, math.nan, 3]),
        ("bsr bru bsr bsr", [1, math.nan, 3]),
        ("bum bum bum", [1, 2, 3]),
        ("burm burm", [1, 2]),
    ],
    ids=[
        "at once",
        "later",
        "reported",
        "reported later",
        "not counted",
        "not reported",
        "refused and reported",
        "dropped and reported",
        "reported before the update",
        "no optimizer of ours",
        "reported without one",
    ],
)
def test_the_loss_of_a_skipped_step_is_left_out(order: str, taken: list[float | None]) -> None:
    assert left_out(order.replace(" ", "")) == pytest.approx(taken, nan_ok=True)


def test_a_mark_after_a_step_that_was_counted_as_skipped_takes_no_loss() -> None:
    losses, optimizer = Losses(), Optimizer()
    losses.seen(torch.tensor(1.0))
    losses.stepped(optimizer)
    assert number(losses.end_step(0)) == 1.0
    losses.seen(torch.tensor(math.nan))
    with losses.skipping():
        losses.stepped(optimizer)
    losses.may_skip()
    assert losses.end_step(1) == (None, 1, True)
    losses.seen(torch.tensor(3.0))
    losses.stepped(optimizer)
    assert number(losses.end_step(1)) == 3.0


@pytest.mark.parametrize("by_optimizer", [True, False])
def test_losses_of_one_step_are_added_up(by_optimizer: bool) -> None:
    losses, optimizer, sums = Losses(), Optimizer(), []
    for step in range(3):
        before = losses.count
        for part in (torch.tensor([1.0]), torch.tensor(10.0), torch.tensor(100.0 * step)):
            losses.seen(part)
            part.zero_()
        if by_optimizer:
            losses.stepped(optimizer)
        # Several components may end the step.
        sums.append([number(losses.end_step(count)) for count in (before, 0, losses.count)])
    assert sums == [[11.0, 11.0, None], [111.0, 111.0, None], [211.0, 211.0, None]]


def test_a_step_that_no_one_has_asked_for_is_in_no_other() -> None:
    losses, optimizer = Losses(), Optimizer()
    for loss in (1.0, 2.0):
        losses.seen(torch.tensor(loss))
        losses.stepped(optimizer)
    assert number(losses.end_step(0)) == 2.0


def test_a_sum_of_half_precision_is_in_single_precision() -> None:
    losses = Losses()
    for loss in (torch.tensor(60000.0, dtype=torch.float16), torch.tensor(6e4).bfloat16()):
        losses.seen(loss)
    losses.seen(torch.tensor(0.25, dtype=torch.float64))
    assert number(losses.end_step(0)) == 60000.0 + float(torch.tensor(6e4).bfloat16()) + 0.25


def test_a_sum_with_a_loss_that_is_not_finite_is_not_finite() -> None:
    for parts in ((math.nan, 1.0), (1.0, math.inf), (math.inf, -math.inf)):
        losses = Losses()
        for part in parts:
            losses.seen(torch.tensor(part))
        kept = losses.end_step(0)[0]
        assert kept is not None and not math.isfinite(float(kept))


def several(order: Sequence[str]) -> bool:
    """Return whether several losses are seen; ``-`` is a loss, a letter a step of an optimizer."""
    losses = Losses()
    optimizers = {name: Optimizer() for name in "dgh"}
    for each in order:
        if each == "-":
            losses.seen(torch.tensor(1.0))
        else:
            for _ in range(2):  # two components tell
                losses.stepped(optimizers[each])
    return losses.several


@pytest.mark.parametrize("order", ["-d-g", "--d-g", "-d-d-d-g", "-d-g-h", "-d-gh"])
def test_optimizers_have_losses_of_their_own(order: str) -> None:
    assert several(2 * order)


@pytest.mark.parametrize(
    "order",
    [
        "-d-d-d-d",
        "-dg-dg-dg",
        "--dg--dg--dg",
        "-dg-gd-dg-gd",  # in any order
        "-d-d-gd-d-d-gd-d-d-gd",  # one of them rarely
        "-d-d-d-g-g-g-h-h-h",  # one replaces the other
        "-dgdg-dgdg",
    ],
)
def test_optimizers_that_share_each_loss_have_none_of_their_own(order: str) -> None:
    assert not several(order)


def test_a_script_that_reports_has_one_loss() -> None:
    losses, optimizers = Losses(), (Optimizer(), Optimizer())
    for _ in range(3):
        for optimizer in optimizers:
            losses.seen(torch.tensor(1.0))
            losses.stepped(optimizer)
        losses.report(torch.tensor(2.0))
    assert not losses.several


class Rounds:
    """Local steps in rounds of three, as a script makes them.

    Attributes:
        found: For each loss, whether replicas differed.
        late: For each loss, whether it was reported after its step.
    """

    def __init__(self, order: Sequence[str]) -> None:
        self.done, self.found, self.late = 0, list[bool](), list[bool]()
        losses, optimizer = Losses(lambda: self.done > 0), Optimizer()
        for _ in range(6):
            for each in order:
                if each == "backward":
                    losses.seen(torch.tensor(1.0))
                elif each == "step":
                    losses.stepped(optimizer)
                    self.done = (self.done + 1) % 3
                else:
                    losses.report(torch.tensor(1.0))
                    self.found.append(losses.in_round)
                    self.late.append(losses.late)


@pytest.mark.parametrize(
    "order",
    [
        ["backward", "report", "step"],
        ["report", "backward", "step"],
        ["backward", "step", "report"],
        ["backward", "backward", "step", "report"],
        ["report", "step"],
    ],
)
def test_replicas_are_those_of_the_reported_loss(order: list[str]) -> None:
    rounds = Rounds(order)
    assert rounds.found == [False, True, True] * 2
    assert rounds.late == [order[-1] == "report"] * 6


def test_replicas_are_those_of_the_last_loss_of_a_step() -> None:
    states = iter([False, True])
    losses = Losses(lambda: next(states))
    for _ in range(2):
        losses.seen(torch.tensor(1.0))
    assert losses.in_round
