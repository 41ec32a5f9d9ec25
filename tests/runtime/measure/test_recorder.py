from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvd_autosync.runtime.measure.recorder import Recorder


def test_steps_are_timed_from_end_to_end(clock: Any) -> None:
    recorder = Recorder()
    recorder.end_step()
    clock.now += 20
    recorder.blocked += 5
    recorder.end_step()
    recorder.end_step()
    assert recorder.step_s == [1, 21, 1]
    assert recorder.blocked_s == [0, 5, 0]


def test_a_step_is_timed_in_seconds() -> None:
    recorder = Recorder()
    time.sleep(0.02)
    recorder.end_step()
    assert recorder.step_s[0] >= 0.019


def test_a_pause_is_in_no_step(clock: Any) -> None:
    recorder = Recorder()
    recorder.end_step()
    clock.now += 50
    recorder.restart_clock()
    recorder.end_step()
    assert recorder.step_s == [1, 1]


def test_news_say_which_steps_are_unlike_the_others() -> None:
    recorder = Recorder()
    for typical in (False, True, False):
        recorder.end_step(typical=typical)
    assert recorder.take_news(wait_for_device=False)["untypical"] == [0, 2]
    recorder.end_step(typical=False)
    assert recorder.take_news(wait_for_device=False)["untypical"] == [3]


def test_news_say_that_the_current_step_is_unlike_the_others() -> None:
    recorder = Recorder()
    recorder.unlike += 2
    assert recorder.take_news(wait_for_device=False)["unlike"] == 2
    recorder.end_step()
    assert recorder.take_news(wait_for_device=False)["unlike"] == 0


def test_news_are_handed_over_once() -> None:
    recorder = Recorder()
    for loss in (1.0, 2.0):
        recorder.losses.seen(torch.tensor(loss))
        recorder.end_step()
    recorder.end_step()
    first = recorder.take_news(wait_for_device=False)
    assert first["first"] == 0
    assert first["losses"] == [1.0, 2.0]
    assert len(first["step_s"]) == len(first["blocked_s"]) == 3
    assert recorder.take_news(wait_for_device=False) == {
        "type": "steps",
        "first": 3,
        "step_s": [],
        "blocked_s": [],
        "losses": [],
        "in_round": [],
        "several_losses": False,
        "untypical": [],
        "unlike": 0,
    }


def test_the_losses_of_a_step_are_one() -> None:
    recorder = Recorder()
    for step in range(2):
        for loss in (1.0, 2.0 + step):
            recorder.losses.seen(torch.tensor(loss))
        recorder.end_step()
    assert recorder.take_news(wait_for_device=False)["losses"] == [3.0, 4.0]


def test_several_losses_are_told() -> None:
    recorder = Recorder()
    optimizers = [torch.optim.SGD([torch.ones(1)], lr=0.1) for _ in range(2)]
    for _ in range(2):
        for optimizer in optimizers:
            recorder.losses.seen(torch.tensor(1.0))
            recorder.losses.stepped(optimizer)
        recorder.end_step()
    assert recorder.take_news(wait_for_device=False)["several_losses"] is True
    recorder.losses.report(torch.tensor(1.0))
    assert recorder.take_news(wait_for_device=False)["several_losses"] is False


def test_losses_within_rounds_are_told_by_their_positions() -> None:
    apart = iter([False, True, True, False, True])
    recorder = Recorder(lambda: next(apart))

    def loss() -> None:
        recorder.losses.seen(torch.tensor(1.0))
        recorder.end_step()

    for _ in range(3):
        loss()
    assert recorder.take_news(wait_for_device=False)["in_round"] == [1, 2]
    recorder.end_step()  # a step without a loss
    loss()
    loss()
    assert recorder.take_news(wait_for_device=False)["in_round"] == [1]


def test_a_step_whose_loss_is_left_out_repeats_the_last_one() -> None:
    recorder = Recorder()
    for step, loss in enumerate([math.nan, 1.0, math.nan, math.nan, 2.0]):
        recorder.losses.seen(torch.tensor(loss))
        with recorder.losses.skipping() if math.isnan(loss) else contextlib.nullcontext():
            recorder.end_step()
        if step == 1:  # what was sent is repeated, too
            assert recorder.take_news(wait_for_device=False)["losses"] == [1.0]
    assert recorder.take_news(wait_for_device=False)["losses"] == [1.0, 1.0, 2.0]


def test_infinite_losses_are_missing_numbers() -> None:
    recorder = Recorder()
    for loss in (math.nan, math.inf, 0.5):
        recorder.losses.seen(torch.tensor(loss, dtype=torch.float64))
        recorder.end_step()
    assert recorder.take_news(wait_for_device=False)["losses"] == [None, None, 0.5]


def test_losses_on_a_device_wait() -> None:
    recorder = Recorder()
    recorder.losses.seen(torch.empty((), device="meta"))
    recorder.end_step()
    news = recorder.take_news(wait_for_device=False)
    assert news["losses"] == []
    assert len(news["step_s"]) == 1
    with pytest.raises(RuntimeError, match=r"[Mm]eta"):  # only now it is looked at
        recorder.take_news(wait_for_device=True)


def test_a_step_costs_little_more_than_what_it_writes_down() -> None:
    def processor_s(step: Callable[[], None]) -> float:
        begin = time.process_time()
        for _ in range(20_000):
            step()
        return time.process_time() - begin

    times: list[float] = []

    def write_down() -> None:
        times.append(time.perf_counter())
        times.append(0.0)

    least = min(processor_s(Recorder().end_step) for _ in range(5))
    assert least < 5 * min(processor_s(write_down) for _ in range(5))
