from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from hvd_autosync.cost.gradients import Gradients
from hvd_autosync.runtime.measure.profiler import Profiler, _DeviceClock
from hvd_autosync.search_space import ModelProfile


def wrapped(model: nn.Module) -> Any:
    """An optimizer that looks like one that Horovod wrapped."""
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer._parameter_names = {parameter: name for name, parameter in model.named_parameters()}
    return optimizer


def untimed(gradient: torch.Tensor) -> float:
    """Nobody asks what a code of it would take."""
    return 0.0


def profile(
    model: nn.Module,
    steps: int = 3,
    passes: int = 1,
    load: Callable[[], None] = lambda: None,
    seconds_to_code: Callable[[torch.Tensor], float] = untimed,
) -> Any:
    profiler = Profiler([wrapped(model)], seconds_to_code)
    for _ in range(steps):
        load()
        for _ in range(passes):
            loss = model(torch.randint(5, (3,))).sum()
            profiler.backward_begins()
            loss.backward()
            profiler.backward_ends()
        profiler.step_ends()
    return profiler.finish()


def test_order_and_times_of_arrival() -> None:
    seen = profile(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(3, 2)))
    by_order = sorted(seen.parameters, key=lambda p: p.ready_order)
    assert by_order[-1].name == "0.weight"
    assert {p.name for p in by_order[:2]} == {"2.weight", "2.bias"}
    assert [p.name for p in seen.parameters][:2] == ["0.weight", "1.weight"]
    times = [p.ready_s for p in by_order]
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < seen.backward_s
    assert seen.parameters[1].shape == (3, 4)
    assert seen.parameters[1].dtype == "float32"
    assert ModelProfile.from_json(seen.to_json()) == seen


def test_shares_of_bytes_that_bits_need() -> None:
    """Of dense gradients that are not small, in the first step; traces without them are read."""

    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.halves, self.zeros, self.small = (
                nn.Parameter(torch.zeros(size)) for size in (20_000, 20_000, 100)
            )
            self.unused = nn.Parameter(torch.zeros(20_000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            draw = torch.Generator().manual_seed(1)
            gradient = torch.randn(20_000, generator=draw).to(torch.bfloat16).float()
            return (self.halves * gradient + self.zeros * 0).sum() + self.small.sum()

    seen = profile(Weights(), seconds_to_code=lambda gradient: len(gradient) * 1e-9)
    assert {p.name: p.coding_s for p in seen.parameters} == {
        "halves": 2e-5,
        "zeros": 2e-5,
        "small": 0.0,
        "unused": 0.0,
    }
    shares = {p.name: (p.coded_share, p.summed_share) for p in seen.parameters}
    assert 0.3 < shares["halves"][0] < 0.37 and 0.8 < shares["halves"][1] < 0.87
    assert max(shares["zeros"]) < 0.01
    assert shares["small"] == shares["unused"] == (1.0, 1.0)
    assert ModelProfile.from_json(seen.to_json()) == seen
    fields = seen.to_json()
    for parameter in fields["parameters"]:
        parameter.pop("coded_share", None)
        parameter.pop("summed_share", None)
        parameter.pop("coding_s", None)
    older = ModelProfile.from_json(fields)
    assert older.parameters[0].coded_share == 1.0
    assert older.parameters[0].coding_s == 0.0
    assert older.to_json() == fields


def test_sparse_gradients() -> None:
    seen = profile(nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)))
    assert [p.sparse for p in seen.parameters] == [True, False, False]


def test_sparse_gradients_repeat_rows() -> None:
    """A batch of eight has at most five different rows; records leave out what is unknown."""
    table = nn.Embedding(5, 4, sparse=True)
    seen = profile(nn.Sequential(Repeated(), table), steps=1).parameters[0]
    assert (seen.stored_rows, seen.touched_rows) == (8 / 5, 2 / 5)
    assert profile(nn.Embedding(5, 4), steps=1).parameters[0].stored_rows == 0.0
    assert "stored_rows" not in replace(seen, stored_rows=0.0).to_json()


class Repeated(nn.Module):
    """The same rows, whatever the batch is."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.tensor([0, 1, 1, 1, 0, 1, 0, 0])


def test_parameters_without_gradient() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    model.add_module("unused", None)
    model[1].bias.requires_grad_(False)
    model.unused = nn.Linear(2, 2)  # type: ignore[assignment]
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    seen = profile(model)
    orders = {p.name: p.ready_order for p in seen.parameters}
    assert orders == {
        "0.weight": 1,
        "1.weight": 0,
        "1.bias": -1,
        "unused.weight": 2,
        "unused.bias": 3,
    }
    # Ranks exchange zeros for the unused layer, at the end of backward.
    gradients = Gradients.of(ModelProfile.from_json(seen.to_json()))
    assert gradients.size_bytes.sum() == (5 * 4 + 4 * 3 + 2 * 2 + 2) * 4
    assert (gradients.ready_s[2:] >= gradients.ready_s[1]).all()


def test_parameters_that_were_added_later_are_left_out() -> None:
    optimizer = wrapped(nn.Linear(4, 3))
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    assert [p.name for p in Profiler([optimizer], untimed).finish().parameters] == [
        "weight",
        "bias",
    ]


def test_last_of_several_passes_counts(clock: Any) -> None:
    seen = profile(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)), passes=3)
    assert sorted(p.ready_order for p in seen.parameters) == [0, 1, 2]
    assert sorted(p.ready_s for p in seen.parameters) == [1, 2, 3]
    assert seen.backward_s == 4
    # What comes before the last pass is time in which nothing is sent.
    assert seen.forward_s == 11


def test_forward_includes_loading(clock: Any) -> None:
    def load() -> None:
        clock.now += 20

    assert profile(nn.Embedding(5, 4), load=load).forward_s == 21


def test_the_step_in_which_gradients_are_looked_at_is_not_timed(clock: Any) -> None:
    """Unless it is the only one."""
    seconds = iter([1000, 0, 1000])

    def load() -> None:
        clock.now += next(seconds)

    assert profile(nn.Embedding(5, 4), load=load, steps=2).forward_s == 1
    assert profile(nn.Embedding(5, 4), load=load, steps=1).forward_s == 1001


def test_a_gradient_that_arrives_in_the_first_step_only_has_its_place_and_time() -> None:
    layers = nn.ModuleList([nn.Embedding(5, 4), nn.Embedding(5, 4)])
    profiler = Profiler([wrapped(layers)], untimed)
    for step in range(3):
        used = layers if step == 0 else layers[:1]
        loss = sum(layer(torch.tensor([1])).sum() for layer in used)
        profiler.backward_begins()
        loss.backward()
        profiler.backward_ends()
        profiler.step_ends()
    seen = profiler.finish().parameters
    assert {p.ready_order for p in seen} == {0, 1}
    assert all(p.ready_s > 0 for p in seen)


def test_leaves_no_hooks() -> None:
    model = nn.Linear(2, 2)
    profiler = Profiler([wrapped(model)], untimed)
    assert model.weight._post_accumulate_grad_hooks
    profiler.finish()
    assert not model.weight._post_accumulate_grad_hooks


@pytest.mark.parametrize("optimizers", [[], [wrapped(nn.Linear(2, 2))]])
def test_nothing_seen(optimizers: list[Any]) -> None:
    seen = Profiler(optimizers, untimed).finish()
    assert seen.wrapped == bool(optimizers)
    assert math.isnan(seen.forward_s) and math.isnan(seen.backward_s)
    assert all(p.ready_order == -1 and math.isnan(p.ready_s) for p in seen.parameters)


def test_device_clock_counts_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return 250.0  # milliseconds, as CUDA counts

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = _DeviceClock()
    assert clock.seconds(clock.now(), clock.now()) == 0.25
